package state

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/lockorder"
)

// ErrLocked means that another process or goroutine holds the lock. It is file.ErrLocked.
var ErrLocked = file.ErrLocked

// A Mode is the way in which a lock is held: shared, exclusive or not at all.
type Mode int

const (
	// unlocked is the mode of a Lock that is closed or could not be taken.
	unlocked Mode = iota

	// Shared is the mode for work on one attachment, by many processes at once: ADD, DEL, CHECK.
	Shared

	// Exclusive is the mode for work on shared objects: building or removing a network, beginning an epoch.
	Exclusive
)

// String returns "shared", "exclusive" or "not held".
func (m Mode) String() string {
	return [...]string{unlocked: "not held", Shared: "shared", Exclusive: "exclusive"}[m]
}

// A Lock is the lock of a state directory. It is held until Close or the end of the process. It consists of two parts:
//
//   - flock(2) on a file, shared or exclusive;
//   - the gate, a write lock on that file's first byte (F_OFD_SETLK). A process that wants the exclusive lock takes
//     the gate first, and holds it as long as the lock. A process that wants the shared lock waits while the gate is
//     taken. Without the gate a stream of ADDs would starve the exclusive lock, since the kernel grants a shared flock
//     past a waiting exclusive one.
//
// If one path leads to different directories, as in different mount namespaces, callers do not exclude each other.
// Two of them may then work on the same network namespace at once.
//
// A Lock is not safe for use by several goroutines at once.
type Lock struct {
	dir   *Dir
	fd    int // descriptor of the lock file; -1 after Close
	mode  Mode
	order *lockorder.Acquisition

	cookie uint64 // the cached result of netns; 0 if unknown
}

// netns returns the cookie (SO_NETNS_COOKIE) of the network namespace in which the lock is held. It reads the cookie
// once, since a call of the plugin never changes its namespace.
func (l *Lock) netns() (uint64, error) {
	if l.cookie != 0 {
		return l.cookie, nil
	}
	var err error
	l.cookie, err = l.dir.sources.netns()
	return l.cookie, err
}

// Lock takes the lock of the state directory. If ctx ends while Lock waits, the error matches ErrLocked and ctx's
// cause. A caller that holds the lock must not take it again, but use Ensure or Upgrade. A holder must not wait for
// anything slow, because all other calls of the node may then wait too. It must not wait for a lock that comes before
// this lock (see package lockorder).
func (d *Dir) Lock(ctx context.Context, mode Mode) (*Lock, error) {
	fd, err := file.Create(d.lockPath(), unix.O_RDWR)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	l := &Lock{dir: d, fd: fd, order: lockorder.Wait(lockorder.State)}
	if err := l.take(ctx, mode); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// Mode returns the mode in which the lock is held now.
func (l *Lock) Mode() Mode { return l.mode }

// Close releases the lock. A second Close does nothing.
func (l *Lock) Close() error {
	if l.fd < 0 {
		return nil
	}

	var err error

	// Release an exclusive lock explicitly, since that takes effect at once. For a shared lock, closing the file
	// suffices. While a child process is being started, it has a copy of the descriptor, and then the lock lasts a
	// moment longer.
	if l.mode != Shared {
		err = l.release()
	}

	err = errors.Join(err, unix.Close(l.fd))
	l.fd, l.mode = -1, unlocked
	l.order.Release()
	l.order = nil
	return err
}

// Upgrade turns a shared lock into an exclusive one. An exclusive lock stays as it is. Upgrade releases the shared lock
// first, since two holders would otherwise wait for each other for ever. So the caller must read again everything that
// it read under the shared lock. After an error nothing is held, and only Close may follow.
func (l *Lock) Upgrade(ctx context.Context) error {
	if l.mode == Exclusive {
		return nil
	}
	if err := l.giveUp(); err != nil {
		return fmt.Errorf("upgrade: %w", err)
	}
	return l.take(ctx, Exclusive)
}

// giveUp releases a shared lock, so that the caller can take the lock again.
func (l *Lock) giveUp() error {
	if l.mode != Shared {
		return fmt.Errorf("the lock of %s is %s", l.dir.path, l.mode)
	}
	err := l.release()
	l.order.WaitAgain()
	return err
}

// Downgrade turns an exclusive lock into a shared one. No exclusive holder comes in between, and Downgrade never waits.
// If the lock is not exclusive, it stays as it is, and Downgrade returns an error. If the shared lock cannot be taken,
// nothing is held.
func (l *Lock) Downgrade() error {
	if l.mode != Exclusive {
		return fmt.Errorf("downgrade lock of %s: it is %s", l.dir.path, l.mode)
	}

	// flock(2) releases the lock before it takes the other mode. No other process can take it in between, since that
	// requires the gate, which we still hold.
	had, err := file.TryFlock(l.fd, unix.LOCK_SH)
	if err == nil && !had {
		err = fmt.Errorf("%s: %w by a program that is none of ours", l.dir.lockPath(), ErrLocked)
	}

	if err != nil {
		return errors.Join(err, l.Close())
	}

	l.mode = Shared
	return setGate(l.fd, unix.F_UNLCK)
}

// Ensure makes sure that a job is done once for all processes. The caller holds the shared lock. If done reports
// true, Ensure returns. Otherwise it takes the exclusive lock, calls done again and, if done still reports false,
// calls work.
//
// If another process holds or awaits the exclusive lock, Ensure waits for the shared lock instead and calls done
// again. So of many processes that find the same job undone, one works, and the others do not queue up one after the
// other. Afterwards the lock is shared again, also if done or work failed. If the lock could not be taken
// (ErrLocked), nothing is held.
//
// If the caller holds the exclusive lock, Ensure calls done and work under that lock, which stays exclusive.
func (l *Lock) Ensure(ctx context.Context, done func() (bool, error), work func() error) error {
	for {
		if l.mode == unlocked {
			return fmt.Errorf("ensure: the lock of %s is %s", l.dir.path, l.mode)
		}

		if ok, err := done(); ok || err != nil {
			return err
		}

		if l.mode == Exclusive {
			return work()
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

		// The other process may be doing this very job. The shared lock is free only when that process is finished.
		if err := l.take(ctx, Shared); err != nil {
			return err
		}
	}

	if err := l.take(ctx, Exclusive); err != nil {
		return err
	}

	// Another process may have done the job while the lock was released.
	ok, err := done()
	if !ok && err == nil {
		err = work()
	}

	return errors.Join(err, l.Downgrade())
}

// take waits for the lock in the given mode. After an error nothing is held.
func (l *Lock) take(ctx context.Context, mode Mode) error {
	try := l.tryShared
	if mode == Exclusive {
		try = l.tryExclusive
	}
	if err := file.Await(ctx, l.dir.lockPath(), try); err != nil {
		return errors.Join(fmt.Errorf("%s: %w", mode, err), l.release())
	}
	l.mode = mode
	return nil
}

// tryShared takes the shared lock on the file, if the gate (see Lock) is free. It reports whether it took the lock.
func (l *Lock) tryShared() (bool, error) {
	gate, err := file.LockRange(l.fd, unix.F_OFD_GETLK, unix.F_RDLCK, 0, 1)
	if err != nil || gate.Type != unix.F_UNLCK {
		return false, err
	}
	return file.TryFlock(l.fd, unix.LOCK_SH)
}

// tryExclusive takes the gate (see Lock) and then the exclusive lock on the file, and reports whether it has both. It
// keeps the gate even if another process still has the file locked.
func (l *Lock) tryExclusive() (bool, error) {
	if had, err := tryGate(l.fd); !had {
		return false, err
	}
	return file.TryFlock(l.fd, unix.LOCK_EX)
}

// release releases the flock and the gate (see Lock), and keeps the file open.
func (l *Lock) release() error {
	l.mode = unlocked
	return errors.Join(unix.Flock(l.fd, unix.LOCK_UN), setGate(l.fd, unix.F_UNLCK))
}

// tryGate takes the gate (see Lock) unless another process has it. It reports whether it took the gate.
func tryGate(fd int) (bool, error) {
	err := setGate(fd, unix.F_WRLCK)
	if errors.Is(err, unix.EAGAIN) {
		return false, nil
	}
	return err == nil, err
}

// setGate takes the gate (F_WRLCK) or releases it (F_UNLCK): see Lock.
func setGate(fd int, kind int16) error {
	_, err := file.LockRange(fd, unix.F_OFD_SETLK, kind, 0, 1)
	return err
}

// A note is a line in the lock's own file, which a holder of the lock leaves for later holders. That file is open
// already, so reading and writing the note take one system call each. The note caches facts about a network namespace
// that are expensive to find out. The loss of the note does no harm. Holders of the shared lock write at the same
// time, so a checksum protects readers from a mix of two notes. It also protects them from notes of another network
// namespace.

const (
	maxNote = 256 // maximum length of a note in bytes
	noteSum = 17  // length of the checksum before the note: 16 digits and a space
)

// Note reads the note, a line in the lock's file that caches facts about the network namespace. It returns "" if there
// is no note, if the note is incomplete, or if it concerns another network namespace.
func (l *Lock) Note() string {
	netns, netnsErr := l.netns()
	buf := make([]byte, noteSum+maxNote+1)
	n, err := file.Restart(func() (int, error) { return unix.Pread(l.fd, buf, 0) })
	if netnsErr != nil || err != nil || n <= noteSum {
		return ""
	}

	text, _, whole := strings.Cut(string(buf[noteSum:n]), "\n")
	if !whole || hashNote(text, netns) != string(buf[:noteSum]) {
		return ""
	}

	return text
}

// SetNote replaces the note, which Note reads. text is one line of at most maxNote bytes.
func (l *Lock) SetNote(text string) error {
	if len(text) > maxNote || strings.Contains(text, "\n") {
		return fmt.Errorf("note of %d bytes: it must be a line of %d at most", len(text), maxNote)
	}
	netns, err := l.netns()
	if err == nil {
		_, err = file.Restart(func() (int, error) {
			return unix.Pwrite(l.fd, []byte(hashNote(text, netns)+text+"\n"), 0)
		})
	}
	return WithOperation(err, "write note to %s", l.dir.lockPath())
}

// hashNote returns the checksum of a note and of the network namespace's cookie, followed by a space.
func hashNote(text string, netns uint64) string {
	sum := fnv.New64a()
	sum.Write(binary.NativeEndian.AppendUint64([]byte(text), netns))
	return fmt.Sprintf("%016x ", sum.Sum64())
}
