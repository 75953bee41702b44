package network

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// A path of a namespace is used again: another's pod must not be given our routes.
func TestThePodOfAPathIsTheRecords(t *testing.T) {
	t.Parallel()
	pod := nstest.New(t)
	cookie, err := pod.Cookie()
	must.Succeed(t, err)
	for want, is := range map[uint64]bool{cookie: true, cookie + 1: false, 0: false} {
		ns, err := netns.OpenSame(nstest.Path(t, pod), want)
		expect.Equal(t, err == nil, is, "with cookie %d of %d: %v", want, cookie, err)
		if err == nil {
			ns.Close()
		}
	}
}

// dualStack is what host-local gives: an address of each family, with gateways.
func dualStack() []ipam.Address {
	list := addresses("10.61.0.2/24", "fd61::2/64")
	list[0].Gateway, list[1].Gateway = netip.MustParseAddr("10.61.0.1"), netip.MustParseAddr("fd61::1")
	return list
}

func TestDefaultRoutes(t *testing.T) {
	t.Parallel()
	const on, off = true, false
	four := route.Route{Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.61.0.1")}
	six := route.Route{Dst: netip.MustParsePrefix("::/0"), Gateway: netip.MustParseAddr("fd61::1")}
	given := route.Route{Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.61.0.9")}
	elsewhere := route.Route{Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.61.0.9"), Table: 100}
	main := route.Route{Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.61.0.9"), Table: 254}
	half := route.Route{Dst: netip.MustParsePrefix("0.0.0.0/1")}
	for _, tt := range []struct {
		name      string
		defaults  bool
		addresses []ipam.Address
		given     []route.Route
		want      []route.Route
	}{
		{"each family that has a gateway", on, dualStack(), nil, []route.Route{four, six}},
		{"IPv4 alone", on, dualStack()[:1], nil, []route.Route{four}},
		{"a family without a gateway", on, addresses("10.61.0.2/24"), nil, nil},
		{"the first gateway of a family", on, append(addresses("10.60.0.2/24"), dualStack()...), nil, []route.Route{four, six}},
		{"not where the ipam gave one", on, dualStack(), []route.Route{given}, []route.Route{given, six}},
		{"nor where it named the main table for it", on, dualStack(), []route.Route{main}, []route.Route{main, six}},
		{"one of another table is none", on, dualStack()[:1], []route.Route{elsewhere}, []route.Route{elsewhere, four}},
		{"half of everything is none", on, dualStack()[:1], []route.Route{half}, []route.Route{half, four}},
		{"no default gateway", off, dualStack(), []route.Route{half}, []route.Route{half}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			before := append([]route.Route(nil), tt.given...)
			got := withDefaults(tt.defaults, tt.addresses, tt.given)
			expect.NoDiff(t, cmp.Diff(tt.want, got, netipValues(), cmpopts.EquateEmpty()), "routes")
			if diff := cmp.Diff(before, tt.given, netipValues()); diff != "" {
				t.Errorf("the ipam's own list was changed: %s", diff)
			}
		})
	}
}
