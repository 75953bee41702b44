// Package file reads and writes the small files that Tombolo keeps: whole, with few system calls, and without
// following a link that another user has put in their place.
//
// It calls the system and uses no os.File, the first of which starts the runtime's poller: that
// costs a short-lived plugin more than all of its records do.
package file

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ErrDamaged says that a file is not what Tombolo writes: cut short by a power failure,
// edited, of another format, or not a file at all.
var ErrDamaged = errors.New("damaged")

const (
	// MaxRecord bounds what is read of a record, in bytes. A dual-stack attachment takes
	// some 700, twice, and some 70 more for each host port, of which runtimes publish ranges.
	MaxRecord = 1 << 20

	// firstRead holds any file of a usual size in one read(2).
	firstRead = 2 << 10
)

// Read reads a small file whole. It follows no symbolic link and does not hang on a FIFO.
// A file over limit is an ErrDamaged, and not read further.
func Read(path string, limit int) ([]byte, error) {
	fd, err := Open(path, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return readFrom(fd, path, limit)
}

// ReadKernel reads a file of the kernel's, whose owner a user namespace may not know.
func ReadKernel(path string) ([]byte, error) {
	fd, err := OpenAny(path, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return readFrom(fd, path, MaxRecord)
}

func readFrom(fd int, path string, limit int) ([]byte, error) {
	buf := make([]byte, firstRead)
	filled := 0
	for {
		n, err := Restart(func() (int, error) { return unix.Read(fd, buf[filled:]) })
		if err != nil {
			return nil, PathError("read", path, err)
		}
		filled += n
		if filled > limit {
			return nil, fmt.Errorf("%w: it is larger than %d bytes", ErrDamaged, limit)
		}
		// A short read is the end of the file, on every local file system and
		// in /proc; asking again would double the system calls.
		if filled < len(buf) {
			return buf[:filled], nil
		}
		buf = append(buf, make([]byte, len(buf))...)
	}
}

// ReadNamed reads a file that a configuration or a command line names. Anyone may own it, and it may be a symbolic
// link. It has to be a regular file of at most limit bytes, or of a kind that is in also; otherwise the error matches
// fs.ErrInvalid, and the file is not opened, since to open some devices has an effect. ReadNamed returns when ctx ends,
// even if the file system does not answer.
func ReadNamed(ctx context.Context, path string, limit int, also fs.FileMode) ([]byte, error) {
	type answer struct {
		data []byte
		err  error
	}
	done := make(chan answer, 1)
	go func() {
		data, err := readNamed(path, limit, also)
		done <- answer{data, err}
	}()
	select {
	case a := <-done:
		return a.data, a.err
	case <-ctx.Done():
		return nil, PathError("read", path, context.Cause(ctx))
	}
}

func readNamed(path string, limit int, also fs.FileMode) ([]byte, error) {
	info, err := os.Stat(path)
	if err == nil && info.Mode().Type()&^also != 0 {
		err = PathError("read", path, fmt.Errorf("%w: it is not a regular file", fs.ErrInvalid))
	}
	if err != nil {
		return nil, err
	}

	// The end of a FIFO that nobody writes to comes at once.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, int64(limit)+1))
	if len(data) > limit {
		return nil, PathError("read", path, fmt.Errorf("%w: it is larger than %d bytes", fs.ErrInvalid, limit))
	}
	return data, err
}

// Open opens a regular file of root's or the caller's. Anything else is an error; it does not wait for a FIFO's
// other end.
func Open(path string, flags int) (int, error) {
	fd, err := OpenAny(path, flags)
	if err != nil {
		return -1, err
	}
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	switch {
	case err != nil:
	case st.Mode&unix.S_IFMT == unix.S_IFDIR:
		err = unix.EISDIR
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		err = fmt.Errorf("%w: it is not a regular file", ErrDamaged)
	case st.Uid != 0 && int(st.Uid) != os.Geteuid():
		err = fmt.Errorf("%w: it belongs to user %d, who is neither root nor the caller", ErrDamaged, st.Uid)
	}
	if err != nil {
		unix.Close(fd) // with nothing written
		return -1, PathError("open", path, err)
	}
	return fd, nil
}

// OpenAny is open(2) with the flags that every file wants.
func OpenAny(path string, flags int) (int, error) {
	fd, err := Restart(func() (int, error) {
		return unix.Open(path, flags|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	})
	if err != nil {
		return -1, PathError("open", path, err)
	}
	return fd, nil
}

// Create is Open with O_CREAT that makes the directories above the file when they are
// missing, which it learns from the failure and not beforehand.
func Create(path string, flags int) (int, error) {
	fd, err := Open(path, flags|unix.O_CREAT)
	if !errors.Is(err, os.ErrNotExist) {
		return fd, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return -1, err
	}
	return Open(path, flags|unix.O_CREAT)
}

// WriteAll writes data in as few calls as the kernel takes: one.
func WriteAll(fd int, path string, data []byte) error {
	for len(data) > 0 {
		n, err := Restart(func() (int, error) { return unix.Write(fd, data) })
		if err != nil {
			return PathError("write", path, err)
		}
		data = data[n:]
	}
	return nil
}

// Replace puts a file in place whole, by way of temp, which is written over and gone afterwards.
// Readers see the old file or the new one.
func Replace(temp, path string, data []byte) error {
	return replace(temp, path, data, func(int) error { return nil })
}

// ReplaceDurably is Replace that returns once the file's content and name are on the disk.
func ReplaceDurably(temp, path string, data []byte) error {
	err := replace(temp, path, data, func(fd int) error { return PathError("sync", temp, unix.Fsync(fd)) })
	if err != nil {
		return err
	}
	dir := filepath.Dir(path)
	fd, err := OpenAny(dir, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return PathError("sync", dir, unix.Fsync(fd))
}

func replace(temp, path string, data []byte, sync func(fd int) error) error {
	fd, err := Create(temp, unix.O_WRONLY|unix.O_TRUNC)
	if err != nil {
		return err
	}
	if err = WriteAll(fd, temp, data); err == nil {
		err = sync(fd)
	}
	// Some file systems say only at the close that there was no room.
	err = errors.Join(err, PathError("close", temp, unix.Close(fd)))
	if err == nil {
		err = os.Rename(temp, path)
	}
	if errors.Is(err, os.ErrNotExist) {
		// The directory of the new name is missing.
		if err = os.MkdirAll(filepath.Dir(path), 0o700); err == nil {
			err = os.Rename(temp, path)
		}
	}
	if err != nil {
		return errors.Join(err, Remove(temp))
	}
	return nil
}

// Remove unlinks a file; that it is gone already is success.
func Remove(path string) error {
	if err := unix.Unlink(path); err != unix.ENOENT {
		return PathError("remove", path, err)
	}
	return nil
}

// CleanDir checks the path of a directory, and gives its shortest form.
func CleanDir(path string) (string, error) {
	switch {
	case path == "":
		return "", errors.New("no path given")
	case !filepath.IsAbs(path):
		return "", fmt.Errorf("%q: the path is not absolute", path)
	case strings.ContainsRune(path, 0):
		return "", fmt.Errorf("%q: the path has a NUL in it", path)
	}
	return filepath.Clean(path), nil
}

// ReadDir lists a directory in the order of names; a missing one is empty.
func ReadDir(path string) ([]os.DirEntry, error) {
	entries, err := os.ReadDir(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return entries, err
}

// Restart repeats a system call that a signal cut short.
func Restart[T any](call func() (T, error)) (T, error) {
	for {
		v, err := call()
		if err != unix.EINTR {
			return v, err
		}
	}
}

// PathError adds what was done to what to an error of the system's.
func PathError(op, path string, err error) error {
	if err == nil {
		return nil
	}
	return &os.PathError{Op: op, Path: path, Err: err}
}

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
		if err := errors.Join(PathError("lock", path, err), unix.Close(fd)); err != nil || !had {
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
