package keeper

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/route"
)

// leaseOf is a lease of an address with a default router, unless that is empty.
func leaseOf(address, router string) *dhcpc.Lease {
	l := &dhcpc.Lease{Address: netip.MustParsePrefix(address)}
	if router != "" {
		l.Routes = []dhcpc.Route{{Dst: netip.MustParsePrefix("0.0.0.0/0"), Via: netip.MustParseAddr(router)}}
	}
	return l
}

// hop is a route of the host's; via and src may be empty.
func hop(dst, via, src string, metric uint32) lease.HostRoute {
	r := lease.HostRoute{Dst: netip.MustParsePrefix(dst), Table: 254, Metric: metric, Protocol: 16}
	if via != "" {
		r.Via = netip.MustParseAddr(via)
	}
	if src != "" {
		r.Source = netip.MustParseAddr(src)
	}
	return r
}

func TestRoutesGoOverToAnotherLease(t *testing.T) {
	t.Parallel()
	type list = []lease.HostRoute
	// As systemd-networkd makes them.
	networkd := list{
		hop("0.0.0.0/0", "10.9.0.1", "10.9.0.32", 1024), hop("10.9.0.0/24", "", "10.9.0.32", 1024),
		hop("10.9.0.1/32", "", "10.9.0.32", 1024), hop("10.5.0.0/16", "10.9.0.2", "10.9.0.32", 1024),
	}
	for _, tt := range []struct {
		name             string
		had              list
		before, after    *dhcpc.Lease
		present          bool
		all, set, remove list
	}{
		{"the same", networkd, leaseOf("10.9.0.32/24", "10.9.0.1"), leaseOf("10.9.0.32/24", "10.9.0.1"), true,
			list{networkd[1], networkd[2], networkd[0], networkd[3]}, nil, nil},
		{"the same, and the address was away", networkd, leaseOf("10.9.0.32/24", "10.9.0.1"), leaseOf("10.9.0.32/24", "10.9.0.1"), false,
			list{networkd[1], networkd[2], networkd[0], networkd[3]}, list{networkd[1], networkd[2], networkd[0], networkd[3]}, nil},
		{"another address of the network", networkd, leaseOf("10.9.0.32/24", "10.9.0.1"), leaseOf("10.9.0.33/24", "10.9.0.1"), true,
			list{hop("10.9.0.0/24", "", "10.9.0.33", 1024), hop("10.9.0.1/32", "", "10.9.0.33", 1024), hop("0.0.0.0/0", "10.9.0.1", "10.9.0.33", 1024), hop("10.5.0.0/16", "10.9.0.2", "10.9.0.33", 1024)},
			list{hop("10.9.0.0/24", "", "10.9.0.33", 1024), hop("10.9.0.1/32", "", "10.9.0.33", 1024), hop("0.0.0.0/0", "10.9.0.1", "10.9.0.33", 1024), hop("10.5.0.0/16", "10.9.0.2", "10.9.0.33", 1024)},
			nil},
		{"another network", networkd[:3], leaseOf("10.9.0.32/24", "10.9.0.1"), leaseOf("192.0.2.5/25", "192.0.2.1"), true,
			list{hop("192.0.2.0/25", "", "192.0.2.5", 1024), hop("192.0.2.1/32", "", "192.0.2.5", 1024), hop("0.0.0.0/0", "192.0.2.1", "192.0.2.5", 1024)},
			list{hop("192.0.2.0/25", "", "192.0.2.5", 1024), hop("192.0.2.1/32", "", "192.0.2.5", 1024), hop("0.0.0.0/0", "192.0.2.1", "192.0.2.5", 1024)},
			list{hop("10.9.0.0/24", "", "10.9.0.32", 1024), hop("10.9.0.1/32", "", "10.9.0.32", 1024)}},
		{"another router", networkd[:3], leaseOf("10.9.0.32/24", "10.9.0.1"), leaseOf("10.9.0.32/24", "10.9.0.254"), true,
			list{hop("10.9.0.0/24", "", "10.9.0.32", 1024), hop("10.9.0.254/32", "", "10.9.0.32", 1024), hop("0.0.0.0/0", "10.9.0.254", "10.9.0.32", 1024)},
			list{hop("10.9.0.254/32", "", "10.9.0.32", 1024), hop("0.0.0.0/0", "10.9.0.254", "10.9.0.32", 1024)},
			list{hop("10.9.0.1/32", "", "10.9.0.32", 1024)}},
		{"no router any more", networkd[:1], leaseOf("10.9.0.32/24", "10.9.0.1"), leaseOf("10.9.0.32/24", ""), true, networkd[:1], nil, nil},
		{"a router that is not the lease's", list{hop("0.0.0.0/0", "10.9.0.77", "", 0)}, leaseOf("10.9.0.32/24", "10.9.0.1"), leaseOf("10.9.0.32/24", "10.9.0.254"), true,
			list{hop("0.0.0.0/0", "10.9.0.77", "", 0)}, nil, nil},
		{"a router of which no file told", networkd[:1], leaseOf("10.9.0.32/24", ""), leaseOf("10.9.0.32/24", "10.9.0.254"), true, networkd[:1], nil, nil},
		{"the same, and another network", networkd[:1], leaseOf("10.9.0.32/24", ""), leaseOf("192.0.2.5/24", "192.0.2.1"), true,
			list{hop("0.0.0.0/0", "192.0.2.1", "192.0.2.5", 1024)}, list{hop("0.0.0.0/0", "192.0.2.1", "192.0.2.5", 1024)}, nil},
		{"never seen", nil, leaseOf("10.9.0.32/24", ""), leaseOf("10.9.0.32/24", "10.9.0.1"), false,
			list{hop("0.0.0.0/0", "10.9.0.1", "10.9.0.32", 0)}, list{hop("0.0.0.0/0", "10.9.0.1", "10.9.0.32", 0)}, nil},
		{"a host that wants none", nil, leaseOf("10.9.0.32/24", ""), leaseOf("10.9.0.32/24", "10.9.0.1"), true, nil, nil, nil},
	} {
		got := planRoutes(tt.had, tt.before, tt.after, tt.present)
		compare := cmp.Options{cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })}
		for what, diff := range map[string]string{"all": cmp.Diff(tt.all, got.all, compare), "set": cmp.Diff(tt.set, got.set, compare), "remove": cmp.Diff(tt.remove, got.remove, compare)} {
			if diff != "" && (len(tt.set) > 0 || what != "set" || len(got.set) > 0) && (len(tt.remove) > 0 || what != "remove" || len(got.remove) > 0) {
				t.Errorf("%s, %s: want (-), got (+):\n%s", tt.name, what, diff)
			}
		}
	}
}

func TestTheRoutesThatCameWithALease(t *testing.T) {
	t.Parallel()
	l := leaseOf("10.9.0.32/24", "10.9.0.1")
	to, via, own := netip.MustParsePrefix, netip.MustParseAddr, netip.MustParseAddr("10.9.0.32")
	for name, tt := range map[string]struct {
		r    route.Route
		want bool
	}{
		"from the address":       {route.Route{Dst: to("203.0.113.0/24"), Gateway: via("10.9.0.7"), Source: own, Type: route.Unicast}, true},
		"by a DHCP client":       {route.Route{Dst: to("10.9.0.53/32"), Protocol: route.ProtocolDHCP, Type: route.Unicast}, true},
		"the network":            {route.Route{Dst: to("10.9.0.0/24"), Type: route.Unicast}, true},
		"the network of another": {route.Route{Dst: to("10.9.0.0/24"), Source: via("10.9.0.40"), Type: route.Unicast}, false},
		"the server's":           {route.Route{Gateway: via("10.9.0.1"), Family: unix.AF_INET, Type: route.Unicast}, true},
		"another router":         {route.Route{Gateway: via("10.9.0.2"), Family: unix.AF_INET, Type: route.Unicast}, false},
		"static":                 {route.Route{Dst: to("203.0.113.0/24"), Gateway: via("10.9.0.1"), Type: route.Unicast}, false},
		"local":                  {route.Route{Dst: to("10.9.0.32/32"), Source: own, Table: route.TableLocal, Type: route.Local}, false},
		"broadcast":              {route.Route{Dst: to("10.9.0.255/32"), Source: own, Type: route.Broadcast}, false},
		"multipath":              {route.Route{Source: own, Type: route.Unicast, Nexthops: make([]route.Nexthop, 2)}, false},
		"by a nexthop object":    {route.Route{Source: own, Type: route.Unicast, NexthopID: 1}, false},
	} {
		if got := goesWith(tt.r, l); got != tt.want {
			t.Errorf("%s: %t, want %t", name, got, tt.want)
		}
	}
}
