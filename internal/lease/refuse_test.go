package lease

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/route"
)

func TestSomeAddressesAreNoPods(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		address, broadcast, server string
		ownRouter                  bool
		why                        string
	}{
		{address: "192.0.2.9/24"},
		{address: "192.0.2.9/24", broadcast: "192.0.2.255", server: "192.0.2.1"},
		{address: "192.0.2.0/31"},
		{address: "192.0.2.7/31"},
		{address: "192.0.2.0/32"},
		{address: "10.1.0.0/8"},
		{address: "10.0.255.255/8"},
		{address: "192.0.2.0/24", why: "network 192.0.2.0/24 itself"},
		{address: "192.0.2.4/30", why: "network"},
		{address: "192.0.2.7/30", why: "broadcast address of 192.0.2.4/30"},
		{address: "192.0.2.255/24", why: "broadcast"},
		{address: "10.255.255.255/8", why: "broadcast"},
		{address: "192.0.2.127/24", broadcast: "192.0.2.127", why: "broadcast"},
		{address: "192.0.2.9/24", server: "192.0.2.9", why: "server"},
		{address: "192.0.2.9/24", ownRouter: true, why: "router"},
		{address: "169.254.169.254/16", why: "link-local"},
	} {
		t.Run(fmt.Sprintf("%s %s %s %t", tt.address, tt.broadcast, tt.server, tt.ownRouter), func(t *testing.T) {
			l := sampleLease()
			l.Address, l.OwnRouter = netip.MustParsePrefix(tt.address), tt.ownRouter
			l.Broadcast, _ = netip.ParseAddr(tt.broadcast)
			if tt.server != "" {
				l.Server = netip.MustParseAddr(tt.server)
			}
			wantWhy(t, CheckUsable(l), tt.why)
		})
	}
}

func wantWhy(t *testing.T, err error, why string) {
	t.Helper()
	expect.That(t, (err != nil) == (why != "") && (err == nil || strings.Contains(err.Error(), why)),
		"%v, want %q", err, why)
}

func TestWhatTheHostHasIsNoPods(t *testing.T) {
	t.Parallel()
	host, lan := nstest.New(t), nstest.New(t)
	bridge, _ := nstest.Veth(t, host, "br0", lan, "eth0")
	nstest.Veth(t, host, "other0", lan, "other0")
	nstest.Run(t, host, "sh", "-ec", `
		ip link set lo up
		ip address add 192.0.2.2/24 dev br0
		ip address add 198.51.100.7/32 dev lo
		ip address add 203.0.113.2/25 broadcast + dev other0
		ip route add default via 192.0.2.1 dev br0
		ip route add 10.0.0.0/8 via 192.0.2.3 dev br0 table 77
		ip route add 10.1.0.0/16 nexthop via 192.0.2.4 dev br0 nexthop via 192.0.2.5 dev br0
		ip nexthop add id 6 via 192.0.2.6 dev br0
		ip route add 10.2.0.0/16 nhid 6
		ip route add 10.3.0.0/16 via 203.0.113.9 dev other0
		ip route add unreachable 10.66.0.0/16
		ip route add blackhole 10.67.0.0/16
		ip route add prohibit 10.68.0.0/16`)
	conn := must.Of(route.Dial(host)).Get(t)
	defer conn.Close()
	for address, why := range map[string]string{
		"192.0.2.9": "", "203.0.113.9": "", "10.66.0.1": "", "10.67.0.1": "", "10.68.0.1": "", "198.51.100.8": "",
		"192.0.2.2": "the host's own address", "198.51.100.7": "the host's own address", "127.0.0.5": "the host's own address",
		"203.0.113.2": "the host's own address", "203.0.113.127": "a broadcast address of the host's",
		"192.0.2.1": "a gateway of the host's, for its default route", "192.0.2.3": "a gateway of the host's, for 10.0.0.0/8",
		"192.0.2.4": "for 10.1.0.0/16", "192.0.2.5": "for 10.1.0.0/16", "192.0.2.6": "for 10.2.0.0/16",
	} {
		a := netip.MustParseAddr(address)
		wantWhy(t, CheckConflict(t.Context(), conn, bridge, a, netip.Addr{}), why)
		if strings.Contains(why, "own") {
			wantWhy(t, CheckConflict(t.Context(), conn, bridge, a, a), why)
		} else if !strings.Contains(why, "broadcast") {
			wantWhy(t, CheckConflict(t.Context(), conn, bridge, a, a), "") // the host may send by way of a pod
		}
	}
	nstest.Run(t, host, "ip", "route", "del", "default")
	wantWhy(t, CheckConflict(t.Context(), conn, bridge, netip.MustParseAddr("8.8.8.8"), netip.Addr{}), "")
}
