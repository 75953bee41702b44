package uplink_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// hosts are hosts whose every item has to come along, as commands of ip(8).
func hosts() map[string][]string {
	many := plainHost()
	for i := range 200 {
		many = append(many, fmt.Sprintf("route add 10.%d.%d.0/24 via 10.0.0.%d metric %d", 100+i/100, i%100, 1+i%3, i%5))
	}
	second := func(commands ...string) []string {
		return append([]string{"link add eth1 type veth peer name peer1", "link set eth1 addrgenmode none", "link set peer1 addrgenmode none",
			"link set peer1 up", "link set eth1 up", "addr add 10.1.0.5/24 dev eth1", "addr add fd01::5/64 dev eth1 nodad"}, commands...)
	}
	return map[string][]string{
		"plain":        plainHost(),
		"IPv4 only":    {"addr add 10.0.0.5/24 dev eth0", "route add default via 10.0.0.1"},
		"IPv6 only":    {"addr add fd00::5/64 dev eth0 nodad", "addr add fe80::5/64 dev eth0 nodad", "-6 route add default via fd00::1"},
		"no addresses": {"link set eth0 up"},
		"no gateway":   {"addr add 10.0.0.5/24 dev eth0"},
		"200 routes":   many,
		"labels, secondaries, scopes and metrics": {
			"addr add 10.0.0.5/24 brd + dev eth0", "addr add 10.0.0.6/24 dev eth0 label eth0:1", "addr add 10.0.0.7/24 dev eth0 label eth0:web",
			"addr add 10.7.0.5/16 dev eth0 scope site", "addr add 10.8.0.5/24 dev eth0 metric 77", "addr add 10.9.0.5/24 dev eth0 noprefixroute",
			"addr add 10.10.0.5/24 dev eth0",
			"addr add fd00::5/64 dev eth0 nodad", "addr add fd00::6/64 dev eth0 nodad", "addr add fd00:1::5/64 dev eth0 nodad noprefixroute",
			"addr add fd00:2::5/64 dev eth0 nodad metric 99", "addr add fd00:3::5/64 dev eth0 nodad",
			"addr add fd00:4::5/128 dev eth0 nodad", "addr add fd00:5::5/64 dev eth0 nodad home",
			"route add default via 10.0.0.1 src 10.0.0.6 metric 100", "-6 route add default via fd00::1 src fd00::6 metric 10",
		},
		"point to point": {
			"addr add 10.0.0.5 peer 10.0.0.1/32 dev eth0", "route add default via 10.0.0.1 dev eth0",
			"addr add fd00::5 peer fd00::1 dev eth0 nodad", "settle", "-6 route add default via fd00::1",
		},
		"an address of its own and a gateway on the link": {
			"addr add 10.0.0.5/32 dev eth0", "route add default via 10.0.0.1 dev eth0 onlink",
			"addr add fd00::5/128 dev eth0 nodad", "-6 route add default via fd00::1 dev eth0 onlink",
		},
		"connected routes of one's own": {
			// As network managers have it: the address without a route, and a route.
			"addr add 10.0.0.5/24 dev eth0 noprefixroute", "route add 10.0.0.0/24 dev eth0 proto kernel scope link src 10.0.0.5 metric 100",
			"route add default via 10.0.0.1 proto static metric 100 src 10.0.0.5",
			"addr add fd00::5/64 dev eth0 nodad noprefixroute", "-6 route add fd00::/64 dev eth0 proto ra metric 100",
			"-6 route add default via fd00::1 proto static metric 100 pref high",
		},
		"policy routing with five tables": append(plainHost(),
			"route add default via 10.0.0.1 table 100", "route add 10.0.0.0/24 dev eth0 table 100 src 10.0.0.5",
			"route add default via 10.0.0.2 table 101", "route add default via 10.0.0.3 table 1000", "route add 172.16.0.0/12 via 10.0.0.1 table 1000 mtu lock 1400 advmss 1300",
			"-6 route add default via fd00::1 table 102", "-6 route add fd77::/32 via fd00::2 table 102 mtu 1300",
			"route add default via 10.0.0.1 table 103 tos 8",
			"rule add from 10.0.0.5 table 100 pref 100", "rule add fwmark 7/0xff table 1000 pref 102", "-6 rule add from fd00::5 lookup 102 pref 90 suppress_prefixlength 0"),
		"routes of all sorts": append(plainHost(),
			"route add blackhole 172.20.0.0/16", "route add unreachable 172.21.0.0/16", "route add prohibit 172.22.0.0/16", "-6 route add blackhole fd99::/32",
			"route add 172.23.0.0/16 dev eth0 scope link", "route add 172.24.0.0/16 via 10.0.0.9 initcwnd 20 quickack 1", "route add 172.25.0.0/16 via 192.168.99.1 dev eth0 onlink",
			"route add 172.26.0.0/16 via inet6 fd00::1 dev eth0", "route add 172.27.0.0/16 via inet6 fe80::1 dev eth0", "-6 route add fd55::/32 via fe80::1 dev eth0 metric 5",
			"route add local 172.28.0.0/16 dev eth0", "-6 route add fd56::/32 dev eth0 metric 7", "-6 route add fd57::/64 from fd00::/16 via fd00::1",
			"route add 172.29.0.0/16 via 10.0.0.1 metric 5", "route add 172.29.0.0/16 via 10.0.0.2 metric 6", "route append 172.29.0.0/16 via 10.0.0.3 metric 6"),
		"multipath": append(plainHost(), second(
			"route add 172.20.0.0/16 nexthop via 10.0.0.1 weight 2 nexthop via 10.0.0.2", "route add 172.21.0.0/16 nexthop via 10.0.0.1 nexthop via 10.1.0.1 weight 5",
			"-6 route add fd55::/32 nexthop via fd00::1 nexthop via fd00::2 weight 3", "-6 route add fd56::/32 nexthop via fd00::1 nexthop via fd01::1",
			"route add 172.22.0.0/16 nexthop via 10.9.9.9 dev eth0 onlink nexthop via 10.0.0.3")...),
		"realms, tunnels and congestion control": append(plainHost(), second(
			"route add 172.20.0.0/16 via 10.0.0.1 realms 3/5", "route add 172.21.0.0/16 nexthop via 10.0.0.1 realms 7 nexthop via 10.1.0.1 realms 1/8",
			"route add 172.22.0.0/16 via 10.0.0.1 congctl reno mtu 1300", "-6 route add fd55::/32 via fd00::1 congctl reno advmss 1200 hoplimit 9",
			"route add 172.23.0.0/16 encap ip id 7 dst 10.9.9.9 ttl 9 dev eth0", "-6 route add fd56::/32 encap ip6 id 7 dst fd09::9 dev eth0",
			"-6 route add fd57::/32 encap seg6 mode encap segs fd00::7,fd00::8 dev eth0", "route add 172.24.0.0/16 nexthop encap ip id 5 dst 10.9.9.9 via 10.0.0.1 dev eth0 nexthop via 10.1.0.1")...),
		"another NIC in the network comes first": append(second("addr add 10.0.0.6/24 dev eth1"), plainHost()...),
		"neighbours by hand": append(plainHost(),
			"neigh add 10.0.0.77 lladdr 02:00:00:00:00:77 dev eth0", "neigh add fd00::77 lladdr 02:00:00:00:00:78 dev eth0 router",
			"neigh add 10.0.0.78 lladdr 02:00:00:00:00:79 dev eth0 nud noarp extern_learn protocol static"),
	}
}

func TestEverythingComesAlongAndBack(t *testing.T) {
	t.Parallel()
	for name, commands := range hosts() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLAN(t, commands...)
			before, order := state(t, l.host), l.order(t)
			rec, j := take(t, l, toBridge())
			expect.NoDiff(t, cmp.Diff(order, strings.ReplaceAll(l.order(t), "br0", "eth0")), "order on the bridge")
			// That of the bridge is that of the NIC, by another name.
			taken := strings.ReplaceAll(state(t, l.host), "br0", "eth0")
			diff := cmp.Diff(comparableState(before), comparableState(taken))
			expect.That(t, diff == "", "what the bridge has (-NIC before +bridge):\n%s", diff)
			l.mustBeTaken(t, "taken", rec)
			if name == "plain" {
				l.mustReach(t, "taken")
			}
			must.Succeed(t, l.conn.Restore(t.Context(), rec, j))
			if name == "plain" {
				l.mustReach(t, "given back")
			}
			expect.NoDiff(t, cmp.Diff(comparableState(before), comparableState(state(t, l.host))),
				"the host after it was given back")
			expect.NoDiff(t, cmp.Diff(order, l.order(t)), "order after it was given back")
			expect.Failure(t, expect.Err(j.load()), "the journal is still there")
		})
	}
}

// order is what the kernel decides by: which route is the first of its kind, which
// address is primary.
func (l *lan) order(tb testing.TB) string {
	tb.Helper()
	dev := "eth0"
	if _, err := nstest.Try(l.host, "ip", "link", "show", "br0"); err == nil {
		dev = "br0"
	}
	return normal(nstest.Run(tb, l.host, "ip", "-4", "route")) +
		normal(nstest.Run(tb, l.host, "ip", "-o", "-4", "addr", "show", "dev", dev)) +
		normal(nstest.Run(tb, l.host, "ip", "-o", "-6", "addr", "show", "dev", dev))
}

// comparableState is a state without what is between the two links and not configuration,
// and without order where the kernel's is by the links' age.
func comparableState(state string) string {
	var lines []string
	section := ""
	for line := range strings.Lines(state) {
		switch {
		case strings.HasPrefix(line, "#"):
			section = line
		case strings.Contains(line, "multicast ff00::/8"), strings.Contains(line, "bridge"), strings.HasPrefix(line, "veth"), strings.HasPrefix(line, "alias"):
			continue
		}
		if strings.Contains(section, "neigh") && slices.Contains(lines, strings.TrimSuffix(line, "\n")) {
			continue // the NIC's stay there, and the bridge has the same
		}
		if strings.Contains(section, "-d addr") || strings.Contains(section, "table all") {
			line = strings.TrimSpace(section) + ": " + line
		}
		lines = append(lines, strings.TrimSuffix(line, "\n"))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// A bridge that another program deleted had all that the host has: the record has it too.
func TestTheHostGetsBackWhatADeletedBridgeHad(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	before := state(t, l.host)
	rec, j := take(t, l, toBridge())
	run(t, l.host, "link del br0")
	must.Succeed(t, l.conn.Restore(t.Context(), rec, j))
	l.mustReach(t, "given back")
	expect.NoDiff(t, cmp.Diff(comparableState(before), comparableState(state(t, l.host))), "the host after it was given back")
}

// test/vm/run.sh noipv6 has a kernel that is like this in truth.
func TestKernelWithoutIPv6TakesANICOver(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	refusal := nltest.NoIPv6()
	nltest.MustHaveFired(t, refusal)
	conn := l.through(t, refusal)
	must.Succeed(t, expect.Err(conn.Take(t.Context(), toBridge(), new(memory))))
	l.mustReach(t, "taken over")
}
