package nft

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// withTags puts tags in front of what a frame is: pairs of a tag's type, and of its VLAN
// and priority.
func withTags(frame []byte, tags ...int) []byte {
	var list []byte
	for _, number := range tags {
		list = append(list, be16(number)...)
	}
	return join(frame[:etherType], list, frame[etherType:])
}

const (
	qTag  = unix.ETH_P_8021Q
	adTag = unix.ETH_P_8021AD
)

// asked and kept are ports of the other pod's: the host's firewall drops what goes to the
// first.
const asked, kept = 9, 10

// podListener is a program in the other pod.
type podListener struct {
	tb   testing.TB
	conn net.PacketConn
}

func (s *groupSite) podHears(tb testing.TB, network string, port int) *podListener {
	tb.Helper()
	l := &podListener{tb: tb}
	must.Succeed(tb, s.other.Do(func() error {
		var err error
		l.conn, err = (&net.ListenConfig{}).ListenPacket(tb.Context(), network, ":"+strconv.Itoa(port))
		return err
	}))
	tb.Cleanup(func() { l.conn.Close() })
	return l
}

func (l *podListener) await(text string) {
	l.tb.Helper()
	must.Succeed(l.tb, l.conn.SetReadDeadline(time.Now().Add(patience)))
	for b := make([]byte, 64); ; {
		n, _, err := l.conn.ReadFrom(b)
		must.Succeed(l.tb, err)
		if string(b[:n]) == text {
			return
		}
	}
}

// A program in the pod hears what its kernel takes for it, whatever was in front.
func TestFramesOfNoVLANDoNotPassByTheFirewall(t *testing.T) {
	t.Parallel()
	s := newGroupSite(t)
	nstest.Run(t, s.host, "ip", "link", "set", "cbr0", "type", "bridge", "nf_call_iptables", "1", "nf_call_ip6tables", "1")
	drops := fmt.Sprintf("add table inet theirs { chain forward { type filter hook forward priority 0; udp dport %d drop; }; }", asked)
	nft(t, s.host, drops)
	heard := map[string]*podListener{"IPv4": s.podHears(t, "udp4", asked), "IPv6": s.podHears(t, "udp6", asked)}
	end := s.podHears(t, "udp4", kept)
	ways := []struct {
		name string
		tags []int
	}{
		{"no tag", nil},
		{"a tag", []int{qTag, 0}},
		{"a tag with a priority", []int{qTag, 0xe000}},
		{"a tag with another bit", []int{qTag, 0x1000}},
		{"an outer tag", []int{adTag, 0}},
		{"two tags", []int{qTag, 0, qTag, 0}},
		{"an outer and an inner tag", []int{adTag, 0, qTag, 0}},
		{"an inner and an outer tag", []int{qTag, 0, adTag, 0}},
		{"three tags", []int{qTag, 0, qTag, 0, qTag, 0}},
	}
	attack := func(when string, want func(tags []int) bool) {
		t.Helper()
		for i, way := range ways {
			v4 := packet4(pod4, other4, 0, 17, udp(pod4, other4, asked, way.name))
			v6 := packet6(pod6, other6, 17, udp(pod6, other6, asked, way.name))
			last := when + strconv.Itoa(i)
			s.pod1.send(
				withTags(ether(otherMAC, podMAC, unix.ETH_P_IP, v4), way.tags...),
				withTags(ether(otherMAC, podMAC, unix.ETH_P_IPV6, v6), way.tags...),
				ether(otherMAC, podMAC, unix.ETH_P_IP, packet4(pod4, other4, 0, 17, udp(pod4, other4, kept, last))))
			end.await(last)
			for family, l := range heard {
				expect.Equal(t, len(queued(t, l.conn)) > 0, want(way.tags), "%s: the other pod hears %s behind %s", when, family, way.name)
			}
		}
	}
	attack("without rules", func(tags []int) bool { return tags != nil })
	n := Network{Name: "podnet", Groups: true}
	mustEnsure(t, s.c, n)
	wantReady(t, s.c, n)
	attack("with rules", func([]int) bool { return false })
	nft(t, s.host, "delete table inet theirs")
	attack("without their drop", func(tags []int) bool { return tags == nil })
}

func TestTagsThatHideNothingPass(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	mustEnsure(t, s.c, Network{Name: "podnet", Groups: true})
	v4 := ether(otherMAC, podMAC, unix.ETH_P_IP, packet4(pod4, other4, 0, 17, datagram(1024, 9)))
	profinet := ether(otherMAC, podMAC, 0x8892, make([]byte, 40))
	s.want(t, []namedFrame{
		{"IPv4", v4}, {"IPv4 of VLAN 5", withTags(v4, qTag, 5)}, {"IPv4 of an outer VLAN", withTags(v4, adTag, 0x100)},
		{"IPv4 of VLAN 5 behind an outer VLAN", withTags(v4, adTag, 7, qTag, 5)},
		{"PROFINET with a priority", withTags(profinet, qTag, 0xc000)},
	}, true)
	s.want(t, []namedFrame{{"IPv4 of VLAN 1", withTags(v4, qTag, 1)}}, true)
	s.want(t, []namedFrame{
		{"IPv4 with a priority", withTags(v4, qTag, 0xc000)}, {"IPv4 of VLAN 5 behind VLAN 1", withTags(v4, qTag, 1, qTag, 5)},
		{"with a priority", withTags(v4, qTag, 0xe001, qTag, 5)}, {"IPv4 of an outer VLAN behind VLAN 1", withTags(v4, qTag, 1, adTag, 5)},
	}, false)
}

// newQuerySite makes one whose bridge looks at what pods join, as those have it that Tombolo makes.
func newQuerySite(tb testing.TB) *guardSite {
	tb.Helper()
	s := newGuardSite(tb)
	nft(tb, s.host, "flush ruleset")
	nstest.Run(tb, s.host, "sh", "-ec", "ip link set veth1 group "+strconv.Itoa(PodGroup)+`
		ip link set veth2 group `+strconv.Itoa(PodGroup)+`
		ip link set cbr0 type bridge mcast_query_response_interval 10 mcast_membership_interval 100
		ip link set cbr0 type bridge mcast_snooping 1`)
	return s
}

// queries are how a pod may ask, over IPv4 and over IPv6, to be
// answered at once.
func queries() []namedFrame {
	const now = 1
	six := func(headers []byte, next byte) []byte {
		body := join(be16(now), be16(0), make([]byte, 16), []byte{2, 125}, be16(0))
		return ether(allNodesMAC, podMAC, unix.ETH_P_IPV6, with(packet6(podLocal, allNodes, next, headers, icmp6(podLocal, allNodes, 130, body)), 7, 1))
	}
	plain := []byte{58, 0, 5, 2, 0, 0, 1, 0}
	igmp := []byte{0x11, byte(now), 0, 0, 0, 0, 0, 0, 2, 125, 0, 0}
	igmp = with(igmp, 2, checksum(igmp, 0)...)
	four := func(fragment int) []byte {
		return ether("01:00:5e:00:00:01", podMAC, unix.ETH_P_IP, packet4(pod4, "224.0.0.1", fragment, unix.IPPROTO_IGMP, igmp))
	}
	return []namedFrame{
		{"a query over IPv6", six(plain, unix.IPPROTO_HOPOPTS)},
		{"a query over IPv6 with more headers", six(join([]byte{60}, plain[1:], padding6(58)), unix.IPPROTO_HOPOPTS)},
		{"a query over IPv6 of a VLAN", withTags(six(plain, unix.IPPROTO_HOPOPTS), qTag, 5)},
		{"a query over IPv4", four(0)},
		{"a query over IPv4 of a VLAN", withTags(four(0), qTag, 5)},
		{"a query over IPv4 in a first fragment", four(0x2000)},
		{"a query over IPv4 in a last fragment", four(0x4)},
	}
}

// hasQuerier says whether the bridge knows of another querier.
func (s *guardSite) hasQuerier(tb testing.TB) bool {
	tb.Helper()
	return strings.Contains(nstest.Run(tb, s.host, "bridge", "-d", "mdb", "show", "dev", "cbr0"), "router ports on cbr0: veth1")
}

func TestPodsAreNoQueriers(t *testing.T) {
	t.Parallel()
	for _, query := range queries() {
		nstest.RunParallel(t, query.name, func(t *testing.T) {
			s := newQuerySite(t)
			n := Network{Name: "podnet", Groups: true}
			mustEnsure(t, s.c, n)
			s.want(t, []namedFrame{query}, false)
			expect.That(t, !s.hasQuerier(t), "the bridge takes the pod for a querier")
			nstest.Run(t, s.host, "ip", "link", "set", "veth1", "group", "0")
			// While its own timer waits for the first time, which a busy machine puts off, the bridge takes
			// nobody for a querier (br_multicast_select_querier).
			taken := false
			for range 100 {
				if taken = s.arrives(query.frame) && s.hasQuerier(t); taken {
					break
				}
			}
			expect.That(t, taken, "the bridge does not take a multicast router of the operator's for one")
		})
	}
}
