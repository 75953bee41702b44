package state

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/lockorder"
)

// ErrLocked says that the lock was not to be had before the context ended.
var ErrLocked = errors.New("locked by another process")

// maxAbandoned bounds the threads that hang in flock(2) after their callers gave
// up, in a process that lives long enough to try again and again.
const maxAbandoned = 32

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
	switch m {
	case Shared:
		return "shared"
	case Exclusive:
		return "exclusive"
	default:
		return "not held"
	}
}

// A Lock is the lock of a state directory, until Close or the end of the process,
// however that comes. It is two things:
//
//   - flock(2) on the file `lock`, shared or exclusive;
//   - the gate, a write lock on that file's first byte (F_OFD_SETLK): an exclusive
//     holder has it from before it waits until it is done, and a call that wants the
//     shared lock waits for it first. The kernel grants a shared flock past a waiting
//     exclusive one, so without the gate a stream of ADDs would starve a GC.
//
// Nothing but these two files can keep it from being had, and they are root's. Callers that
// see different directories at the same path (a /run of their own) do not exclude each
// other, though they may share the kernel objects of one network namespace: what is built
// there is built by requests that may be repeated and by transactions that name the
// generation they were made for, so that two may build it at once. A name in the network
// namespace, such as an abstract unix socket, would exclude them; but any process in that
// namespace can take it, and hold up the node.
//
// A Lock is not safe for use by several goroutines at once.
type Lock struct {
	dir   *Dir
	path  string // of the lock file
	fd    int    // of the lock file, -1 once it is given up
	mode  Mode
	order *lockorder.Held

	cookie uint64 // see netns; 0 if it has not been asked for
}

// netns is the cookie of the network namespace in which the lock is held: that of the thread
// that asks first, since a call stays where it is.
func (l *Lock) netns() (uint64, error) {
	if l.cookie != 0 {
		return l.cookie, nil
	}
	var err error
	l.cookie, err = l.dir.sources.netns()
	return l.cookie, err
}

// Lock takes the lock. Uncontended that is an open(2), an fcntl(2) and a
// flock(2); else it waits until ctx ends, and then the error matches ErrLocked and
// the context's. Never take it while holding it: use Ensure or Upgrade. Nothing slow is
// to be waited for as long as it is held, nor a lock that comes before it (see package
// lockorder): all of the node's calls would wait along.
func (d *Dir) Lock(ctx context.Context, mode Mode) (*Lock, error) {
	l, err := d.openLock(d.lockPath())
	if err != nil {
		return nil, fmt.Errorf("lock state directory: %w", err)
	}
	l.order = lockorder.Wait(lockorder.State)
	if mode == Exclusive {
		err = l.takeExclusive(ctx)
	} else {
		err = l.takeShared(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// openLock opens a lock file, and takes nothing yet.
func (d *Dir) openLock(path string) (*Lock, error) {
	fd, err := file.Create(path, unix.O_RDWR)
	if err != nil {
		return nil, err
	}
	return &Lock{dir: d, path: path, fd: fd}, nil
}

// Mode tells how the lock is held now.
func (l *Lock) Mode() Mode { return l.mode }

// Close gives the lock up. Closing twice does nothing.
func (l *Lock) Close() error {
	var err error
	switch {
	case l.fd < 0:
	case l.mode == Shared:
		// Every ADD comes this way, and a call that finds it held for a moment longer waits for it.
		err = unix.Close(l.fd)
	default:
		err = closeFile(l.fd)
	}
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
	if l.mode != Shared {
		return fmt.Errorf("upgrade lock of %s: it is %s", l.dir.path, l.mode)
	}
	if err := l.release(); err != nil {
		return err
	}
	l.order.WaitAgain()
	return l.takeExclusive(ctx)
}

// Downgrade makes an exclusive lock shared. No exclusive holder comes in between,
// and it never waits.
func (l *Lock) Downgrade() error {
	if l.mode != Exclusive {
		return fmt.Errorf("downgrade lock of %s: it is %s", l.dir.path, l.mode)
	}
	// flock(2) gives the lock up before it takes it in the other mode, but to
	// take it between the two, one would need the gate, and that is ours.
	if ok, lockErr := tryFlock(l.fd, unix.LOCK_SH); lockErr != nil || !ok {
		return errors.Join(l.failed(Shared, 0, lockErr), l.Close())
	}
	l.mode = Shared
	return setGate(l.fd, unix.F_OFD_SETLK, unix.F_UNLCK)
}

// Ensure sees to it, from the shared lock, that something is done that one process
// does for all. It returns when done says so, or after work, which runs under the
// exclusive lock once done has been asked there again. If another process has the
// exclusive lock or waits for it, Ensure waits with the shared one instead and asks
// again: so of many that find the same thing missing one works, and the others do
// not queue up to find it done. Afterwards the lock is shared again, also if done
// or work failed; only if the lock could not be had (ErrLocked) nothing is held.
func (l *Lock) Ensure(ctx context.Context, done func() (bool, error), work func() error) error {
	if l.mode != Shared {
		return fmt.Errorf("ensure under the lock of %s: it is %s", l.dir.path, l.mode)
	}
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		if err := l.release(); err != nil {
			return err
		}
		l.order.WaitAgain()
		first, err := tryGate(l.fd)
		if err != nil {
			return err
		}
		// Behind another, wait for what that one does, in the hope that it is
		// the very thing. The shared lock comes only when it is through.
		if !first {
			if err := l.takeShared(ctx); err != nil {
				return err
			}
			continue
		}
		if err := l.takeExclusive(ctx); err != nil {
			return err
		}
		// The lock was given up in between: somebody may have been faster.
		ok, err := done()
		if !ok && err == nil {
			err = work()
		}
		return errors.Join(err, l.Downgrade())
	}
}

// takeShared passes the gate and takes the file.
func (l *Lock) takeShared(ctx context.Context) error {
	busy, err := gateBusy(l.fd)
	if err != nil {
		return err
	}
	taken := false
	if !busy {
		if taken, err = tryFlock(l.fd, unix.LOCK_SH); err != nil {
			return err
		}
	}
	if !taken {
		err = l.wait(ctx, Shared, func(fd int) error {
			// Two calls that pass the gate at once must not stop each other, so it
			// is a read lock, and kept no longer than the file takes.
			if err := setGate(fd, unix.F_OFD_SETLKW, unix.F_RDLCK); err != nil {
				return err
			}
			return errors.Join(flock(fd, unix.LOCK_SH), setGate(fd, unix.F_OFD_SETLK, unix.F_UNLCK))
		})
		if err != nil {
			return err
		}
	}
	l.mode = Shared
	return nil
}

// takeExclusive shuts the gate and takes the file.
func (l *Lock) takeExclusive(ctx context.Context) error {
	taken, err := l.tryExclusive()
	if err != nil {
		return err
	}
	if !taken {
		err = l.wait(ctx, Exclusive, func(fd int) error {
			if err := setGate(fd, unix.F_OFD_SETLKW, unix.F_WRLCK); err != nil {
				return err
			}
			// A late grant must not go on to hold up everybody behind a gate
			// that nobody will open.
			if err := ctx.Err(); err != nil {
				return err
			}
			return flock(fd, unix.LOCK_EX)
		})
		if err != nil {
			return err
		}
	}
	l.mode = Exclusive
	return nil
}

// tryExclusive shuts the gate and takes the file, where nobody has either.
func (l *Lock) tryExclusive() (bool, error) {
	taken, err := tryGate(l.fd)
	if err == nil && taken {
		taken, err = tryFlock(l.fd, unix.LOCK_EX)
	}
	return taken, err
}

// wait runs take, which blocks, on a thread of its own until ctx ends. No signal
// gets a thread out of flock(2), since Go's handlers restart system calls. So after
// that the thread hangs on, and what it is granted late is closed at once.
func (l *Lock) wait(ctx context.Context, mode Mode, take func(fd int) error) error {
	start := time.Now()
	if l.dir.abandoned.Load() >= maxAbandoned {
		return l.failed(mode, 0, fmt.Errorf("%d earlier waits still hang", maxAbandoned))
	}
	fd := l.fd
	granted := make(chan error, 1)
	go func() { granted <- take(fd) }()
	select {
	case err := <-granted:
		if err != nil && ctx.Err() != nil {
			err = l.failed(mode, time.Since(start), context.Cause(ctx))
		}
		return err
	case <-ctx.Done():
	}
	l.fd = -1
	l.dir.abandoned.Add(1)
	// Let others pass, now that nobody waits behind this gate.
	err := setGate(fd, unix.F_OFD_SETLK, unix.F_UNLCK)
	go func() {
		<-granted
		closeFile(fd)
		l.dir.abandoned.Add(-1)
	}()
	return errors.Join(l.failed(mode, time.Since(start), context.Cause(ctx)), err)
}

// failed is the error of a lock that was not had.
func (l *Lock) failed(mode Mode, waited time.Duration, cause error) error {
	err := fmt.Errorf("lock %s (%s): %w: waited %v (`fuser -v %s` shows who has it open)",
		l.path, mode, ErrLocked, waited.Round(time.Millisecond), l.path)
	if cause != nil {
		err = fmt.Errorf("%w: %w", err, cause)
	}
	return err
}

// release gives up file and gate, and keeps the file open.
func (l *Lock) release() error {
	l.mode = unlocked
	return errors.Join(flock(l.fd, unix.LOCK_UN), setGate(l.fd, unix.F_OFD_SETLK, unix.F_UNLCK))
}

// closeFile gives up what is held of a lock file, and closes it. A child that is just
// being started has the descriptor too, so closing is not enough.
func closeFile(fd int) error {
	return errors.Join(flock(fd, unix.LOCK_UN), setGate(fd, unix.F_OFD_SETLK, unix.F_UNLCK), unix.Close(fd))
}

// tryFlock is a flock(2) that does not wait; false is that it would have to.
func tryFlock(fd, how int) (bool, error) {
	err := flock(fd, how|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false, nil
	}
	return err == nil, err
}

func flock(fd, how int) error {
	_, err := file.Restart(func() (int, error) { return 0, unix.Flock(fd, how) })
	if err != nil {
		return fmt.Errorf("flock: %w", err)
	}
	return nil
}

// gate is the gate's byte, as fcntl(2) describes it.
func gate(kind int16) unix.Flock_t {
	return unix.Flock_t{Type: kind, Whence: unix.SEEK_SET, Start: 0, Len: 1}
}

// gateBusy tells whether somebody else has the gate shut.
func gateBusy(fd int) (bool, error) {
	g := gate(unix.F_RDLCK)
	if err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_GETLK, &g); err != nil {
		return false, fmt.Errorf("fcntl: %w", err)
	}
	return g.Type != unix.F_UNLCK, nil
}

// tryGate shuts the gate unless somebody else has it.
func tryGate(fd int) (bool, error) {
	err := setGate(fd, unix.F_OFD_SETLK, unix.F_WRLCK)
	if errors.Is(err, unix.EAGAIN) {
		return false, nil
	}
	return err == nil, err
}

func setGate(fd, command int, kind int16) error {
	g := gate(kind)
	_, err := file.Restart(func() (int, error) { return 0, unix.FcntlFlock(uintptr(fd), command, &g) })
	if err != nil {
		return fmt.Errorf("fcntl: %w", err)
	}
	return nil
}
