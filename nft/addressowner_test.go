package nft

import (
	"errors"
	"io/fs"
	"net/netip"
	"testing"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

func TestHolderSaysWhoseAnAddressIs(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	own4, own6 := netip.MustParseAddr("10.22.0.5"), netip.MustParseAddr("fd00:22::5")
	got, err := c.AddressOwner(t.Context(), "cbr0", own4)
	expect.That(t, got == nil && err == nil, "without a table: %v, %v", got, err)
	mustEnsure(t, c, podnet())
	mustAdd(t, c, pod("00000000001", "10.22.0.5", "fd00:22::5"))
	nft(t, ns, "add element inet tombolo pods4 { cbr0 . 10.22.9.9 comment \"by hand\" }")
	for _, tt := range []struct {
		bridge string
		a      netip.Addr
		held   bool
		owner  Owner
	}{
		{"cbr0", own4, true, "00000000001"},
		{"cbr0", own6, true, "00000000001"},
		{"cbr0", netip.AddrFrom16(own4.As16()), true, "00000000001"},
		{"cbr0", netip.MustParseAddr("10.22.9.9"), true, ""},
		{"cbr0", netip.MustParseAddr("10.22.0.6"), false, ""},
		{"cbr1", own4, false, ""},
	} {
		got, err := c.AddressOwner(t.Context(), tt.bridge, tt.a)
		expect.That(t, err == nil && (got != nil) == tt.held && (!tt.held || got.Owner == tt.owner),
			"%s behind %s: %v, %v", tt.a, tt.bridge, got, err)
	}
	for bridge, a := range map[string]netip.Addr{"": own4, "cbr0": {}, "too/long": own4} {
		_, err := c.AddressOwner(t.Context(), bridge, a)
		expect.That(t, errors.Is(err, fs.ErrInvalid) || errors.Is(err, tombolo.ErrInvalid), "%s behind %q: %v", a, bridge, err)
	}
}
