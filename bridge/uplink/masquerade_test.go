package uplink_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// withPod gives the host a pod of another network, whose traffic to elsewhere is
// masqueraded, with random ports: that a connection which has to begin anew gets its
// old port again would hide that it was lost.
func withPod(tb testing.TB, l *lan) *netns.NS {
	tb.Helper()
	pod := nstest.New(tb)
	nstest.Veth(tb, l.host, "pod", pod, "eth0")
	for _, name := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		nstest.Sysctl(tb, l.host, name, "1")
	}
	run(tb, l.host, "addr add 10.88.0.1/24 dev pod", "addr add fd88::1/64 dev pod nodad")
	run(tb, pod, "addr add 10.88.0.2/24 dev eth0", "addr add fd88::2/64 dev eth0 nodad",
		"route add default via 10.88.0.1", "-6 route add default via fd88::1")
	settle(tb, l.host)
	settle(tb, pod)
	for _, rule := range []string{
		"add table inet nat", "add chain inet nat post { type nat hook postrouting priority srcnat; }",
		"add rule inet nat post oifname != pod ip saddr 10.88.0.0/24 masquerade fully-random",
		"add rule inet nat post oifname != pod ip6 saddr fd88::/64 masquerade fully-random",
	} {
		nstest.Run(tb, l.host, "nft", strings.Fields(rule)...)
	}
	for _, a := range []string{"192.0.2.1", "2001:db8::1"} {
		if err := nstest.Ping(tb, pod, nstest.Addr(a)); err != nil {
			tb.Fatal(err)
		}
	}
	return pod
}

// Nothing is under way of them just then: a packet that comes between a flow's deletion and
// its return may begin another, and then the connection is reset (conntrack.Conn.Unbind).
// On a busy machine, where a processor may be taken away in between, that is not rare.
func TestMasqueradedConnectionsOfPodsGoOn(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	pod := withPod(t, l)
	var conns []*stream
	for _, far := range []string{"192.0.2.1", "2001:db8::1"} {
		conns = append(conns, newStream(t, pod, l.router, netip.MustParseAddr(far)))
	}
	goOn := func(when string) {
		t.Helper()
		for _, s := range conns {
			s.waitFor(t, s.echoes()+20)
		}
	}
	quietly := func(do func()) {
		t.Helper()
		conns[0].quiet(t, func() { conns[1].quiet(t, do) })
	}
	goOn("before")
	var rec *uplink.Record
	var j *memory
	quietly(func() { rec, j = take(t, l, toBridge()) })
	goOn("after the takeover")
	quietly(func() {
		if err := l.conn.Restore(t.Context(), rec, j); err != nil {
			t.Error(err)
		}
	})
	goOn("after the NIC was given back")
	for _, n := range rec.Notes {
		t.Error(n)
	}
}
