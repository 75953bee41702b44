package lan

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// undone is what a network manager does that does not know of the bridge.
type undone struct {
	name     string
	commands []string
	tells    string // CHECK and STATUS, of it
}

func allUndone() []undone {
	return []undone{
		{"the NIC is no port", []string{"link set " + nic + " nomaster"}, nic},
		{"the host's address is on the NIC", []string{"address add " + hostIP4 + "/24 dev " + nic, "address flush dev " + bridge}, hostIP4},
		{"the bridge is deleted", []string{"link delete " + bridge}, bridge},
	}
}

// undo is what the manager does.
func (u *undone) undo(l *lan) {
	l.Helper()
	ip(l, l.host.ns, u.commands...)
}

// mended is a host with pods whose takeover is to be undone.
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
	m.wantBare4(nic)
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

// asTaken says whether the uplink is as the takeover made it.
func (n *network) asTaken() bool {
	n.Helper()
	out, fine := n.uplinkStatus()
	return fine && strings.Contains(out, nic+" on "+bridge+": taken")
}

func TestNextADDMendsWhatANetworkManagerUndoes(t *testing.T) {
	for _, u := range allUndone() {
		if u.tells == hostIP4 {
			continue // an ADD does not look for the host's addresses
		}
		t.Run(u.name, func(t *testing.T) {
			t.Parallel()
			m := newMended(t, byHost())
			m.addPods()
			m.works()
			u.undo(m.lan)

			m.wantStatus(u.tells)
			if _, err := m.verb("CHECK", m.a); err == nil || !strings.Contains(err.Error(), u.tells) {
				t.Errorf("CHECK: %v, want that it tells of %s", err, u.tells)
			}
			expect.That(t, !m.asTaken(), "tombolo uplink status tells nothing")
			m.wantNoAnswer(m.a.place, m.internet.ip4, servicePort)

			c := m.add(m.newPod("c"))
			m.works()
			m.ask(c.place, m.internet.ip4, servicePort, c.ip4)
		})
	}
}

func TestKeeperMendsWhatANetworkManagerUndoes(t *testing.T) {
	for _, u := range allUndone() {
		t.Run(u.name, func(t *testing.T) {
			t.Parallel()
			m := newMended(t, dualStack(kept(nil)))
			k := m.keeper()
			m.addPods()
			m.works()
			u.undo(m.lan)
			must.Until(m, "the keeper mends it", func() bool {
				return strings.Contains(nstest.ReadIf(t, k.log), "uplink mended") && m.asTaken()
			})
			// The host first, and then its pods.
			must.Until(m, "the keeper puts the pods back", func() bool {
				_, errA := m.verb("CHECK", m.a)
				_, errB := m.verb("CHECK", m.b)
				return errA == nil && errB == nil
			})
			m.hostTalks()
			m.works()
		})
	}
}

// Two programs that undo each other cut the host off for as long as they do.
func TestKeeperYieldsToAManagerThatUndoesATakeoverAgainAndAgain(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	n := l.network(object{"ipam": staticAddresses(t.TempDir())})
	k := n.keeper()
	n.operate("uplink take", nic, bridge)
	mends := func() int { return strings.Count(nstest.ReadIf(t, k.log), "uplink mended") }
	for i := range 3 {
		ip(t, l.host.ns, "link set "+nic+" nomaster")
		must.Until(t, fmt.Sprintf("the keeper mends it, %d times", i+1), func() bool { return mends() == i+1 })
	}
	if log := nstest.ReadIf(t, k.log); !strings.Contains(log, "something keeps undoing the takeover") {
		t.Errorf("the takeover was undone three times within a minute, and the keeper does not say that it yields:\n%s", log)
	}
	ip(t, l.host.ns, "link set "+nic+" nomaster")
	time.Sleep(5 * time.Second)
	if count := mends(); count != 3 {
		t.Errorf("undone a fourth time, the takeover is mended at once: %d times", count)
	}
}

// Nobody's pods need a NIC that the operator took over, and the host does.
func TestRepairMendsATakeoverThatNoNetworkIsBy(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	n := l.network(nil)
	n.operate("uplink take", nic, bridge)
	ip(t, l.host.ns, "link set "+nic+" nomaster")
	n.operate("repair")
	if out, fine := n.uplinkStatus(); !fine {
		t.Errorf("after tombolo repair, tombolo uplink status says: %s", out)
	}
	l.meet(both(), [2]place{l.host, l.internet}, [2]place{l.internet, l.host})
}

// takenWithLease is a host with a leased address, whose NIC is taken over and whose lease the keeper has.
func takenWithLease(t *testing.T) (n *network, d *dhcp, k *keeper) {
	t.Helper()
	l := newLAN(t)
	d = l.dnsmasq()
	l.plug(l.host.ns)
	l.followsRouter()
	l.udhcpc()
	n = l.network(kept(nil))
	k = n.keeper()
	n.operate("uplink take", nic, bridge)
	must.Until(l, "the keeper knows", n.hostIsKept)
	return n, d, k
}

// Somebody who undoes a takeover may take the record of the host's lease along.
func TestKeeperAdoptsTheHostsLeaseAgain(t *testing.T) {
	t.Parallel()
	n, d, k := takenWithLease(t)
	mac := macOf(t, n.host, nic)
	heard := len(d.messages(mac))
	must.Succeed(t, os.Remove(filepath.Join(n.leases, lease.HostHash(nic)+".json")))
	ip(t, n.host.ns, "link set "+nic+" nomaster")
	must.Until(n, "the keeper mends it", func() bool { return strings.Contains(nstest.ReadIf(t, k.log), "uplink mended") })
	d.renewed(mac, heard)
	must.Until(n, "the keeper knows", n.hostIsKept)
	n.leasedOn(bridge)
}

// What a keeper that begins finds wrong with the host's lease is told until it is mended, and no longer:
// the next renewal may be hours away.
func TestTroubleOfTheHostsLeaseEndsWhenItIsMended(t *testing.T) {
	t.Parallel()
	n, _, first := takenWithLease(t)
	first.kill()
	ip(t, n.host.ns, "link set "+nic+" nomaster")
	k := n.keeper()
	must.Until(n, "the keeper tells of it", func() bool { return strings.Contains(nstest.ReadIf(t, k.log), "is not a port of "+bridge) })
	must.Until(n, "the keeper mends it", func() bool { return strings.Contains(nstest.ReadIf(t, k.log), "uplink mended") })
	must.Until(n, "nothing is wrong any more", n.hostIsKept)
	expect.That(t, !strings.Contains(nstest.ReadIf(t, k.log), "lease renewed"),
		"the lease was renewed: this tests nothing")
	n.wantStatus("")
}

// A server that is silent is told of while the host still has its address, and until it answers.
func TestSilentServerOfTheHostsLeaseIsToldOf(t *testing.T) {
	t.Parallel()
	n, d, k := takenWithLease(t)
	k.kill()
	n.makeDue(lease.HostHash(nic))
	d.Stop()
	k = n.keeper()
	must.Until(n, "an operator is told", func() bool {
		out, fine := n.uplinkStatus()
		return !fine && strings.Contains(out, "no server renews the lease yet") && strings.Contains(out, "`tombolo uplink restore "+nic+" "+bridge+"`")
	})
	n.wantStatus("no server renews the lease yet")
	n.leasedOn(bridge)
	k.kill()
	d.start()
	n.makeDue(lease.HostHash(nic))
	n.keeper()
	must.Until(n, "it is well again", func() bool { _, fine := n.uplinkStatus(); return fine && n.hostIsKept() })
	n.wantStatus("")
}

// A server that refuses what the host has, and gives nothing else, takes nothing from it.
func TestHostKeepsARefusedAddressUntilThereIsAnother(t *testing.T) {
	t.Parallel()
	n, d, k := takenWithLease(t)
	k.kill()
	d.Stop()
	writeFile(t, d.LeaseFile, fmt.Sprintf("%d 02:00:00:00:00:99 192.168.50.66 * *\n", time.Now().Add(time.Hour).Unix()))
	d.Start("--dhcp-range=192.168.50.66,192.168.50.66,1h")
	n.makeDue(lease.HostHash(nic))
	k = n.keeper()
	k.says("no server gives a lease")
	expect.Contains(t, d.Logged(), "DHCPNAK(", "the server refused nothing, so that the test shows nothing")
	n.leasedOn(bridge)
	must.Until(n, "it is on record", func() bool { out, _ := n.uplinkStatus(); return strings.Contains(out, "no server gives a lease") })
	n.wantStatus("no server gives a lease")
}

// Without it every answer to a pod bypasses the host's conntrack. The module cannot be
// taken away here; a process with something else mounted over its parameters sees none.
func TestStatusTellsThatTheBridgeCannotCallTheFirewall(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	n := l.network(nil)
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

// A server that hears of the renewal after the RELEASE has the address leased again.
func TestLeaseThatIsDeletedDuringItsRenewalIsReleasedAgain(t *testing.T) {
	t.Parallel()
	s, k := renewedByHand(t)
	s.hears(dhcpv4.MessageTypeRequest)
	for _, signal := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGCONT} {
		must.Succeed(t, k.cmd.Process.Signal(signal))
		if signal == syscall.SIGSTOP {
			s.del(s.pod)
		}
		s.hears(dhcpv4.MessageTypeRelease)
	}
}
