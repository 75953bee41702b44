package lan

import (
	"strings"
	"sync"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/internal/nstest/fault"
)

// TestNoStateBetweenTwoCallsOfAnUpgradeLosesAPacket is about an ADD that mends what an
// older version made, as the one of TestNodeIsUpgradedByAnADDAlone does: before each call
// that may change the node it waits until every conversation has gone on. So a gap between
// two of its changes is seen however short it is.
func TestNoStateBetweenTwoCallsOfAnUpgradeLosesAPacket(t *testing.T) {
	t.Parallel()
	for name, older := range nstest.Earlier(t) {
		for _, order := range [][]string{{"home", "pods", "wire"}, {"pods", "wire", "home"}} {
			t.Run(name+", first "+order[0], func(t *testing.T) {
				u := newUpgrade(t)
				u.by(older)
				u.start(1, published()...)
				u.start(3)
				u.talkAll()
				u.goesOn("before")
				for _, network := range order {
					n := u.networks[network]
					n.bin = newer
					u.pausing(n, u.newPod(network+"-4"))
				}
				u.goesOn("after")
			})
		}
	}
}

// pausing adds a pod, and has all that talks go on before each call of the ADD that may
// change anything.
func (u *upgrade) pausing(n *network, p *pod) {
	u.Helper()
	calls, last := 0, "its begin"
	run, out := n.begin(n.verbCommand("ADD", p), fault.Fault{Before: func(call string) {
		if u.Failed() || !changes(call) {
			return
		}
		calls++
		var all sync.WaitGroup
		for _, t := range u.talks {
			all.Go(func() { t.Check(u) })
		}
		if all.Wait(); u.Failed() {
			u.Errorf("that was between %s and %s, calls %d and %d of those of an ADD", last, call, calls-1, calls)
		}
		last = call
	}})
	if o := run.Wait(); o.Err != nil {
		u.Fatalf("ADD: %v: %s", o.Err, out)
	}
	if u.Failed() {
		u.FailNow()
	}
	p.learn(u, out.String())
	u.pods[p.id] = p
	u.Logf("%s: %d calls", p.id, calls)
}

// changes says that a call may change the node.
func changes(call string) bool {
	for _, prefix := range []string{"sendmsg(", "sendto(", "write("} {
		if strings.HasPrefix(call, prefix) {
			return true
		}
	}
	return false
}
