package endpoint

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// comparable values of netip are compared as such.
func netipValues() cmp.Option { return cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}) }

func manyAddrs(n int) []netip.Addr {
	var list []netip.Addr
	for i := range n {
		list = append(list, netip.MustParseAddr(fmt.Sprintf("2001:db8:1111:2222:3333:4444:5555:%x", 0x1000+i)))
	}
	return list
}

func TestAliasComesBackAsItWas(t *testing.T) {
	t.Parallel()
	hash := ident.Hash("pods", "c1", "eth0")
	long := strings.Repeat("n", 250) // the longest name of a network
	for _, tt := range []struct {
		name      string
		network   string
		addresses []netip.Addr
		want      string
		lost      bool // the addresses do not fit
	}{
		{"dual-stack", "pods", nstest.Addrs("10.61.0.2", "fd61::2"), "tombolo:1:" + hash + ":pods:10.61.0.2,fd61::2", false},
		{"no address", "pods", nil, "tombolo:1:" + hash + ":pods:", false},
		{"a long network", long, nstest.Addrs("10.61.0.2"), "tombolo:1:" + hash + ":#" + ident.Hash(long, "", "") + ":10.61.0.2", false},
		{"the longest name that stays", long[:64], nstest.Addrs("fd61::2"), "tombolo:1:" + hash + ":" + long[:64] + ":fd61::2", false},
		{"too many addresses", "pods", manyAddrs(9), "tombolo:1:" + hash + ":pods:", true},
		{"too many for a long network", long, manyAddrs(6), "tombolo:1:" + hash + ":#" + ident.Hash(long, "", "") + ":", true},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			got := Alias(hash, tt.network, tt.addresses)
			expect.Equal(t, got, tt.want, "alias")
			want := Mark{Hash: hash, Network: NetworkToken(tt.network), Addresses: tt.addresses}
			if tt.lost {
				want.Addresses = nil
			}
			back, ok := ParseAlias(got)
			diff := cmp.Diff(want, back, netipValues())
			expect.That(t, diff == "" && ok, "read back: %t (-want +got):\n%s", ok, diff)
			if !strings.HasPrefix(got, AliasOwner(hash)) {
				t.Errorf("the alias does not begin with its owner's %q", AliasOwner(hash))
			}
		})
	}
}

func TestAliasFillsTheKernelsBufferAndNoMore(t *testing.T) {
	t.Parallel()
	hash := ident.Hash("pods", "c1", "eth0")
	lengths := map[bool]int{}
	for n := range 64 {
		network := strings.Repeat("n", n+1)
		for count := range 10 {
			got := Alias(hash, network, manyAddrs(count))
			must.That(t, len(got) <= 255, "%d bytes: %s", len(got), got)
			a, _ := ParseAlias(got)
			lengths[len(a.Addresses) == count] = max(lengths[len(a.Addresses) == count], len(got))
		}
	}
	expect.Equal(t, lengths[true], 255, "the longest alias with its addresses has %d bytes: one of 255 would do", lengths[true])
}

func TestAliasesOfOthers(t *testing.T) {
	t.Parallel()
	for _, s := range []string{
		"", "eth0", "tombolo", "tombolo:1:", "tombolo:1:0123456789a", "tombolo:1:0123456789a:pods", "tombolo:2:0123456789a:pods:10.0.0.1",
		"tombolo:1:0123456789:pods:10.0.0.1", "tombolo:1:0123456789ab:pods:10.0.0.1", "tombolo:1:::", " tombolo:1:0123456789a:pods:",
		"tombolo:1:0123456789A:pods:", "tombolo:1:0123456789/:pods:", "tombolo:1:0123456789x:pods:",
	} {
		a, ok := ParseAlias(s)
		expect.That(t, !ok, "%q is taken for %+v", s, a)
	}
	// What a later version may add to the addresses is passed over.
	a, ok := ParseAlias("tombolo:1:0123456789a:pods:10.0.0.1,later,fd00::1")
	diff := cmp.Diff(nstest.Addrs("10.0.0.1", "fd00::1"), a.Addresses, netipValues())
	expect.That(t, diff == "" && ok, "addresses (-want +got):\n%s", diff)
}

func TestNetworkTokensDiffer(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("n", 65)
	a, b := NetworkToken(long+"a"), NetworkToken(long+"b")
	expect.That(t, a != b && len(a) <= 64 && !ident.IsIdentifier(a), "long names give %q and %q", a, b)
	expect.Equal(t, NetworkToken(long[:64]), long[:64], "a name of 64 bytes gives")
}

func FuzzAlias(f *testing.F) {
	f.Fuzz(func(t *testing.T, data []byte) {
		a, ok := ParseAlias(string(data))
		if !ok {
			return
		}
		expect.That(t, len(a.Hash) == ident.Digits && !strings.Contains(a.Network, ":") &&
			strings.HasPrefix(string(data), AliasOwner(a.Hash)),
			"%q gives %+v", data, a)
		if NetworkToken(a.Network) != a.Network || slices.ContainsFunc(a.Addresses, func(ip netip.Addr) bool { return ip.Zone() != "" }) {
			return // no alias of ours
		}
		back, ok := ParseAlias(Alias(a.Hash, a.Network, a.Addresses))
		if len(back.Addresses) == 0 {
			a.Addresses = nil // they may be too many
		}
		diff := cmp.Diff(a, back, netipValues())
		expect.That(t, diff == "" && ok, "%q comes back as (-want +got):\n%s", data, diff)
	})
}
