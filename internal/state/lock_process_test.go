package state

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestTheSocketExcludesOtherDirectories(t *testing.T) {
	t.Parallel()
	d, other := newDir(t), newDir(t)
	other.socketName = d.socketName
	held := lock(t, d, Exclusive)
	// Of no concern to each other. Another test's child may inherit a file that is only closed.
	beside := lock(t, other, Shared)
	if err := errors.Join(beside.release(), beside.Close()); err != nil {
		t.Fatal(err)
	}
	_, err := other.Lock(canceled(), Exclusive)
	if !errors.Is(err, ErrLocked) || !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), d.socketName) {
		t.Errorf("Lock: %v, want ErrLocked that names %s", err, d.socketName)
	}
	before := connections(t, d.socketName) // of who has given up since
	got := make(chan error)
	go func() {
		l, err := other.Lock(t.Context(), Exclusive)
		if err == nil {
			err = l.Close()
		}
		got <- err
	}()
	until(t, "the waiter's connection", func() bool { return connections(t, d.socketName) == before+1 })
	if err := held.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Error(err)
	}
}

// connections counts the connections to a socket of this thread's network namespace
// that wait to be accepted: they show under the name that they came in by, and unlike
// the listener without __SO_ACCEPTCON in their flags.
func connections(t testing.TB, name string) int {
	t.Helper()
	n := 0
	for line := range strings.Lines(mustRead(t, "/proc/thread-self/net/unix")) {
		fields := strings.Fields(line)
		if len(fields) == 8 && fields[7] == name && fields[3] == "00000000" {
			n++
		}
	}
	return n
}

func TestManyDirectoriesTakeTurns(t *testing.T) {
	t.Parallel()
	name := newSocketName()
	inside := 0 // guarded by the lock under test; the race detector looks on
	var mu sync.Mutex
	var wait sync.WaitGroup
	for range 16 {
		d := newDir(t)
		d.socketName = name
		wait.Go(func() {
			for range 8 {
				l, err := d.Lock(t.Context(), Exclusive)
				if err != nil {
					t.Error(err)
					return
				}
				if !mu.TryLock() {
					t.Error("two hold it exclusively")
					return
				}
				inside++
				mu.Unlock()
				l.Close()
			}
		})
	}
	wait.Wait()
	if inside != 16*8 {
		t.Errorf("%d turns, want %d", inside, 16*8)
	}
}

func TestAWaitForTheSocketEndsWithItsContext(t *testing.T) {
	t.Parallel()
	d, other := newDir(t), newDir(t)
	other.socketName = d.socketName
	lock(t, d, Exclusive)
	ctx, cancel := context.WithCancelCause(t.Context())
	got := make(chan error)
	go func() {
		_, err := other.Lock(ctx, Exclusive)
		got <- err
	}()
	until(t, "the waiter's connection", func() bool { return connections(t, d.socketName) == 1 })
	enough := errors.New("enough")
	cancel(enough)
	if err := <-got; !errors.Is(err, ErrLocked) || !errors.Is(err, enough) {
		t.Errorf("got %v, want ErrLocked and the cause", err)
	}
	lock(t, again(other), Shared) // the file was given back
}

func TestAKilledHolderFreesTheLock(t *testing.T) {
	t.Parallel()
	for _, mode := range []Mode{Shared, Exclusive} {
		dir, socket := filepath.Join(t.TempDir(), "tombolo"), newSocketName()
		holder := start(t, nil, "hold", dir, socket, mode.String())
		holder.expect("held")
		waiter := start(t, nil, "wait", dir, socket, Exclusive.String())
		waiter.expect("waiting")
		third := start(t, nil, "hold", dir, socket, Exclusive.String())
		third.expect("locked")
		holder.kill()
		waiter.expect("held")
		waiter.finish()
	}
}

func TestAKilledHolderFreesTheSocket(t *testing.T) {
	t.Parallel()
	socket := newSocketName()
	holder := start(t, nil, "hold", filepath.Join(t.TempDir(), "a"), socket, Exclusive.String())
	holder.expect("held")
	waiter := start(t, nil, "wait", filepath.Join(t.TempDir(), "b"), socket, Exclusive.String())
	waiter.expect("waiting")
	until(t, "the waiter's connection", func() bool { return connections(t, socket) == 1 })
	holder.kill()
	waiter.expect("held")
	waiter.finish()
}

// A killed waiter does not keep its gate shut.
func TestAKilledWaiterFreesTheGate(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	lock(t, d, Shared)
	waiter := start(t, nil, "wait", d.Path(), d.socketName, Exclusive.String())
	waiter.expect("waiting")
	until(t, "the waiter in flock(2)", func() bool { return waiters(t, d, "FLOCK") == 1 })
	if _, err := again(d).Lock(canceled(), Shared); !errors.Is(err, ErrLocked) {
		t.Errorf("before: %v, want ErrLocked", err)
	}
	waiter.kill()
	lock(t, again(d), Shared)
}

// A pod with a /run of its own runs a second Tombolo on the host's network.
func TestPrivateMountsShareTheSocketOfTheirNetworkNamespace(t *testing.T) {
	t.Parallel()
	inNewNetNS(t, func() {
		private := &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
		dir := filepath.Join(t.TempDir(), "run", "tombolo")
		holder := start(t, private, "private", dir, "", Exclusive.String())
		holder.expect("held")
		if out := start(t, private, "private", dir, "", Exclusive.String()).line(); out != "locked" {
			t.Errorf("exclusive beside exclusive: %s", out)
		}
		if out := start(t, private, "private", dir, "", Shared.String()).line(); out != "held" {
			t.Errorf("shared beside exclusive, in other directories: %s", out)
		}
		elsewhere := &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET}
		if out := start(t, elsewhere, "private", dir, "", Exclusive.String()).line(); out != "held" {
			t.Errorf("exclusive in another network namespace: %s", out)
		}
		holder.kill()
		if out := start(t, private, "private", dir, "", Exclusive.String()).line(); out != "held" {
			t.Errorf("after the holder was killed: %s", out)
		}
	})
}

func TestTheSocketIsThatOfTheThreadsNamespace(t *testing.T) {
	t.Parallel()
	d, other := newDir(t), newDir(t)
	other.socketName = d.socketName
	lock(t, d, Exclusive)
	inNewNetNS(t, func() {
		l, err := other.Lock(canceled(), Exclusive)
		if err != nil {
			t.Error(err)
			return
		}
		l.Close()
	})
}

func TestStrangersCannotHoldTheSocketAgainstUs(t *testing.T) {
	t.Parallel()
	needRoot(t)
	if ids := strings.Fields(mustRead(t, "/proc/self/uid_map")); len(ids) == 3 && ids[2] == "1" {
		t.Skip("needs a second user, and this user namespace has one")
	}
	for _, how := range []string{"listen", "bind only"} {
		d := newDir(t)
		stranger := start(t, nil, "stranger", d.socketName, how)
		stranger.expect("bound")
		l, err := d.Lock(t.Context(), Exclusive)
		if err != nil {
			t.Errorf("%s: %v", how, err)
			continue
		}
		if l.socket >= 0 {
			t.Errorf("%s: the fault did not fire: we have the socket", how)
		}
		if _, err := again(d).Lock(canceled(), Exclusive); !errors.Is(err, ErrLocked) {
			t.Errorf("%s: the file does not exclude: %v", how, err)
		}
		l.Close()
		stranger.kill()
	}
}
