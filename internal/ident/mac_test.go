package ident

import (
	"net/netip"
	"testing"
)

func TestRandomMACsAreForOneAndOurOwn(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for range 1000 {
		mac := RandomMAC()
		if len(mac) != 6 || mac[0]&1 != 0 || mac[0]&2 == 0 {
			t.Fatalf("%v is no unicast MAC of the locally administered kind", mac)
		}
		seen[mac.String()] = true
	}
	if len(seen) != 1000 {
		t.Errorf("%d of 1000 differ", len(seen))
	}
}

func TestMACOfIsThatOfTheFirstIPv4Address(t *testing.T) {
	t.Parallel()
	list := []netip.Addr{netip.MustParseAddr("fd61::2"), netip.MustParseAddr("10.61.0.2"), netip.MustParseAddr("10.61.0.3")}
	if got := MACOf(list); got.String() != "0a:58:0a:3d:00:02" {
		t.Errorf("MAC is %s", got)
	}
	if got := MACOf(list[:1]); got != nil {
		t.Errorf("MAC without IPv4 is %s", got)
	}
	if got := MACOf(nil); got != nil {
		t.Errorf("MAC without addresses: %s", got)
	}
}
