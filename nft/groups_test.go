package nft

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// groupSite is a guard's site whose host listens for datagrams that come in by the pod's
// port, and not by the bridge, and takes router advertisements there.
type groupSite struct {
	*guardSite
	past4, past6 net.PacketConn
	heard        net.PacketConn // by the bridge
	round        int
}

const groupPort = 9

func newGroupSite(tb testing.TB) *groupSite {
	tb.Helper()
	s := &groupSite{guardSite: newGuardSite(tb)}
	nft(tb, s.host, "flush ruleset")
	nstest.Sysctl(tb, s.host, "net/ipv6/conf/veth1/accept_ra", "2")
	s.past4, s.past6 = s.listenOn(tb, "veth1", "udp4"), s.listenOn(tb, "veth1", "udp6")
	s.heard = s.listenOn(tb, "cbr0", "udp4")
	must.Succeed(tb, s.heard.SetReadDeadline(time.Now().Add(2*patience)))
	return s
}

// listenOn gives a socket of the host that hears what comes in by one link.
func (s *groupSite) listenOn(tb testing.TB, link, network string) net.PacketConn {
	tb.Helper()
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var failed error
		err := c.Control(func(fd uintptr) { failed = unix.BindToDevice(int(fd), link) })
		return errors.Join(err, failed)
	}}
	var conn net.PacketConn
	must.Succeed(tb, s.host.Do(func() error {
		var err error
		conn, err = config.ListenPacket(tb.Context(), network, fmt.Sprintf(":%d", groupPort))
		return err
	}))
	tb.Cleanup(func() { conn.Close() })
	return conn
}

// udp is a datagram with a checksum, as IPv6 demands it.
func udp(src, dst string, port int, text string) []byte {
	d := join(be16(1024), be16(port), be16(8+len(text)), be16(0), []byte(text))
	pseudo := join(ip(src), ip(dst), be16(0), be16(len(d)), be16(0), be16(unix.IPPROTO_UDP))
	return with(d, 6, checksum(join(pseudo, d), 0)...)
}

// advertisement is that of a router of high preference.
func advertisement(src string) []byte {
	return packet6(src, allNodes, unix.IPPROTO_ICMPV6, icmp6(src, allNodes, routerAdvert, []byte{64, 0x08}, be16(1800), make([]byte, 8)))
}

func linkLocalGroup(last int) string { return fmt.Sprintf("01:80:c2:00:00:%02x", last) }

// reached is what came of frames to link-local groups, by the last digits of these.
type reached struct {
	host    map[string][]string // what the host took, by kind
	flooded []string            // what other pods saw
	learnt  bool                // whether the bridge learnt of their source
}

// attack sends to each of the 16 groups all kinds of frames, and one to the host that
// passes in any case.
func (s *groupSite) attack(tb testing.TB) reached {
	tb.Helper()
	const from = "02:66:66:66:66:66"
	s.round++
	nstest.Run(tb, s.host, "ip", "-6", "route", "flush", "proto", "ra")
	nstest.Run(tb, s.host, "bridge", "fdb", "flush", "dev", "cbr0", "nopermanent")
	token := fmt.Sprintf("of round %d", s.round)
	last := fmt.Sprintf("end %d", s.round)
	var frames [][]byte
	for group := range 16 {
		to, text := linkLocalGroup(group), func(kind string) string { return fmt.Sprintf("%s %x %s", kind, group, token) }
		v4 := func(kind string) []byte {
			return packet4(pod4, bridge4, 0, 17, udp(pod4, bridge4, groupPort, text(kind)))
		}
		v6 := packet6(pod6, bridge6, 17, udp(pod6, bridge6, groupPort, text("IPv6")))
		frames = append(frames,
			ether(to, from, unix.ETH_P_IP, v4("IPv4")),
			ether(to, from, unix.ETH_P_IPV6, v6),
			ether(to, from, unix.ETH_P_8021Q, be16(0), be16(unix.ETH_P_IP), v4("tagged")),
			ether(to, from, unix.ETH_P_8021AD, be16(0), be16(unix.ETH_P_IP), v4("outer tag")),
			ether(to, from, unix.ETH_P_IPV6, advertisement(fmt.Sprintf("fe80::66:%x", group))),
			ether(to, from, 0x88cc, []byte(text("LLDP"))),
			ether(to, from, unix.ETH_P_PAE, []byte(text("802.1X"))),
		)
	}
	s.pod1.send(append(frames,
		ether(bridgeMAC, podMAC, unix.ETH_P_IP, packet4(pod4, bridge4, 0, 17, udp(pod4, bridge4, groupPort, last))), // by the bridge
		join(leasingFrames()[0].frame, []byte(last)))...)
	for b := make([]byte, 64); ; {
		n, _, err := s.heard.ReadFrom(b)
		must.Succeed(tb, err)
		if string(b[:n]) == last {
			break
		}
	}
	got := reached{host: map[string][]string{}, learnt: slices.Contains(s.learnt(tb, "veth1"), from)}
	for _, conn := range []net.PacketConn{s.past4, s.past6} {
		for _, text := range queued(tb, conn) {
			if kind, ok := strings.CutSuffix(text, " "+token); ok {
				at := strings.LastIndex(kind, " ")
				got.host[kind[:at]] = append(got.host[kind[:at]], kind[at+1:])
			}
		}
	}
	routes := nstest.Run(tb, s.host, "ip", "-6", "route", "show", "default", "proto", "ra")
	for group := range 16 {
		if strings.Contains(routes, fmt.Sprintf("via fe80::66:%x ", group)) {
			got.host["route"] = append(got.host["route"], fmt.Sprintf("%x", group))
		}
	}
	got.flooded = s.pod2.textsBefore(token, last)
	return got
}

func queued(tb testing.TB, conn net.PacketConn) []string {
	tb.Helper()
	raw, err := conn.(syscall.Conn).SyscallConn()
	must.Succeed(tb, err)
	var list []string
	must.Succeed(tb, raw.Control(func(fd uintptr) {
		b := make([]byte, 64)
		for {
			n, _, err := unix.Recvfrom(int(fd), b, unix.MSG_DONTWAIT)
			if err != nil {
				return
			}
			list = append(list, string(b[:n]))
		}
	}))
	return list
}

// textsBefore gives the frames that end with a text behind a token, until one came that
// ends with another.
func (w *wire) textsBefore(token, last string) []string {
	w.tb.Helper()
	var list []string
	buf := make([]byte, 1<<16)
	for {
		n, _, err := unix.Recvfrom(w.fd, buf, 0)
		if err == unix.EINTR {
			continue
		}
		must.Succeed(w.tb, err, "waiting for the last frame")
		text := string(buf[:n])
		if strings.HasSuffix(text, last) {
			return list
		}
		if _, isToken := strings.CutSuffix(text, token); isToken {
			list = append(list, groupOf(buf[:n]))
		}
	}
}

// groupOf is the last digit of the group that a frame is for.
func groupOf(frame []byte) string { return fmt.Sprintf("%x", frame[5]) }

// groupsBut gives the last digits of all groups but some.
func groupsBut(others string) []string {
	return slices.DeleteFunc(strings.Split("0123456789abcdef", ""), func(g string) bool { return strings.Contains(others, g) })
}

// wantGroups compares what came of an attack: to the host in each of its kinds, and to
// others. The kernel drops pause frames (:01) itself.
func (got reached) want(t *testing.T, when string, host, flooded []string) {
	t.Helper()
	for _, kind := range []string{"IPv4", "IPv6", "tagged", "outer tag", "route"} {
		expect.That(t, slices.Equal(got.host[kind], host),
			"%s: the host takes %s by the groups %v, want %v", when, kind, got.host[kind], host)
	}
	have := slices.Compact(got.flooded)
	expect.That(t, slices.Equal(have, flooded), "%s: another pod sees frames to %v, want %v", when, have, flooded)
	learnt := len(host)+len(flooded) > 0
	expect.That(t, got.learnt == learnt, "%s: the bridge learnt the source: %t, want %t", when, got.learnt, learnt)
}

func (s *groupSite) mask(tb testing.TB, mask string) {
	tb.Helper()
	nstest.Run(tb, s.host, "ip", "link", "set", "veth1", "type", "bridge_slave", "group_fwd_mask", mask)
}

// forwards waits until both pods' ports forward, as they do some time after STP came on.
func (s *groupSite) forwards(tb testing.TB) {
	tb.Helper()
	must.Until(tb, "both ports forward", func() bool {
		return strings.Count(nstest.Run(tb, s.host, "bridge", "link", "show"), "state forwarding") == 2
	})
}

// The firewall knows neither pod, and their ports are in no group of links: by their
// names alone it knows what they are.
func TestFramesToLinkLocalGroupsReachNobody(t *testing.T) {
	t.Parallel()
	const both = "0x4001" // of STP and LLDP
	s := newGroupSite(t)
	n := Network{Name: "podnet", Groups: true}
	none := []string(nil)

	s.attack(t).want(t, "without rules", groupsBut("01"), []string{"0"})
	s.mask(t, both)
	s.attack(t).want(t, "without rules, two groups forwarded", groupsBut("01e"), []string{"0", "e"})
	mustEnsure(t, s.c, n)
	wantReady(t, s.c, n)
	s.attack(t).want(t, "with rules", none, none)
	s.mask(t, "0")
	s.attack(t).want(t, "with rules, no group forwarded", []string{"e"}, none)

	nstest.Run(t, s.host, "ip", "link", "set", "cbr0", "type", "bridge", "stp_state", "1", "forward_delay", "200")
	s.forwards(t)
	s.attack(t).want(t, "with STP, no group forwarded", []string{"0", "e"}, none)
	s.mask(t, both)
	s.attack(t).want(t, "with STP", none, none)
	// An administrator's mask for the whole bridge has others pass by prerouting.
	nstest.Run(t, s.host, "ip", "link", "set", "cbr0", "type", "bridge", "group_fwd_mask", "0xfff8")
	s.attack(t).want(t, "with all groups forwarded by the bridge", none, none)
	nft(t, s.host, "delete table bridge tombolo")
	s.attack(t).want(t, "with all groups forwarded by the bridge, without rules", []string{"2"}, groupsBut("12"))
}

// What is no pod's may say there what it likes: a switch behind the host's NIC, say.
func TestOtherPortsMaySendToLinkLocalGroups(t *testing.T) {
	t.Parallel()
	s := newGroupSite(t)
	mustEnsure(t, s.c, Network{Name: "podnet", Groups: true})
	nstest.Run(t, s.host, "sh", "-ec", "ip link set up0 master cbr0; ip link set up0 type bridge_slave group_fwd_mask 0x4000")
	switchPort := openWire(t, s.outside, "eth0")
	for group, wanted := range map[int]bool{0x0: true, 0xe: true, 0x3: false} {
		text := fmt.Sprintf("group %x", group)
		switchPort.send(ether(linkLocalGroup(group), foreignMAC, 0x88cc, []byte(text)), ether(broadcastMAC, foreignMAC, 0x88cc, []byte("last "+text)))
		expect.Equal(t, len(s.pod2.textsBefore(text, "last "+text)) > 0, wanted, "a pod gets the frame to group %x", group)
	}
}

func TestGroupRulesAreMended(t *testing.T) {
	t.Parallel()
	n := Network{Name: "podnet", Bridge: "cbr0", Groups: true}
	for _, harm := range []string{
		"flush ruleset",
		"delete table bridge tombolo",
		"flush chain bridge tombolo groups",
		"delete chain bridge tombolo groups-input",
		"insert rule bridge tombolo groups-input accept",
		"add table bridge tombolo { flags dormant; }",
	} {
		nstest.RunParallel(t, harm, func(t *testing.T) {
			c, ns := dialNew(t)
			mustEnsure(t, c, n)
			wantReady(t, c, n)
			nft(t, ns, harm)
			expect.Of(c.Ready(t.Context(), n)).Is(t, false, "Ready")
			diffs, err := c.Check(t.Context(), n)
			expect.That(t, err == nil && len(diffs) > 0, "Check: %v, %v", diffs, err)
			out := mustEnsure(t, c, n)
			expect.That(t, out.Changed, "Ensure: %+v", out)
			wantReady(t, c, n)
		})
	}
}

// The rules name no network and hold no elements, so the table does not say whether
// another network needs them.
func TestGroupRulesStayAsLongAsThereIsANetwork(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	first, second := Network{Name: "a", Bridge: "cbr0", Groups: true}, Network{Name: "b", Bridge: "br1", Groups: true}
	mustEnsure(t, c, first)
	mustEnsure(t, c, second)
	must.Succeed(t, c.RemoveNetwork(t.Context(), "a"))
	wantReady(t, c, second)
	must.Succeed(t, c.RemoveNetwork(t.Context(), "b"))
	expect.Equal(t, nft(t, ns, "list", "ruleset"), "", "after both are removed")
}

// inGroup puts the other pod's port into a group of links.
func (s *guardSite) inGroup(tb testing.TB, group int) {
	tb.Helper()
	nstest.Run(tb, s.host, "ip", "link", "set", "veth2", "group", strconv.Itoa(group))
}

func TestReportsKeepAwayFromPodsThatDoNotReadThem(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	report, rest := namedFrame{}, decent()
	for i, f := range rest {
		if f.name == "multicast listener report" {
			report = f
		}
		if strings.HasPrefix(f.name, "multicast listener report") && !strings.Contains(f.name, "version 1") {
			rest[i].frame = nil
		}
	}
	s.inGroup(t, PodGroup)
	s.want(t, []namedFrame{report}, true)
	s.network.DropReports = true
	mustEnsure(t, s.c, s.network)
	wantReady(t, s.c, s.network)
	s.want(t, []namedFrame{report}, false)
	for _, f := range rest {
		if f.frame != nil {
			s.want(t, []namedFrame{f}, true)
		}
	}
	s.inGroup(t, 0)
	s.want(t, []namedFrame{report}, true)
	s.inGroup(t, PodGroup)
	s.network.DropReports = false
	mustEnsure(t, s.c, s.network)
	s.want(t, []namedFrame{report}, true)
}

func TestBridgeReadsReportsThatItKeepsFromPods(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	s.network.DropReports = true
	mustEnsure(t, s.c, s.network)
	s.inGroup(t, PodGroup)
	nstest.Run(t, s.host, "ip", "link", "set", "cbr0", "type", "bridge", "mcast_snooping", "1")
	nstest.Run(t, s.pod, "ip", "address", "add", "fd00:77::77/64", "dev", "eth0", "nodad")
	const group = "ff02::1:ff00:77"
	must.Until(t, "the bridge knows of a port with "+group, func() bool {
		return strings.Contains(nstest.Run(t, s.host, "bridge", "mdb", "show", "dev", "cbr0"), group)
	})
}

func TestNetworksAreQuietByThemselves(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	c := dial(t, ns)
	a, b := Network{Name: "a", Bridge: "cbr0", DropReports: true}, Network{Name: "b", Bridge: "br1", DropReports: true}
	mustEnsure(t, c, a)
	mustEnsure(t, c, b)
	wantReady(t, c, a)
	must.Succeed(t, c.RemoveNetwork(t.Context(), "a"))
	wantReady(t, c, b)
	out := nft(t, ns, "list", "ruleset")
	expect.That(t, !strings.Contains(out, "quiet-a"), "something of a network is left that was removed:\n%s", out)
	must.Succeed(t, c.RemoveNetwork(t.Context(), "b"))
	expect.Equal(t, nft(t, ns, "list", "ruleset"), "", "after both are removed")
}
