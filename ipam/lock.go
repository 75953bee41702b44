package ipam

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/lockorder"
)

const (
	// lockName is the file that the reference plugin locks with flock, and we.
	lockName = "lock"
	// defaultLockWait is how long a verb waits for that lock.
	defaultLockWait = 5 * time.Second
)

// A session is a store whose lock is held. What changes the directory is a
// method of session.
type session struct {
	*store
	fd    int // of the lock file
	order *lockorder.Held
}

// lock waits for the lock of the directory, at most for s.wait and until ctx
// ends. The error matches ErrLocked where another process has it, and
// fs.ErrNotExist where there is no directory.
func (s *store) lock(ctx context.Context) (*session, error) {
	if err := ctx.Err(); err != nil {
		return nil, s.lockError(err)
	}
	path := filepath.Join(s.dir, lockName)
	order := lockorder.Wait(lockorder.Reservations)
	fd, err := file.OpenAny(path, unix.O_RDONLY|unix.O_CREAT) // any user's
	if err != nil {
		order.Release()
		return nil, s.ioError("lock the reservations", err)
	}
	if err := flock(ctx, fd, s.wait); err != nil {
		order.Release()
		return nil, s.lockError(err)
	}
	return &session{store: s, fd: fd, order: order}, nil
}

// unlock gives the lock back: closing its only descriptor does.
func (s *session) unlock() {
	s.order.Release()
	unix.Close(s.fd)
}

// lockError words a wait in vain for the operator.
func (s *store) lockError(err error) error {
	path := filepath.Join(s.dir, lockName)
	switch {
	case errors.Is(err, ErrLocked):
		return newError(err, "network %q: another process has held the lock %s for %s: try again", s.network, path, s.wait)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return newError(errors.Join(ErrLocked, err), "network %q: wait for the lock %s: %s", s.network, path, err)
	default:
		return s.ioError("lock the reservations", pathError("flock", path, err))
	}
}

// flock locks fd, or closes it and returns an error: ErrLocked if wait passed
// before the lock was free, ctx's cause if that ended before.
func flock(ctx context.Context, fd int, wait time.Duration) error {
	err := flockRetry(fd, unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		return nil
	}
	if !errors.Is(err, unix.EWOULDBLOCK) {
		unix.Close(fd)
		return err
	}
	// Only now is a timer worth its price, which is the runtime's poller.
	ctx, cancel := context.WithTimeoutCause(ctx, wait, ErrLocked)
	defer cancel()
	// The kernel wakes waiters in turn, which polling would not. A wait cannot
	// be called off, so the goroutine owns fd from here on: either it hands the
	// lock over, or it closes fd when the lock comes too late.
	got := make(chan error)
	go func() {
		err := flockRetry(fd, unix.LOCK_EX)
		if err != nil {
			unix.Close(fd)
		}
		select {
		case got <- err:
		case <-ctx.Done():
			if err == nil {
				unix.Close(fd)
			}
		}
	}()
	select {
	case err := <-got:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func flockRetry(fd, how int) error {
	_, err := file.Restart(func() (struct{}, error) { return struct{}{}, unix.Flock(fd, how) })
	return err
}
