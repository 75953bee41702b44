package file

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// ErrLocked says that a lock was not to be had before the context ended.
var ErrLocked = errors.New("locked by another process")

// While a lock is awaited it is tried for at intervals that grow from the first to the last.
const (
	firstPause = 200 * time.Microsecond
	lastPause  = 10 * time.Millisecond
)

// Await tries for the lock of a file until it is had or ctx ends; then its error matches ErrLocked
// and ctx's. A wait in the kernel could not be given up.
func Await(ctx context.Context, path string, try func() (bool, error)) error {
	start := time.Now()
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		if had, err := try(); had || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("lock %s: %w: waited %v (`fuser -v %s` shows who has it open): %w",
				path, ErrLocked, time.Since(start).Round(time.Millisecond), path, context.Cause(ctx))
		case <-time.After(pause):
		}
	}
}

// TryFlock is flock(2) that does not wait; false is that it would have to.
func TryFlock(fd, how int) (bool, error) {
	_, err := Restart(func() (int, error) { return 0, unix.Flock(fd, how|unix.LOCK_NB) })
	if err == unix.EWOULDBLOCK {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("flock: %w", err)
	}
	return true, nil
}

// TryLock opens a file and locks it with flock(2), until Unlock or the end of the process. The
// descriptor is -1 where another has it. With O_CREAT, a file that is missing is made, and its
// directory. Of a file that its last holder removed or replaced, the next one is locked.
func TryLock(path string, flags int) (int, error) {
	open := Open
	if flags&unix.O_CREAT != 0 {
		open = Create
	}
	for {
		fd, err := open(path, flags)
		if err != nil {
			return -1, err
		}
		var st unix.Stat_t
		had, err := TryFlock(fd, unix.LOCK_EX)
		if err == nil {
			err = unix.Fstat(fd, &st)
		}
		if err == nil && had && st.Nlink > 0 {
			return fd, nil
		}
		if err := errors.Join(pathError("lock", path, err), unix.Close(fd)); err != nil || !had {
			return -1, err
		}
	}
}

// Unlock gives up a flock(2) lock and closes its file. A child that is just being started has the
// descriptor too, so closing is not enough.
func Unlock(fd int) error { return errors.Join(unix.Flock(fd, unix.LOCK_UN), unix.Close(fd)) }

// LockRange is fcntl(2) for open file description locks: F_OFD_GETLK or F_OFD_SETLK of some bytes.
// Length 0 is all that follow.
func LockRange(fd, command int, kind int16, start, length int64) (unix.Flock_t, error) {
	lock := unix.Flock_t{Type: kind, Whence: unix.SEEK_SET, Start: start, Len: length}
	if err := unix.FcntlFlock(uintptr(fd), command, &lock); err != nil {
		return lock, fmt.Errorf("fcntl: %w", err)
	}
	return lock, nil
}
