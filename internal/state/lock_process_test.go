package state

import (
	"errors"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
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
	until(t, "the waiter in flock(2)", func() bool { return waiters(t, d, "FLOCK") == 1 })
	if _, err := again(d).Lock(canceled(), Shared); !errors.Is(err, ErrLocked) {
		t.Errorf("before: %v, want ErrLocked", err)
	}
	waiter.kill()
	lock(t, again(d), Shared)
}

// An earlier version bound a socket in the network namespace to build something, and waited
// for a process of root's that had it: as any container on the host's network is, with no
// capability at all.
func TestAListenerOfRootsWithoutCapabilitiesKeepsNoLockFromBeingHad(t *testing.T) {
	t.Parallel()
	needRoot(t)
	inNewNetNS(t, func() {
		names := []string{"@tombolo/lock", "@tombolo/lock/eth0"}
		listener := start(t, nil, "listen", names...)
		listener.expect("listening")
		for _, name := range names {
			if !isHeldByRoot(t, name) {
				t.Fatalf("%s: the attack does not work where the socket is bound", name)
			}
		}
		d := newDir(t)
		l, err := d.Lock(canceled(), Exclusive)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		u, err := d.LockUplink(canceled(), "eth0")
		if err != nil {
			t.Fatal(err)
		}
		u.Close()
		listener.kill()
	})
}

// isHeldByRoot says whether a socket is taken, and by a process of root's that listens and
// never answers: the version before would have waited for it.
func isHeldByRoot(t *testing.T, name string) bool {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: name}); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("bind %s: %v, want EADDRINUSE", name, err)
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: name}); err != nil {
		t.Fatal(err)
	}
	holder, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		t.Fatal(err)
	}
	var nothing [1]byte
	_, _, err = unix.Recvfrom(fd, nothing[:], unix.MSG_DONTWAIT)
	return holder.Uid == 0 && errors.Is(err, unix.EAGAIN)
}
