package state

import (
	"path/filepath"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestAKilledHolderFreesTheLock(t *testing.T) {
	t.Parallel()
	for _, mode := range []Mode{Shared, Exclusive} {
		dir := filepath.Join(t.TempDir(), "tombolo")
		holder := start(t, nil, "hold", dir, mode.String())
		holder.expect("held")
		waiter := start(t, nil, "wait", dir, Exclusive.String())
		waiter.expect("waiting")
		third := start(t, nil, "hold", dir, Exclusive.String())
		third.expect("locked")
		holder.kill()
		waiter.expect("held")
		waiter.finish()
	}
}

// A killed waiter does not keep its gate shut.
func TestAKilledWaiterFreesTheGate(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	lock(t, d, Shared)
	waiter := start(t, nil, "wait", d.Path(), Exclusive.String())
	waiter.expect("waiting")
	must.Until(t, "the waiter", func() bool { return gateShut(t, d) })
	expect.Is(t, expect.Err(again(d).Lock(canceled(), Shared)), ErrLocked, "before")
	waiter.kill()
	lock(t, again(d), Shared)
}
