package state

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestLockModesExcludeEachOther(t *testing.T) {
	t.Parallel()
	tests := []struct {
		held, wanted Mode
		ok           bool
	}{
		{Shared, Shared, true},
		{Shared, Exclusive, false},
		{Exclusive, Shared, false},
		{Exclusive, Exclusive, false},
	}
	for _, test := range tests {
		t.Run(fmt.Sprintf("%v while it is %v", test.wanted, test.held), func(t *testing.T) {
			t.Parallel()
			d := newDir(t)
			held := lock(t, d, test.held)
			l, err := again(d).Lock(canceled(), test.wanted)
			if test.ok {
				must.Succeed(t, err)
				l.Close()
				return
			}
			expect.That(t, errors.Is(err, ErrLocked) && errors.Is(err, context.Canceled) && l == nil,
				"Lock = %v, %v, want ErrLocked", l, err)
			for _, says := range []string{d.Path() + "/lock", "waited", test.wanted.String()} {
				expect.Contains(t, err.Error(), says, "%v", err)
			}
			must.Succeed(t, held.Close())
			lock(t, again(d), test.wanted)
		})
	}
}

func TestLockFollowsNoSymbolicLink(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	target := t.TempDir() + "/target"
	must.Succeed(t, os.MkdirAll(d.Path(), 0o700))
	must.Succeed(t, os.Symlink(target, d.lockPath()))
	l, err := d.Lock(t.Context(), Shared)
	expect.That(t, errors.Is(err, unix.ELOOP), "Lock = %v, %v, want ELOOP", l, err)
}

func TestLockIsGivenUpOnceOnly(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	l := lock(t, d, Exclusive)
	for range 2 {
		expect.Success(t, l.Close())
	}
	if l.Mode() != unlocked || l.Mode().String() != "not held" {
		t.Errorf("after Close it is %v", l.Mode())
	}
	for what, err := range map[string]error{
		"Upgrade":   l.Upgrade(t.Context()),
		"Downgrade": l.Downgrade(),
		"Ensure":    l.Ensure(t.Context(), nil, nil),
	} {
		expect.Says(t, err, "not held", "%s after Close", what)
	}
}

func TestUpgradeWaitsForOtherSharedHolders(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	l, other := lock(t, d, Shared), lock(t, again(d), Shared)
	if err := l.Upgrade(canceled()); !errors.Is(err, ErrLocked) || l.Mode() != unlocked {
		t.Errorf("Upgrade: %v, and it is %v", err, l.Mode())
	}
	expect.Success(t, l.Close(), "Close after an Upgrade that failed")
	if err := other.Upgrade(t.Context()); err != nil || other.Mode() != Exclusive {
		t.Errorf("Upgrade of the only one: %v, and it is %v", err, other.Mode())
	}
	expect.Is(t, expect.Err(again(d).Lock(canceled(), Shared)), ErrLocked, "after Upgrade the shared lock is to be had")
}

// Were the lock kept while it waits, each would wait for the other.
func TestManyUpgradesAtOnceAllSucceed(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	var locks []*Lock
	for range 16 {
		locks = append(locks, lock(t, again(d), Shared))
	}
	var inside atomic.Int32
	var wait sync.WaitGroup
	for _, l := range locks {
		wait.Go(func() {
			if err := l.Upgrade(t.Context()); err != nil {
				t.Error(err)
				return
			}
			expect.Equal(t, inside.Add(1), 1, "hold it exclusively")
			inside.Add(-1)
			l.Close()
		})
	}
	wait.Wait()
}

func TestDowngradeLetsSharedHoldersInAndNoOther(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	l := lock(t, d, Exclusive)
	if err := l.Downgrade(); err != nil || l.Mode() != Shared {
		t.Fatalf("Downgrade: %v, and it is %v", err, l.Mode())
	}
	lock(t, again(d), Shared)
	expect.Is(t, expect.Err(again(d).Lock(canceled(), Exclusive)), ErrLocked, "exclusive beside it")
	expect.Failure(t, l.Downgrade(), "Downgrade of a shared lock succeeds")
}

// Another program uses flock(1) and knows of no gate.
func TestDowngradeFailsIfAStrangerTakesTheFile(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	l := lock(t, d, Exclusive)
	// The stranger needs the file in the moment that Downgrade gives it up, so
	// give it up beforehand.
	must.Succeed(t, unix.Flock(l.fd, unix.LOCK_UN))
	fd := must.Of(file.Open(d.lockPath(), unix.O_RDWR)).Get(t)
	defer unix.Close(fd)
	ok, err := file.TryFlock(fd, unix.LOCK_EX)
	must.That(t, ok && err == nil, "the fault did not fire: %v, %v", ok, err)
	if err := l.Downgrade(); !errors.Is(err, ErrLocked) || l.Mode() != unlocked {
		t.Errorf("Downgrade: %v, and it is %v", err, l.Mode())
	}
}

// gateShut says whether a call has the exclusive lock of a directory, or waits for it.
func gateShut(t testing.TB, d *Dir) bool {
	t.Helper()
	l, err := again(d).Lock(canceled(), Shared)
	if err == nil {
		l.Close()
		return false
	}
	must.That(t, errors.Is(err, ErrLocked), "%v", err)
	return true
}

// A stream of ADDs must not starve a GC: the kernel alone would let it.
func TestWhoWaitsForTheExclusiveLockStopsNewSharedHolders(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	first := lock(t, d, Shared)
	got := make(chan error)
	go func() {
		l, err := again(d).Lock(t.Context(), Exclusive)
		if err == nil {
			err = l.Close()
		}
		got <- err
	}()
	must.Until(t, "the exclusive waiter", func() bool { return gateShut(t, d) })

	fd := must.Of(file.Open(d.lockPath(), unix.O_RDWR)).Get(t)
	defer unix.Close(fd)
	if ok, err := file.TryFlock(fd, unix.LOCK_SH); !ok || err != nil {
		t.Errorf("flock(2) itself would not let another pass: %v, %v; then the gate is not needed", ok, err)
	}
	must.Succeed(t, unix.Flock(fd, unix.LOCK_UN))
	expect.Is(t, expect.Err(again(d).Lock(canceled(), Shared)), ErrLocked, "a new shared holder")
	must.Succeed(t, first.Close())
	expect.Success(t, <-got)
	lock(t, again(d), Shared)
}

func TestAWaitThatIsGivenUpLeavesTheGateOpen(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	held := lock(t, d, Shared)
	expect.Is(t, expect.Err(again(d).Lock(canceled(), Exclusive)), ErrLocked)
	must.Succeed(t, lock(t, again(d), Shared).Close())
	must.Succeed(t, held.Close())
	lock(t, again(d), Exclusive)
}

func TestEnsureWorksOnceForAll(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	var worked, inside atomic.Int32
	var wait sync.WaitGroup
	for range 64 {
		wait.Go(func() {
			l, err := again(d).Lock(t.Context(), Shared)
			if err != nil {
				t.Error(err)
				return
			}
			defer l.Close()
			err = l.Ensure(t.Context(),
				func() (bool, error) { return worked.Load() > 0, nil },
				func() error {
					expect.That(t, inside.Add(1) == 1 && l.Mode() == Exclusive, "work is not alone")
					worked.Add(1)
					inside.Add(-1)
					return nil
				})
			if err != nil || l.Mode() != Shared {
				t.Errorf("Ensure: %v, and it is %v", err, l.Mode())
			}
		})
	}
	wait.Wait()
	expect.Equal(t, worked.Load(), 1, "the work was done")
}

func TestEnsureDoesNothingThatIsDone(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	l, other := lock(t, d, Shared), lock(t, again(d), Shared)
	asked := 0
	err := l.Ensure(t.Context(), func() (bool, error) { asked++; return true, nil },
		func() error { t.Error("it works"); return nil })
	if err != nil || asked != 1 || l.Mode() != Shared || other.Mode() != Shared {
		t.Errorf("%v, asked %d times, and it is %v", err, asked, l.Mode())
	}
}

func TestEnsureKeepsTheSharedLockWhenSomethingFails(t *testing.T) {
	t.Parallel()
	failure := errors.New("failure")
	no := func() (bool, error) { return false, nil }
	asked := 0
	tests := map[string]struct {
		done func() (bool, error)
		work func() error
	}{
		"done":                         {func() (bool, error) { return false, failure }, nil},
		"done under the exclusive one": {func() (bool, error) { asked++; return false, errorIf(asked == 2, failure) }, nil},
		"work":                         {no, func() error { return failure }},
	}
	for what, test := range tests {
		d := newDir(t)
		l := lock(t, d, Shared)
		if err := l.Ensure(t.Context(), test.done, test.work); !errors.Is(err, failure) || l.Mode() != Shared {
			t.Errorf("%s: %v, and it is %v", what, err, l.Mode())
		}
		worked := false
		err := l.Ensure(t.Context(), no, func() error { worked = true; return nil })
		expect.That(t, err == nil && worked, "%s: afterwards: %v, worked is %v", what, err, worked)
	}
}

func errorIf(condition bool, err error) error {
	if condition {
		return err
	}
	return nil
}

func TestEnsureHoldsNothingWithoutTheLock(t *testing.T) {
	t.Parallel()
	no := func() (bool, error) { return false, nil }
	d := newDir(t)
	l := lock(t, d, Shared)
	lock(t, again(d), Shared) // does not let go
	if err := l.Ensure(canceled(), no, nil); !errors.Is(err, ErrLocked) || l.Mode() != unlocked {
		t.Errorf("as the first: %v, and it is %v", err, l.Mode())
	}
	d = newDir(t)
	l = lock(t, d, Shared)
	gate := must.Of(file.Open(d.lockPath(), unix.O_RDWR)).Get(t)
	defer unix.Close(gate)
	ok, err := tryGate(gate)
	must.That(t, ok && err == nil, "the fault did not fire: %v, %v", ok, err)
	if err := l.Ensure(canceled(), no, nil); !errors.Is(err, ErrLocked) || l.Mode() != unlocked {
		t.Errorf("behind another: %v, and it is %v", err, l.Mode())
	}
	expect.Success(t, l.Close())
}

func TestLocksLeakNoFileDescriptors(t *testing.T) {
	// Not parallel: it counts the descriptors of the whole process.
	d := newDir(t)
	must.Succeed(t, lock(t, d, Exclusive).Close())
	before := openFiles(t)
	for range 20 {
		l := lock(t, d, Shared)
		expect.Success(t, l.Ensure(t.Context(), func() (bool, error) { return false, nil }, func() error { return nil }))
		expect.Is(t, expect.Err(again(d).Lock(canceled(), Exclusive)), ErrLocked)
		expect.Success(t, l.Upgrade(t.Context()))
		expect.Success(t, l.Close())
	}
	expect.Equal(t, openFiles(t), before, "%d open files before,", before)
}

func openFiles(t testing.TB) int {
	t.Helper()
	entries := must.Of(os.ReadDir("/proc/self/fd")).Get(t)
	return len(entries)
}

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
