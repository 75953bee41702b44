package lan

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

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
		t.Run(u.name, func(t *testing.T) {
			t.Parallel()
			m := newMended(t, dualStack(nil))
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
