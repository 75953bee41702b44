package route_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/route"
)

// everySort are commands that make one object each, none of which is in the place of another. The names of
// eth0 and eth1 are those of newHost.
func everySort() string {
	return `
ip route add 198.18.1.0/24 via 10.1.0.1
ip route add 198.18.2.0/24 dev eth0
ip route add 198.18.3.0/24 dev eth0 scope site
ip route add blackhole 198.18.4.0/24
ip route add unreachable 198.18.5.0/24 metric 50
ip route add prohibit 198.18.6.0/24
ip route add throw 198.18.7.0/24 table 200
ip route add local 198.18.8.0/24 dev eth0 table 1000
ip route add multicast 232.1.0.0/16 dev eth0
ip route add anycast 198.18.9.1 dev eth0 table 1000
ip route add broadcast 198.18.9.255 dev eth0 table 1000
ip route add 198.18.10.0/24 tos 0x10 via 10.1.0.1 dev eth0
ip route add 198.18.11.0/24 via 10.1.0.1 src 10.1.0.2 metric 7 proto static table 4000000000
ip route add 198.18.12.0/24 via 10.1.0.1 mtu 1400 advmss 1360
ip route add 198.18.13.0/24 via 10.1.0.1 mtu lock 1400 window 65536 rtt 300ms rttvar 100ms ssthresh 20 cwnd 10 reordering 5 hoplimit 30 initcwnd 11 initrwnd 12 features ecn quickack 1 rto_min 250ms fastopen_no_cookie 1
ip route add 198.18.14.0/24 via 10.1.0.1 congctl reno
ip route add 198.18.15.0/24 via 10.1.0.1 congctl lock reno mtu 1300
ip route add 198.18.16.0/24 via 10.1.0.1 realms 3/5
ip route add 198.18.17.0/24 via 198.51.100.1 dev eth0 onlink
ip route add 198.18.18.0/24 via inet6 fd01::1 dev eth0
ip route add 198.18.19.0/24 nexthop via 10.1.0.1 dev eth0 weight 4 nexthop via inet6 fd02::1 dev eth1 weight 256 nexthop via 198.51.100.1 dev eth1 onlink
ip route add 198.18.20.0/24 nexthop via 10.1.0.1 realms 1/2 nexthop via 10.2.0.1 realms 3
ip route add 198.18.21.0/24 nexthop encap ip id 5 dst 198.51.100.9 via 10.1.0.1 dev eth0 nexthop via 10.2.0.1 dev eth1 weight 7
ip route add 198.18.26.0/24 encap mpls 100/200 ttl 9 via 10.1.0.1 dev eth0
ip route add 198.18.27.0/24 encap ip id 7 src 10.1.0.2 dst 198.51.100.7 ttl 9 tos 4 key csum seq dev eth0
ip route add 198.18.28.0/24 encap seg6 mode encap segs fd01::7 dev eth0
ip route add 198.18.29.0/24 via 10.1.0.1 proto 250 mtu 1280 realms 7 congctl reno metric 4294967295
ip route add 198.18.31.0/24 via 10.1.0.1 proto 0
ip link add vrf1 type vrf table 77
ip route add 198.18.30.0/24 via 10.1.0.1 dev eth0 table 77
ip -6 route add 2001:db8:1::/48 via fd01::1
ip -6 route add 2001:db8:2::/48 dev eth0 metric 9
ip -6 route add 2001:db8:3::/48 via fe80::1 dev eth0 pref high
ip -6 route add 2001:db8:4::/48 via fd01::1 pref low expires 3600 proto ra
ip -6 route add 2001:db8:5::/48 from fd01::/64 via fd01::1
ip -6 route add 2001:db8:6::/48 via fd01::1 src fd01::2 mtu lock 1400 advmss 1300 hoplimit 9 initcwnd 7 congctl reno
ip -6 route add 2001:db8:7::/48 nexthop via fd01::1 dev eth0 weight 3 nexthop via fd02::1 dev eth1 weight 200
ip -6 route add blackhole 2001:db8:8::/48 dev lo
ip -6 route add unreachable 2001:db8:9::/48 dev lo metric 77
ip -6 route add prohibit 2001:db8:a::/48 dev lo table 300
ip -6 route add 2001:db8:c::/48 encap ip6 id 9 dst fd01::9 hoplimit 30 tc 4 dev eth0
ip -6 route add 2001:db8:d::/48 encap seg6 mode encap segs fd01::7,fd01::8 dev eth0
ip -6 route add 2001:db8:e::/48 encap seg6 mode inline segs fd01::7 dev eth0
ip -6 route add 2001:db8:f::/48 encap seg6local action End dev eth0
ip -6 route add 2001:db8:10::/48 encap seg6local action End.X nh6 fd01::1 dev eth0
ip -6 route add 2001:db8:11::/48 encap mpls 300 via fd01::1 dev eth0
ip -6 route add 2001:db8:12::/48 nexthop encap ip6 id 5 dst fd01::9 via fd01::1 dev eth0 nexthop via fd02::1 dev eth1
ip -6 route add local 2001:db8:13::/48 dev eth0 table 1000
ip -6 route add anycast 2001:db8:14::1 dev eth0
ip -6 route add multicast ff3e::/32 dev eth0 table local
ip -6 route add ::ffff:198.18.0.0/112 via fd01::1
ip -6 route add 2001:db8:15::/48 via ::ffff:10.1.0.1 dev eth0 onlink`
}

// moved is an object that is on record, deleted and added again.
type moved struct {
	what      string // what two listings of it have in common
	copy, del func() (netlink.Message, error)
}

// movable gives all routes, read from a journal.
func (h host) movable(t *testing.T) []moved {
	t.Helper()
	var list []moved
	routes, err := h.c.List(t.Context(), route.Filter{})
	if err == nil {
		for _, r := range journalled(t, routes) {
			known := r
			known.Expires, known.Flags = nil, 0
			list = append(list, moved{text(t, known),
				func() (netlink.Message, error) { return r.Message(unix.RTM_NEWROUTE, netlink.Create|netlink.Append) },
				func() (netlink.Message, error) { return r.Message(unix.RTM_DELROUTE, 0) }})
		}
	}
	must.Succeed(t, err)
	return list
}

func text(t *testing.T, v any) string {
	t.Helper()
	b := must.Of(json.Marshal(v)).Get(t)
	return string(b)
}

// journalled is what was on record meanwhile.
func journalled[T any](t *testing.T, list []T) []T {
	t.Helper()
	var again []T
	must.Succeed(t, json.Unmarshal([]byte(text(t, list)), &again))
	return again
}

// printed is what ip(8) prints of all of them.
func (h host) printed(t *testing.T) []string {
	t.Helper()
	var lines []string
	for _, what := range []string{"-4 route show table all", "-6 route show table all"} {
		out := ticking.ReplaceAllString(nstest.Run(t, h.ns, "ip", append([]string{"-details"}, strings.Fields(what)...)...), "expires …")
		lines = append(lines, strings.Split(out, "\n")...)
	}
	slices.Sort(lines)
	return lines
}

// TestObjectsAreMovedAsTheyAre makes objects of every sort, reads them, has them on record as the journal of a
// takeover does, deletes them and adds them again. Older kernels refuse some, and so do those that lack a module.
func TestObjectsAreMovedAsTheyAre(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	nstest.Run(t, h.ns, "ip", "link", "set", "lo", "up")
	conn, err := nl.Dial(unix.NETLINK_ROUTE, h.ns)
	must.Succeed(t, err)
	defer conn.Close()
	ask := func(m netlink.Message, err error) error {
		var b nl.Batch
		b.Add("ask", nil, m, err)
		return conn.Execute(&b)
	}
	has := func(list []moved, what string) bool {
		return slices.ContainsFunc(list, func(o moved) bool { return o.what == what })
	}
	taken := 0
	for command := range strings.Lines(strings.TrimSpace(everySort())) {
		command = strings.TrimSpace(command)
		before := h.movable(t)
		if _, err := nstest.Try(h.ns, "ip", strings.Fields(command)[1:]...); err != nil {
			t.Logf("%s: %v", command, err)
			continue
		}
		for _, o := range h.movable(t) {
			if has(before, o.what) {
				continue
			}
			shown := h.printed(t)
			must.Succeed(t, ask(o.del()), "%s: delete it", command)
			must.Succeed(t, ask(o.copy()), "%s: add the copy", command)
			expect.That(t, has(h.movable(t), o.what), "%s: %s is no longer listed", command, o.what)
			expect.Equal(t, cmp.Diff(shown, h.printed(t)), "", "%s (-made +moved)", command)
			taken++
		}
	}
	expect.That(t, taken >= 45, "%d copies: the kernel refused too many commands", taken)
}
