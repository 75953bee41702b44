package state

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/lockorder"
)

// ErrLocked is file.ErrLocked.
var ErrLocked = file.ErrLocked

// A Mode says how a lock is held.
type Mode int

const (
	// unlocked is a Lock after a failure, or closed.
	unlocked Mode = iota

	// Shared is for work on one attachment, by many at once: ADD, DEL, CHECK.
	Shared

	// Exclusive is for work on what attachments share: building or removing a
	// network, GC, beginning an epoch.
	Exclusive
)

// String returns "shared", "exclusive" or "not held".
func (m Mode) String() string {
	return [...]string{unlocked: "not held", Shared: "shared", Exclusive: "exclusive"}[m]
}

// A Lock is the lock of a state directory, or of a NIC, until Close or the end of the process,
// however that comes. It is two things:
//
//   - flock(2) on a file, shared or exclusive;
//   - the gate, a write lock on that file's first byte (F_OFD_SETLK): an exclusive
//     holder has it from before it waits until it is done, and a call that wants the
//     shared lock waits for it first. The kernel grants a shared flock past a waiting
//     exclusive one, so without the gate a stream of ADDs would starve a GC.
//
// Callers that see different directories at the same path do not exclude each other; what they
// build in one network namespace, two may build at once.
//
// A Lock is not safe for use by several goroutines at once.
type Lock struct {
	dir   *Dir
	path  string // of the lock file
	fd    int    // of the lock file, -1 once it is closed
	mode  Mode
	order *lockorder.Held

	cookie uint64 // see netns; 0 if it has not been asked for
}

// netns is the cookie of the network namespace in which the lock is held: a call stays where it is.
func (l *Lock) netns() (uint64, error) {
	if l.cookie != 0 {
		return l.cookie, nil
	}
	var err error
	l.cookie, err = l.dir.sources.netns()
	return l.cookie, err
}

// Lock takes the lock. It waits until ctx ends, and then the error matches ErrLocked and
// the context's. Never take it while holding it: use Ensure or Upgrade. Nothing slow is
// to be waited for as long as it is held, nor a lock that comes before it (see package
// lockorder): all of the node's calls would wait along.
func (d *Dir) Lock(ctx context.Context, mode Mode) (*Lock, error) {
	return d.lock(ctx, d.lockPath(), mode, lockorder.State)
}

// lock takes the lock of a file, which is made where it is missing.
func (d *Dir) lock(ctx context.Context, path string, mode Mode, rank lockorder.Rank) (*Lock, error) {
	fd, err := file.Create(path, unix.O_RDWR)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	l := &Lock{dir: d, path: path, fd: fd, order: lockorder.Wait(rank)}
	if err := l.take(ctx, mode); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// Mode tells how the lock is held now.
func (l *Lock) Mode() Mode { return l.mode }

// Close gives the lock up. Closing twice does nothing.
func (l *Lock) Close() error {
	if l.fd < 0 {
		return nil
	}
	var err error
	// Closing gives up a shared lock too, if a moment later where a child is just being started.
	if l.mode != Shared {
		err = l.release()
	}
	err = errors.Join(err, unix.Close(l.fd))
	l.fd, l.mode = -1, unlocked
	l.order.Release()
	l.order = nil
	return err
}

// Upgrade makes a shared lock exclusive by giving it up and taking it anew, since
// two holders that wait for each other's shared lock would wait for ever. So what
// was seen under the shared lock has to be looked at again. On failure nothing is
// held, and the lock is fit for Close only.
func (l *Lock) Upgrade(ctx context.Context) error {
	if err := l.giveUp(); err != nil {
		return fmt.Errorf("upgrade: %w", err)
	}
	return l.take(ctx, Exclusive)
}

// giveUp gives a shared lock up, to wait for it in another mode.
func (l *Lock) giveUp() error {
	if l.mode != Shared {
		return fmt.Errorf("the lock of %s is %s", l.dir.path, l.mode)
	}
	err := l.release()
	l.order.WaitAgain()
	return err
}

// Downgrade makes an exclusive lock shared. No exclusive holder comes in between,
// and it never waits.
func (l *Lock) Downgrade() error {
	if l.mode != Exclusive {
		return fmt.Errorf("downgrade lock of %s: it is %s", l.dir.path, l.mode)
	}
	// flock(2) gives the lock up before it takes it in the other mode, but to
	// take it between the two, one would need the gate, and that is ours.
	had, err := file.TryFlock(l.fd, unix.LOCK_SH)
	if err == nil && !had {
		err = fmt.Errorf("%s: %w by a program that is none of ours", l.path, ErrLocked)
	}
	if err != nil {
		return errors.Join(err, l.Close())
	}
	l.mode = Shared
	return setGate(l.fd, unix.F_UNLCK)
}

// Ensure sees to it, from the shared lock, that something is done that one process
// does for all. It returns when done says so, or after work, which runs under the
// exclusive lock once done has been asked there again. If another process has the
// exclusive lock or waits for it, Ensure waits with the shared one instead and asks
// again: so of many that find the same thing missing one works, and the others do
// not queue up to find it done. Afterwards the lock is shared again, also if done
// or work failed; only if the lock could not be had (ErrLocked) nothing is held.
func (l *Lock) Ensure(ctx context.Context, done func() (bool, error), work func() error) error {
	for {
		if l.mode != Shared {
			return fmt.Errorf("ensure: the lock of %s is %s", l.dir.path, l.mode)
		}
		if ok, err := done(); ok || err != nil {
			return err
		}
		if err := l.giveUp(); err != nil {
			return err
		}
		first, err := tryGate(l.fd)
		if err != nil {
			return err
		}
		if first {
			break
		}
		// The other process may be doing the same work. The shared lock comes only when it is done.
		if err := l.take(ctx, Shared); err != nil {
			return err
		}
	}
	if err := l.take(ctx, Exclusive); err != nil {
		return err
	}
	// The lock was given up in between: another may have been faster.
	ok, err := done()
	if !ok && err == nil {
		err = work()
	}
	return errors.Join(err, l.Downgrade())
}

// take waits for the lock. On failure nothing is held.
func (l *Lock) take(ctx context.Context, mode Mode) error {
	try := l.tryShared
	if mode == Exclusive {
		try = l.tryExclusive
	}
	if err := file.Await(ctx, l.path, try); err != nil {
		return errors.Join(fmt.Errorf("%s: %w", mode, err), l.release())
	}
	l.mode = mode
	return nil
}

// tryShared takes the file, where the gate is open.
func (l *Lock) tryShared() (bool, error) {
	gate, err := file.LockRange(l.fd, unix.F_OFD_GETLK, unix.F_RDLCK, 0, 1)
	if err != nil || gate.Type != unix.F_UNLCK {
		return false, err
	}
	return file.TryFlock(l.fd, unix.LOCK_SH)
}

// tryExclusive shuts the gate, which stays shut, and takes the file.
func (l *Lock) tryExclusive() (bool, error) {
	if had, err := tryGate(l.fd); !had {
		return false, err
	}
	return file.TryFlock(l.fd, unix.LOCK_EX)
}

// release gives up file and gate, and keeps the file open.
func (l *Lock) release() error {
	l.mode = unlocked
	return errors.Join(unix.Flock(l.fd, unix.LOCK_UN), setGate(l.fd, unix.F_UNLCK))
}

// tryGate shuts the gate unless another has it.
func tryGate(fd int) (bool, error) {
	err := setGate(fd, unix.F_WRLCK)
	if errors.Is(err, unix.EAGAIN) {
		return false, nil
	}
	return err == nil, err
}

func setGate(fd int, kind int16) error {
	_, err := file.LockRange(fd, unix.F_OFD_SETLK, kind, 0, 1)
	return err
}
