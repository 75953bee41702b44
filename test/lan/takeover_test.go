package lan

import (
	"context"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
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
	if err != nil || n < 1 {
		t.Fatalf("%s=%q: want a number of 1 or more", runsVar, value)
	}
	return n
}

// What may befall a flow. There are some microseconds in which the kernel takes no frames
// from a link that becomes a port, or is to be none any more, and drops one that comes then.
func duringTake() limit    { return limit{lost: 1, retransmitted: 1} }
func duringRestore() limit { return limit{lost: 1, retransmitted: 1} }

// memory is a journal of a process that is not killed.
type memory struct{ record []byte }

func (m *memory) Save(record []byte) error { m.record = append([]byte(nil), record...); return nil }
func (m *memory) Remove() error            { m.record = nil; return nil }

// taker takes the host's NIC over and gives it back.
type taker struct {
	*lan
	conn    *uplink.Conn
	journal memory
	record  *uplink.Record
}

func (l *lan) taker() *taker {
	l.Helper()
	conn, err := uplink.Dial(&uplink.Config{NetNS: l.host.ns})
	if err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() { conn.Close() })
	return &taker{lan: l, conn: conn}
}

func (k *taker) take() { k.Helper(); k.takeSo(uplink.Uplink{}) }

// takeSo takes the NIC over with some options.
func (k *taker) takeSo(u uplink.Uplink) {
	k.Helper()
	u.NIC, u.Bridge, u.Alias = nic, bridge, "tombolo:1:bridge"
	// Long enough for a gateway on a machine that is busy with other things.
	u.Timeout = time.Minute
	var err error
	k.record, err = k.conn.Take(context.Background(), u, &k.journal)
	if err != nil {
		k.Fatal(err)
	}
}

func (k *taker) restore() {
	k.Helper()
	if err := k.conn.Restore(context.Background(), k.record, &k.journal); err != nil {
		k.Fatal(err)
	}
	if k.journal.record != nil {
		k.Errorf("the journal is there after the restore: %s", k.journal.record)
	}
}

// while checks something while the NIC is a port.
type while func(t testing.TB, l *lan)

// takeAndRestore does so while flows run, and compares what was with what is.
func (k *taker) takeAndRestore(m *meter, meanwhile while) (took, restored pause) {
	k.Helper()
	before, moved := k.state(), k.moved(nic)
	took = wantWithin(k, "take", duringTake(), m.during(k.take))
	k.wantBare(nic)
	wantSame(k, "what moved to the bridge", moved, k.moved(bridge))
	if differences, _, err := k.conn.Check(context.Background(), k.record); err != nil || len(differences) > 0 {
		k.Errorf("check: %v, %v", differences, err)
	}
	if meanwhile != nil {
		meanwhile(k, k.lan)
	}
	restored = wantWithin(k, "restore", duringRestore(), m.during(k.restore))
	k.wantNoLink(bridge)
	wantSame(k, "the host after the restore", before, k.state())
	return took, restored
}

func TestTakeoverLosesNothing(t *testing.T) {
	l := newHost(t)
	m := l.usualFlows(both()...)
	k := l.taker()
	var took, restored []pause
	for range runs(t) {
		a, b := k.takeAndRestore(m, nil)
		took, restored = append(took, a), append(restored, b)
	}
	t.Logf("take: %s", summary(took))
	t.Logf("restore: %s", summary(restored))
}

// For agents that read the NIC's addresses.
func TestTakeoverThatLeavesTheAddressesOnTheNICLosesNothing(t *testing.T) {
	l := newHost(t)
	m := l.usualFlows(both()...)
	k := l.taker()
	before, addresses := l.state(), l.addressesOf(nic)
	wantWithin(t, "take", duringTake(), m.during(func() { k.takeSo(uplink.Uplink{KeepAddress: true}) }))
	kept := l.addressesOf(nic)
	for _, a := range addresses {
		if !slices.Contains(kept, a) {
			t.Errorf("%s is not on the NIC any more, but %v", a, kept)
		}
	}
	if got := l.routeOf(l.host, l.internet.ip4); !strings.Contains(got, "dev "+bridge+" ") {
		t.Errorf("the host's route is %s, want one by the bridge", got)
	}
	wantWithin(t, "restore", duringRestore(), m.during(k.restore))
	wantSame(t, "the host after the restore", before, l.state())
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
	t.Parallel()
	// Nobody knows anybody's MAC: no neighbour is there to be copied.
	l := newHost(t)
	k := l.taker()
	before := l.state()
	k.take()
	l.meet(both(), [2]place{l.other, l.host}, [2]place{l.internet, l.host}, [2]place{l.host, l.internet})
	k.restore()
	wantSame(t, "the host after the restore", before, l.state())
	for _, family := range both() {
		if err := nstest.Ping(t, l.other.ns, l.host.at(family)); err != nil {
			t.Error(err)
		}
	}
}
