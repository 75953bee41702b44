package network

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

func through(prefix, host, atADD string) state.HostGateway {
	one := state.HostGateway{Of: netip.MustParsePrefix(prefix)}
	if host != "" {
		one.Host = netip.MustParseAddr(host)
	}
	if atADD != "" {
		one.HostAtADD = netip.MustParseAddr(atADD)
	}
	return one
}

func TestAnAddressRemembersTheHostsOfItsADD(t *testing.T) {
	t.Parallel()
	pod := netip.MustParsePrefix("10.0.0.9/24")
	var list state.HostGateways
	for _, tt := range []struct{ own, want, atADD string }{
		{"10.0.0.5", "10.0.0.5", ""},
		{"10.0.0.5", "10.0.0.5", ""},
		{"10.0.0.6", "10.0.0.6", "10.0.0.5"},
		{"10.0.0.7", "10.0.0.7", "10.0.0.5"},
		{"10.0.0.5", "10.0.0.5", "10.0.0.5"},
	} {
		list.Set(pod, netip.MustParseAddr(tt.own))
		if want := through("10.0.0.9/24", tt.want, tt.atADD); list.Of(pod) != want {
			t.Errorf("through %s: %+v, want %+v", tt.own, list.Of(pod), want)
		}
	}
}

// CHECK compares with the result of ADD, of which just this one thing is another by now.
func TestCheckWantsTheDefaultRouteByTheHostsPresentAddress(t *testing.T) {
	t.Parallel()
	rt := func(dst, via string) route.Route {
		r := route.Route{Dst: netip.MustParsePrefix(dst)}
		if via != "" {
			r.Gateway = netip.MustParseAddr(via)
		}
		return r
	}
	list := []route.Route{rt("0.0.0.0/0", "10.0.0.5"), rt("10.9.0.0/16", "10.0.0.5"), rt("0.0.0.0/0", "10.0.0.1"), rt("::/0", "fe80::1"), rt("0.0.0.0/0", "")}
	rec := &state.Attachment{HostGateways: state.HostGateways{through("10.0.0.9/24", "10.0.0.6", "10.0.0.5"), through("fd00::9/64", "", "")}}
	want := []route.Route{rt("0.0.0.0/0", "10.0.0.6"), rt("10.9.0.0/16", "10.0.0.5"), rt("0.0.0.0/0", "10.0.0.1"), rt("::/0", "fe80::1"), rt("0.0.0.0/0", "")}
	expect.NoDiff(t, cmp.Diff(want, led(rec, list), cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})))
	if list[0].Gateway.String() != "10.0.0.5" {
		t.Error("the result itself was changed")
	}
}

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

func TestARouteIsReplacedOverBothFamilies(t *testing.T) {
	t.Parallel()
	pod, host := nstest.New(t), nstest.New(t)
	nstest.Veth(t, pod, "eth0", host, "veth0")
	routes, err := route.Dial(pod)
	must.Succeed(t, err)
	defer routes.Close()
	for _, tt := range []struct{ family, address, old, next string }{
		{"-4", "10.0.0.9/24", "10.0.0.5", "10.0.0.6"},
		{"-6", "fd00::9/64", "fd00::5", "fd00::6"},
	} {
		nstest.Run(t, pod, "ip", tt.family, "address", "add", tt.address, "dev", "eth0")
		nstest.Run(t, pod, "ip", tt.family, "route", "add", "default", "via", tt.old, "dev", "eth0", "metric", "77")
		list, err := routes.List(t.Context(), route.Filter{Family: nl.FamilyOf(netip.MustParseAddr(tt.old)), Table: unix.RT_TABLE_MAIN})
		must.Succeed(t, err)
		for _, r := range list {
			if r.Dst.Bits() != 0 {
				continue
			}
			n := r
			n.Gateway, n.Flags = netip.MustParseAddr(tt.next), 0
			must.Succeed(t, replaceRoute(t.Context(), routes, r, n))
		}
		out := nstest.Run(t, pod, "ip", tt.family, "route", "show", "default")
		if strings.Count(out, "default") != 1 || !strings.Contains(out, "via "+tt.next+" dev eth0") || !strings.Contains(out, "metric 77") {
			t.Errorf("the default routes are:\n%s", out)
		}
	}
}
