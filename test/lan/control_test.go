package lan

import (
	"encoding/json"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// both is both families.
func both() []int { return []int{4, 6} }

// usual are the flows of most tests: between the host and a machine of its LAN, and
// between the host and one behind the router.
func (l *lan) usual() []between { return []between{{l.host, l.other}, {l.host, l.internet}} }

// usualFlows starts them, once everybody knows everybody.
func (l *lan) usualFlows(families ...int) *meter {
	l.Helper()
	for _, pair := range l.usual() {
		l.meet(families, pair)
	}
	return l.measure(families, l.usual()...)
}

// Without it, no count of what is lost would mean anything.
func TestMeterLosesNothingByItself(t *testing.T) {
	l := newHost(t)
	m := l.usualFlows(both()...)
	idle := m.during(func() {
		// About as long as a takeover and its restore.
		m.pass(m.position())
	})
	wantWithin(t, "nothing happens", limit{}, idle)
	expect.That(t, len(idle) == 16,
		"%d flows, want UDP and TCP, IPv4 and IPv6, in both directions, with two peers", len(idle))
	for _, r := range idle {
		expect.That(t, r.sent >= tail, "%s: too little to say anything", r)
	}
}

// The control of all that follows: what it is like without make before break.
func TestMeterSeesANaiveTakeover(t *testing.T) {
	l := newHost(t)
	m := l.usualFlows(both()...)
	reports := m.during(func() {
		ip(t, l.host.ns,
			"link add "+bridge+" type bridge forward_delay 0",
			"link set "+bridge+" address "+macOf(t, l.host, nic)+" up",
			"address flush dev "+nic)
		// A person who types this is slower than the flows.
		m.sendOnce()
		ip(t, l.host.ns,
			"link set "+nic+" master "+bridge,
			"address add "+hostIP4+"/24 brd + dev "+bridge,
			"address add "+hostIP6+"/64 dev "+bridge,
			// The kernel has taken IPv4's away with its address, and has left IPv6's.
			"route add default via "+routerIP4,
			"route replace default via "+routerIP6)
	})
	if lost(reports) == 0 {
		t.Errorf("the meter sees no loss:\n%s", lines(reports))
	}
	retransmitted := 0
	for _, r := range reports {
		retransmitted += r.retransmitted
	}
	if retransmitted == 0 {
		t.Errorf("the meter sees no retransmission:\n%s", lines(reports))
	}
	t.Logf("a naive takeover: %d datagrams lost, %d segments retransmitted\n%s", lost(reports), retransmitted, lines(reports))
	// It is the takeover that lost them: they flow again.
	wantWithin(t, "after it", limit{}, m.during(func() {}))
}

// A sender that hears nothing of what it sent sends it again, also if it was the answer
// that was late: on a busy machine, that befalls any stream.
func TestMeterCountsNoSegmentThatWasSentAgainInVain(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	l.meet([]int{4}, [2]place{l.other, l.host})
	f := connect(t, "tcp", 4, l.other, l.host)
	defer f.out.Close()
	defer f.in.Close()
	// The answers get lost but for those that say what came twice.
	nstest.Run(t, l.other.ns, "nft", `table inet late { chain in { type filter hook input priority 0; meta l4proto tcp tcp option sack missing drop; }; }`)
	must.Succeed(t, expect.Err(f.out.Write(make([]byte, messageLen))))
	must.Until(l, "a segment is sent again in vain, and not counted", func() bool {
		all, inVain, err := f.sentAgain()
		must.Succeed(t, err)
		due, err := f.retransmissions()
		return err == nil && all > 0 && inVain > 0 && due == 0
	})
}

func macOf(t testing.TB, p place, link string) string {
	t.Helper()
	var list []struct{ Address string }
	unmarshal(t, nstest.Run(t, p.ns, "ip", "-json", "link", "show", "dev", link), &list)
	return list[0].Address
}

func unmarshal(t testing.TB, text string, into any) {
	t.Helper()
	err := json.Unmarshal([]byte(text), into)
	must.That(t, err == nil, "%v: %s", err, text)
}
