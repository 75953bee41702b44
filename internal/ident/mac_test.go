package ident

import (
	"net/netip"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestRandomMACsAreForOneAndOurOwn(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for range 1000 {
		mac := RandomMAC()
		must.That(t, len(mac) == 6 && mac[0]&1 == 0 && mac[0]&2 != 0,
			"%v is no unicast MAC of the locally administered kind", mac)
		seen[mac.String()] = true
	}
	expect.That(t, len(seen) == 1000, "%d of 1000 differ", len(seen))
}

func TestMACOfFollowsFromTheAddresses(t *testing.T) {
	t.Parallel()
	list := []netip.Addr{netip.MustParseAddr("fd61::2"), netip.MustParseAddr("10.61.0.2"), netip.MustParseAddr("10.61.0.3")}
	got := MACOf(list)
	expect.That(t, got.String() == "0a:58:0a:3d:00:02", "MAC is %s", got)
	got = MACOf(list[:1])
	expect.Equal(t, got.String(), "0a:e5:51:05:70:7e", "the MAC of "+list[0].String())
	got = MACOf(nil)
	expect.That(t, got == nil, "MAC without addresses: %s", got)
}
