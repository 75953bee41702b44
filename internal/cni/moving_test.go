package cni

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
)

// Where a keeper died at moving a pod to another address, the kernel may have elements
// that the record does not tell of. DEL finds them by their owner, and not without the
// word of it in the record: there it goes by the addresses, which is quicker.
func TestDELOfAPodThatWasOnTheMove(t *testing.T) {
	t.Parallel()
	for moving, left := range map[bool]int{false: 1, true: 0} {
		nstest.RunParallel(t, fmt.Sprintf("moving %t", moving), func(t *testing.T) {
			n := newNode(t)
			n.run(t, n.plugin(), "ADD", everything()).must(t)
			dir, err := state.Open(n.stateDir)
			must.Succeed(t, err)
			rec, err := dir.Load("pods", ident.Hash("pods", "c1", "eth0"))
			must.Succeed(t, err)
			rec.Addresses, rec.Moving = []ipam.Address{{Prefix: nstest.Prefix("10.61.0.77/24")}}, moving
			// A child that another test is starting holds the lock until it is executed.
			for err = dir.Update(rec); errors.Is(err, state.ErrBusy) && t.Context().Err() == nil; err = dir.Update(rec) {
				time.Sleep(time.Millisecond)
			}
			must.Succeed(t, err)
			n.run(t, n.plugin(), "DEL", everything()).must(t)
			got := n.elements(t)
			expect.That(t, len(got) == left, "after DEL there are elements of %d endpoints, want %d: %v", len(got), left, got)
		})
	}
}
