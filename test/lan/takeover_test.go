package lan

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

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
func (n *network) take(options ...string) {
	n.Helper()
	// Long enough for a gateway on a machine that is busy with other things.
	n.operate("uplink take", append(options, "--timeout", "1m", nic, bridge)...)
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

// The first ADD of a network does as much, and for agents that read the NIC's addresses it leaves them there.
func TestFirstADDTakesTheNICOverAndLosesNothing(t *testing.T) {
	for _, keep := range []bool{false, true} {
		t.Run(fmt.Sprintf("keepAddressOnUplink %t", keep), func(t *testing.T) {
			l := newHost(t)
			if keep {
				strictly(l)
				manyRoutes(l)
				ip(l, l.host.ns, "address add fd50::77/64 dev "+nic+" valid_lft 1000 preferred_lft 1000 nodad")
			}
			// As an ADD sets them.
			for _, family := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
				nstest.Sysctl(t, l.host.ns, "net/"+family, "1")
			}
			m := l.usualFlows(both()...)
			n := l.network(object{"keepAddressOnUplink": keep, "ipam": staticAddresses(t.TempDir())})
			before, moved, addresses := l.state(), l.moved(nic), l.addressesOf(nic)
			p := l.newPod("a")
			wantWithin(t, "ADD", duringTake(), m.during(func() { n.add(p) }))
			wantSame(t, "what moved to the bridge", moved, l.moved(bridge))
			if keep {
				wantSame(t, "addresses on the NIC", addresses, l.addressesOf(nic))
				if list := l.hostRun("ip", "-o", "address", "show", "to", "fd50::77", "dev", nic); !strings.Contains(list, "valid_lft forever") {
					t.Errorf("no router refreshes an address on the NIC any more, and it will end: %s", list)
				}
			} else {
				l.wantBare(nic)
			}
			if got := l.routeOf(l.host, l.internet.ip4); !strings.Contains(got, "dev "+bridge+" ") {
				t.Errorf("the host's route is %s, want one by the bridge", got)
			}
			n.del(p)
			wantWithin(t, "restore", duringRestore(), m.during(n.restore))
			l.wantNoLink(bridge)
			wantSame(t, "the host after the restore", before, l.state())
		})
	}
}

// addressesOf are a link's addresses but for those that are of use on the link alone.
func (l *lan) addressesOf(link string) []string {
	l.Helper()
	var list []string
	for _, o := range l.show("address show scope global dev " + link) {
		for _, a := range o["addr_info"].([]any) {
			// Those that are filtered out are empty.
			if local := a.(object)["local"]; local != nil {
				list = append(list, local.(string))
			}
		}
	}
	return list
}

func TestHostWithoutTrafficIsReachedAfterATakeover(t *testing.T) {
	for _, options := range [][]string{nil, {"--keep-address"}} {
		t.Run(fmt.Sprint(options), func(t *testing.T) {
			t.Parallel()
			// Nobody knows anybody's MAC: no neighbour is there to be copied.
			l := newHost(t)
			n := l.network(nil)
			before, addresses := l.state(), l.addressesOf(nic)
			n.take(options...)
			l.meet(both(), [2]place{l.other, l.host}, [2]place{l.internet, l.host}, [2]place{l.host, l.internet})
			if options != nil {
				wantSame(t, "addresses on the NIC", addresses, l.addressesOf(nic))
			}
			n.restore()
			wantSame(t, "the host after the restore", before, l.state())
			l.meet(both(), [2]place{l.other, l.host})
		})
	}
}
