package lan

import (
	"os"
	"strconv"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// runsVar is how often the NIC is taken over and given back where that is done over
// and over.
const runsVar = "TOMBOLO_TAKEOVERS"

func runs(t testing.TB) int {
	t.Helper()
	value := os.Getenv(runsVar)
	if value == "" {
		return 3
	}
	n, err := strconv.Atoi(value)
	must.That(t, err == nil && n >= 1, "%s=%q: want a number of 1 or more", runsVar, value)
	return n
}

// What may befall a flow. There are some microseconds in which the kernel takes no frames
// from a link that becomes a port, or is to be none any more, and drops one that comes then.
func duringTake() limit    { return limit{lost: 1, retransmitted: 1} }
func duringRestore() limit { return limit{lost: 1, retransmitted: 1} }

// take takes the host's NIC over by the operator's command, with some options.
func (n *network) take() {
	n.Helper()
	n.operate("uplink take", nic, bridge)
}

// restore gives it back.
func (n *network) restore() {
	n.Helper()
	n.operate("uplink restore", nic, bridge)
	n.wantNoFile("uplinks/" + nic + ".json")
}

// while checks something while the NIC is a port.
type while func(t testing.TB, l *lan)

// takeAndRestore does so while flows run, and compares what was with what is.
func (n *network) takeAndRestore(m *meter, meanwhile while) (took, restored pause) {
	n.Helper()
	before, moved := n.lan.state(), n.moved(nic)
	took = wantWithin(n, "take", duringTake(), m.during(func() { n.take() }))
	n.wantBare(nic)
	wantSame(n, "what moved to the bridge", moved, n.moved(bridge))
	n.operate("uplink status", nic)
	if meanwhile != nil {
		meanwhile(n, n.lan)
	}
	restored = wantWithin(n, "restore", duringRestore(), m.during(n.restore))
	n.wantNoLink(bridge)
	wantSame(n, "the host after the restore", before, n.lan.state())
	return took, restored
}

func TestTakeoverLosesNothing(t *testing.T) {
	l := newHost(t)
	m := l.usualFlows(both()...)
	n := l.network(nil)
	var took, restored []pause
	for range runs(t) {
		a, b := n.takeAndRestore(m, nil)
		took, restored = append(took, a), append(restored, b)
	}
	t.Logf("take: %s", summary(took))
	t.Logf("restore: %s", summary(restored))
}

// The first ADD of a network shares the NIC, and the host loses nothing, nor has it anything else afterwards.
func TestFirstADDSharesTheNICAndLosesNothing(t *testing.T) {
	l := newHost(t)
	strictly(l)
	manyRoutes(l)
	secondNIC(l)
	ip(l, l.host.ns, "address add fd50::77/64 dev "+nic+" valid_lft 1000 preferred_lft 1000 nodad")
	m := l.usualFlows(both()...)
	n := l.network(object{"ipam": staticAddresses(t.TempDir())})
	before, moved := l.state(), l.moved(nic)
	p := l.newPod("a")
	wantWithin(t, "ADD", limit{}, m.during(func() { n.add(p) }))
	wantSame(t, "the NIC", moved, l.moved(nic))
	wantWithin(t, "removal", limit{}, m.during(func() { n.del(p); n.operate("remove", "home") }))
	l.wantNoLink(bridge)
	wantSame(t, "the host after the removal", before, l.state())
}

// What the router advertised to the host's kernel stays, though the host forwards now. A takeover would end it, and says
// what to do instead.
func TestHostKeepsWhatTheRouterAdvertised(t *testing.T) {
	l := newLAN(t)
	l.advertised()
	for _, p := range []place{l.other, l.internet} {
		l.serve(p, servicePort, both()...)
	}
	n := l.network(byHost())
	n.wantRefused("the address "+l.host.ip6.String()+"/64 for a limited time", "its default route by fe80::", `mode "lan" shares eth0 without taking it`)
	before, m := l.moved(nic), l.usualFlows(both()...)
	a := l.newPod("a")
	wantWithin(t, "the first ADD", limit{}, m.during(func() { n.add(a) }))
	expect.Equal(t, nstest.Sysctl(t, l.host.ns, "net/ipv6/conf/"+nic+"/force_forwarding"), "1", "the host does not forward")

	hears := func() {
		t.Helper()
		ip(t, l.host.ns, "-6 route flush default proto ra")
		l.followsRouter()
		wantSame(t, "the host", before, l.moved(nic))
		for _, family := range both() {
			l.ask(l.host, l.internet.at(family), servicePort, l.host.at(family))
		}
	}
	hears()
	for _, family := range both() {
		l.ask(a.place, l.internet.at(family), servicePort, a.at(family))
	}
	n.del(a)
	wantWithin(t, "removal", limit{}, m.during(func() { n.operate("remove", "home") }))
	hears()
}

func TestHostWithoutTrafficIsReachedAfterATakeover(t *testing.T) {
	t.Parallel()
	// Nobody knows anybody's MAC: no neighbour is there to be copied.
	l := newHost(t)
	n := l.network(nil)
	before := l.state()
	n.take()
	l.meet(both(), [2]place{l.other, l.host}, [2]place{l.internet, l.host}, [2]place{l.host, l.internet})
	n.restore()
	wantSame(t, "the host after the restore", before, l.state())
	l.meet(both(), [2]place{l.other, l.host})
}
