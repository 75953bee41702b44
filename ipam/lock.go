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
	path := filepath.Join(s.dir, lockName)
	if err := ctx.Err(); err != nil {
		return nil, newError(errors.Join(ErrLocked, err), "network %q: wait for the lock %s: %s", s.network, path, err)
	}
	order := lockorder.Wait(lockorder.Reservations)
	fd, err := s.flock(ctx, path)
	if err != nil {
		order.Release()
		return nil, err
	}
	return &session{store: s, fd: fd, order: order}, nil
}

// flock opens and locks the file, which may be any user's.
func (s *store) flock(ctx context.Context, path string) (int, error) {
	fd, err := file.OpenAny(path, unix.O_RDONLY|unix.O_CREAT)
	if err != nil {
		return -1, s.ioError("lock the reservations", err)
	}
	try := func() (bool, error) { return file.TryFlock(fd, unix.LOCK_EX) }
	had, err := try()
	if !had && err == nil {
		// Only now is a timer worth its price.
		ctx, cancel := context.WithTimeout(ctx, s.wait)
		defer cancel()
		err = file.Await(ctx, path, try)
	}
	switch {
	case err == nil:
		return fd, nil
	case errors.Is(err, file.ErrLocked):
		err = newError(errors.Join(ErrLocked, err), "network %q: reservations: %s", s.network, err)
	default:
		err = s.ioError("lock the reservations", pathError("flock", path, err))
	}
	unix.Close(fd)
	return -1, err
}

// unlock gives the lock back: closing its only descriptor does.
func (s *session) unlock() {
	s.order.Release()
	unix.Close(s.fd)
}
