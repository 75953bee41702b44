package lan

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo/bridge/share"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// undone is what another program does to a share.
type undone struct {
	name, command string
}

func allUndone() []undone {
	outer, port := share.Pair(bridge)
	return []undone{
		{"promiscuous mode is off", "ip link set " + nic + " promisc off"},
		{"the pair is deleted", "ip link delete " + outer},
		{"the port is on no bridge", "ip link set " + port + " nomaster"},
		{"the program is gone", "tc qdisc del dev " + port + " clsact"},
		{"the bridge is deleted", "ip link delete " + bridge},
		{"nf_tables are flushed", "nft flush ruleset"},
		{"the NIC has another MAC", "ip link set " + nic + " address 02:00:00:00:00:99"},
		{"the NIC has a smaller MTU", "ip link set " + nic + " mtu 1400"},
	}
}

// mended is a host with pods whose share is to be undone.
type mended struct {
	*network
	a, b *pod
}

func newMended(t *testing.T, fields object) *mended {
	t.Helper()
	l, _ := newLab(t)
	return &mended{network: l.network(fields), a: l.newPod("a", published()...), b: l.newPod("b")}
}

func (m *mended) addPods() {
	m.Helper()
	for _, p := range []*pod{m.a, m.b} {
		m.add(p)
		m.serve(p.place, servicePort, both()...)
	}
}

// works fails the test unless everything is as before.
func (m *mended) works() {
	m.Helper()
	for _, family := range both() {
		m.everybodyTalks(family, m.a.place, m.b.place)
		m.publishedPortIsReached(family, m.a.place, m.b.place)
	}
	m.hostTalks()
	m.check(m.a)
	m.check(m.b)
	m.wantStatus("")
}

// hostTalks has the host call, and be called.
func (l *lan) hostTalks() {
	l.Helper()
	for _, family := range both() {
		l.ask(l.other, l.host.at(family), servicePort+1, l.other.at(family))
		l.ask(l.host, l.internet.at(family), servicePort, l.host.at(family))
	}
}

// undo does what another program does, and the host goes on talking. Its neighbours learn another MAC late: nobody
// announces that.
func (m *mended) undo(u undone) {
	m.Helper()
	m.hostRun("sh", "-ec", u.command)
	if strings.HasSuffix(u.name, "MAC") {
		for _, ns := range []place{m.other, m.internet, m.router, m.a.place, m.b.place} {
			ip(m, ns.ns, "neigh flush all nud stale nud reachable nud delay nud probe")
		}
	}
	m.hostTalks()
}

// isShared reports whether the NIC is shared as it was made.
func (n *network) isShared() bool {
	n.Helper()
	out, err := n.exec("tombolo", nil, nil, "uplink", "status", "--state", n.state)
	return err == nil && strings.Contains(out, nic+" on "+bridge+": shared")
}

func TestNextADDMendsWhatOthersUndo(t *testing.T) {
	for _, u := range allUndone() {
		if u.name == "the program is gone" {
			continue // an ADD lists no filters: tombolod and repair do
		}
		t.Run(u.name, func(t *testing.T) {
			t.Parallel()
			m := newMended(t, byHost())
			m.addPods()
			m.works()
			must.That(t, m.isShared(), "tombolo uplink status says something else")
			m.undo(u)

			c := m.add(m.newPod("c"))
			m.works()
			m.ask(c.place, m.other.ip4, servicePort, c.ip4)
		})
	}
}

// The host loses no packet, and a pod's connection goes on.
func TestKeeperMendsWhatOthersUndo(t *testing.T) {
	for _, u := range allUndone() {
		t.Run(u.name, func(t *testing.T) {
			t.Parallel()
			m := newMended(t, kept(byHost()))
			k := m.keeper()
			m.addPods()
			at := netip.AddrPortFrom(m.internet.ip4, 7000)
			ofPod := nstest.NewTalk(t, "tcp", m.internet.ns, at, m.a.ns, at)
			ofHost := nstest.NewTalk(t, "udp", m.internet.ns, at, m.host.ns, at)
			m.undo(u)
			began := time.Now()
			must.Until(t, "the keeper mends it: "+nstest.ReadIf(t, k.log), m.isShared)
			expect.That(t, time.Since(began) < 10*time.Second, "it is mended after %s", time.Since(began)) // a busy machine
			if !strings.HasSuffix(u.name, "MAC") {
				ofHost.Check(t) // its neighbours sent to the MAC of before
			}
			m.works()
			ofPod.Check(t)
		})
	}
}

// Without it every answer to a pod bypasses the host's conntrack. The module cannot be
// taken away here; a process with something else mounted over its parameters sees none.
func TestStatusTellsThatTheBridgeCannotCallTheFirewall(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	n := l.network(byHost())
	n.wantStatus("")
	n.by = []string{"unshare", "--mount", "--propagation", "private", "sh", "-c", `mount -t tmpfs none /proc/sys/net/bridge && exec "$0" "$@"`}
	n.wantStatus("br_netfilter")
}

// byHand is a DHCP server at the router's address that a test answers for.
type byHand struct {
	*network
	pod  *pod
	conn *net.UDPConn
}

// renewedByHand is a pod whose lease the keeper renews now, at a server by hand.
func renewedByHand(t *testing.T) (*byHand, *keeper) {
	t.Helper()
	l, d := newLab(t)
	s := &byHand{network: l.network(kept(nil))}
	k := s.keeper()
	s.pod = s.add(l.newPod("a"))
	k.kill()
	d.Stop()
	return s, s.keepAnew()
}

// keepAnew has the next keeper renew the lease at once, and forgets what was heard.
func (s *byHand) keepAnew() *keeper {
	s.Helper()
	if s.conn != nil {
		s.conn.Close()
	}
	// A process that is being started has the socket for a moment that is closed here.
	must.Until(s, "the server's port is free", func() bool {
		return s.router.ns.Do(func() (err error) {
			s.conn, err = net.ListenUDP("udp4", &net.UDPAddr{Port: dhcpv4.ServerPort})
			return err
		}) == nil
	})
	s.Cleanup(func() { s.conn.Close() })
	s.makeDue(s.leaseOf(s.pod).Hash)
	return s.keeper()
}

// hears waits for a message.
func (s *byHand) hears(kind dhcpv4.MessageType) *dhcpv4.DHCPv4 {
	s.Helper()
	buf := make([]byte, 2048)
	must.Succeed(s, s.conn.SetReadDeadline(time.Now().Add(aMinute)))
	for {
		size := must.Of(s.conn.Read(buf)).Get(s, "no %s", kind)
		if m, err := dhcpv4.FromBytes(buf[:size]); err == nil && m.MessageType() == kind {
			return m
		}
	}
}

// grants answers a renewal from an address: the pod may have what it has for half a day.
func (s *byHand) grants(m *dhcpv4.DHCPv4, from netip.Addr) {
	s.Helper()
	answer, err := dhcpv4.NewReplyFromRequest(m, dhcpv4.WithMessageType(dhcpv4.MessageTypeAck), dhcpv4.WithYourIP(m.ClientIPAddr),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(s.router.ip4.AsSlice())), dhcpv4.WithNetmask(net.CIDRMask(24, 32)),
		dhcpv4.WithRouter(s.router.ip4.AsSlice()), dhcpv4.WithLeaseTime(12*3600))
	must.Succeed(s, err)
	raw, err := transport.DialRaw(&transport.Config{NetNS: s.router.ns, Link: nstest.Index(s, s.router.ns, nic)})
	must.Succeed(s, err)
	defer raw.Close()
	must.Succeed(s, raw.Send(s.Context(), &dhcpc.Packet{Src: netip.AddrPortFrom(from, dhcpv4.ServerPort), Dst: netip.AddrPortFrom(s.pod.ip4, dhcpv4.ClientPort),
		DstMAC: dhcpc.Hex(m.ClientHWAddr), Payload: answer.ToBytes()}))
}

// says waits for one of some words of the keeper's, and gives it.
func (k *keeper) says(words ...string) (said string) {
	k.Helper()
	must.Until(k, "the keeper says one of: "+strings.Join(words, ", "), func() bool {
		i := slices.IndexFunc(words, func(w string) bool { return strings.Contains(nstest.ReadIf(k, k.log), w) })
		if i >= 0 {
			said = words[i]
		}
		return i >= 0
	})
	return said
}

// A machine elsewhere that works with a pod knows what the pod was asked, and answers from where it is.
func TestKeeperBelievesNoServerElsewhere(t *testing.T) {
	t.Parallel()
	s, k := renewedByHand(t)
	s.grants(s.hears(dhcpv4.MessageTypeRequest), netip.MustParseAddr("10.66.0.1"))
	const silent, renewed = "no server renews the lease yet", "lease renewed"
	expect.Equal(t, k.says(silent, renewed), silent, "it says")
	k.kill()
	k = s.keepAnew()
	s.grants(s.hears(dhcpv4.MessageTypeRequest), s.router.ip4)
	expect.Equal(t, k.says(silent, renewed), renewed, "the router's answer was not taken either")
}
