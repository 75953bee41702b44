package route_test

import (
	"encoding/binary"
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
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
ip -6 route add 2001:db8:15::/48 via ::ffff:10.1.0.1 dev eth0 onlink
ip rule add from 10.1.0.0/16 to 10.2.0.0/16 priority 101 table 7
ip rule add iif eth0 oif eth1 priority 102 table 70000
ip rule add iif lo priority 103 prohibit
ip rule add oif gone priority 104 blackhole
ip rule add fwmark 0x10/0xf0 priority 105 unreachable
ip rule add fwmark 0/0xff priority 106 table 7
ip rule add tos 0x10 priority 107 table 7 protocol static
ip rule add ipproto tcp sport 80 dport 1000-2000 priority 108 table 7
ip rule add uidrange 1000-4000000000 priority 109 table 7
ip rule add not from 10.9.0.0/16 priority 110 goto 200
ip rule add priority 111 nop
ip rule add priority 112 l3mdev
ip rule add priority 113 table main suppress_prefixlength 0
ip rule add priority 114 table main suppress_ifgroup 7
ip rule add from 10.1.0.5 priority 115 table 7 realms 3/5
ip rule add priority 116 tun_id 7 table 7
ip rule add from 10.1.0.6 priority 117 nat 192.0.2.1
ip -6 rule add from fd01::/64 to fd02::1 priority 201 table 7 iif eth0
ip -6 rule add ipproto udp dport 53 uidrange 0-0 fwmark 1 priority 202 table 7
ip -6 rule add not from all suppress_prefixlength 64 priority 203 table main
ip -6 rule add from ::ffff:10.1.0.0/112 priority 204 table 7 tos 4
(rule by DSCP) 301
(rule by flow label) 302
(rule by masked ports) 303
(rule by masked DSCP) 304
ip neigh add 10.1.0.9 lladdr 02:00:00:00:00:09 dev eth0
ip neigh add 10.1.0.10 lladdr 02:00:00:00:00:0a dev eth0 nud stale
ip neigh add 10.1.0.11 lladdr 02:00:00:00:00:0b dev eth0 nud noarp protocol static
ip neigh add 10.1.0.12 lladdr 02:00:00:00:00:0c dev eth0 nud reachable extern_learn
ip neigh add 10.1.0.13 lladdr 02:00:00:00:00:0d dev eth0 nud reachable managed
ip neigh add 10.1.0.14 lladdr 02:00:00:00:00:0e dev eth0 nud delay router
ip neigh add proxy 10.1.0.15 dev eth0 protocol 99
ip neigh add fd01::9 lladdr 02:00:00:00:00:09 dev eth0 router protocol 116
ip neigh add fd01::a lladdr 02:00:00:00:00:0a dev eth0 nud stale
ip neigh add fd01::c lladdr 02:00:00:00:00:0c dev eth0 nud reachable managed extern_learn
ip neigh add proxy fd01::b dev eth0
ip neigh add proxy fd01::d dev eth0 router
ip neigh add fd01::e dev eth0 nud failed
(neighbour that the kernel is told to trust)
ip neigh add ::ffff:10.1.0.1 lladdr 02:00:00:00:00:0f dev eth0`
}

// requestedByHand are those that ip(8) of Debian 12 has no words for, with types of
// attributes that golang.org/x/sys has not either.
func requestedByHand(h host) map[string]func() (netlink.Message, error) {
	const (
		fraDSCP, fraFlowlabel, fraFlowlabelMask, fraDSCPMask = 25, 26, 27, 30 // Linux 6.12, 6.14, 6.14, 6.15
		fraSportMask, fraDportMask                           = 28, 29         // Linux 6.15
		ndaFlagsExt                                          = 15
	)
	rule := func(family uint8, priority uint32, fn func(ae *netlink.AttributeEncoder)) func() (netlink.Message, error) {
		return func() (netlink.Message, error) {
			head := []byte{family, 0, 0, 0, 7, 0, 0, unix.FR_ACT_TO_TBL, 0, 0, 0, 0}
			return nl.Encode(unix.RTM_NEWRULE, netlink.Create|netlink.Excl, head, func(ae *netlink.AttributeEncoder) {
				ae.Uint32(unix.FRA_PRIORITY, priority)
				fn(ae)
			})
		}
	}
	be := func(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v) }
	return map[string]func() (netlink.Message, error){
		"(rule by DSCP) 301": rule(unix.AF_INET, 301, func(ae *netlink.AttributeEncoder) { ae.Uint8(fraDSCP, 46) }),
		"(rule by flow label) 302": rule(unix.AF_INET6, 302, func(ae *netlink.AttributeEncoder) {
			ae.Bytes(fraFlowlabel, be(0x12300))
			ae.Bytes(fraFlowlabelMask, be(0xfff00))
		}),
		"(rule by masked ports) 303": rule(unix.AF_INET, 303, func(ae *netlink.AttributeEncoder) {
			ae.Uint8(unix.FRA_IP_PROTO, unix.IPPROTO_TCP)
			ae.Bytes(unix.FRA_SPORT_RANGE, binary.NativeEndian.AppendUint16(binary.NativeEndian.AppendUint16(nil, 0x100), 0x100))
			ae.Uint16(fraSportMask, 0xff00)
			ae.Bytes(unix.FRA_DPORT_RANGE, binary.NativeEndian.AppendUint16(binary.NativeEndian.AppendUint16(nil, 0x10), 0x10))
			ae.Uint16(fraDportMask, 0x10)
		}),
		"(rule by masked DSCP) 304": rule(unix.AF_INET6, 304, func(ae *netlink.AttributeEncoder) {
			ae.Uint8(fraDSCP, 0x20)
			ae.Uint8(fraDSCPMask, 0x38)
		}),
		"(neighbour that the kernel is told to trust)": func() (netlink.Message, error) {
			head := make([]byte, unix.SizeofNdMsg)
			head[0] = unix.AF_INET6
			binary.NativeEndian.PutUint32(head[4:], uint32(h.eth0))
			binary.NativeEndian.PutUint16(head[8:], unix.NUD_REACHABLE)
			return nl.Encode(unix.RTM_NEWNEIGH, netlink.Create|netlink.Excl, head, func(ae *netlink.AttributeEncoder) {
				ae.Bytes(unix.NDA_DST, netip.MustParseAddr("fd01::f").AsSlice())
				ae.Bytes(unix.NDA_LLADDR, []byte{2, 0, 0, 0, 0, 15})
				ae.Uint32(ndaFlagsExt, 1<<2) // NTF_EXT_EXT_VALIDATED, Linux 6.18
			})
		},
	}
}

// moved is an object that is on record, deleted and added again.
type moved struct {
	what      string // what two listings of it have in common
	copy, del func() (netlink.Message, error)
}

// movable gives all routes, rules and neighbours, read from a journal.
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
	rules, rulesErr := routing.Rules(h.nl)
	for _, r := range journalled(t, rules) {
		list = append(list, moved{text(t, r), r.CopyMessage, r.DelMessage})
	}
	for _, proxy := range []bool{false, true} {
		neighbours, neighboursErr := routing.Neighbours(h.nl, proxy)
		if err == nil {
			err = neighboursErr
		}
		for _, n := range journalled(t, neighbours) {
			if proxy {
				n.State = 0 // such an entry has none
			}
			if !n.Addr.IsMulticast() {
				list = append(list, moved{text(t, n), n.ReplaceMessage, n.DelMessage})
			}
		}
	}
	must.That(t, err == nil && rulesErr == nil, "%v %v", err, rulesErr)
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
	for _, what := range []string{"-4 route show table all", "-6 route show table all", "-4 rule show", "-6 rule show", "neighbour show proxy"} {
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
	byHand, taken := requestedByHand(h), 0
	for command := range strings.Lines(strings.TrimSpace(everySort())) {
		command = strings.TrimSpace(command)
		before := h.movable(t)
		if request := byHand[command]; request != nil {
			err = ask(request())
		} else {
			_, err = nstest.Try(h.ns, "ip", strings.Fields(command)[1:]...)
		}
		if err != nil {
			t.Logf("%s: %v", command, err)
			continue
		}
		for _, o := range h.movable(t) {
			if has(before, o.what) {
				continue
			}
			shown := h.printed(t)
			// A neighbour's state "delay" ends with the kernel's next tick, so that it may be over when it is
			// listed.
			listed := false
			for tries := 0; tries < 10 && !listed; tries++ {
				must.Succeed(t, ask(o.del()), "%s: delete it", command)
				must.Succeed(t, ask(o.copy()), "%s: add the copy", command)
				listed = has(h.movable(t), o.what)
			}
			expect.That(t, listed, "%s: %s is no more listed", command, o.what)
			diff := cmp.Diff(shown, h.printed(t))
			expect.That(t, diff == "", "%s (-made +moved):\n%s", command, diff)
			taken++
		}
	}
	expect.That(t, taken >= 70, "%d copies: the kernel refused too many commands", taken)
}
