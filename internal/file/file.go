// Package file reads and writes the small files in which Tombolo stores its records. It reads or replaces a whole file
// with few system calls. Except in ReadNamed, it opens no file whose path is a symbolic link, since another user may
// have made the link.
//
// For records it makes system calls directly. An os.File would start the runtime's poller, which costs a short-lived
// plugin more time than all of its records.
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

// ErrDamaged means that Tombolo cannot have written the file in its present state. For example, a power failure
// truncated it, somebody edited it, it has another format or owner, or it is no regular file.
var ErrDamaged = errors.New("damaged")

const (
	// MaxRecord is the maximum size of a record's file, in bytes. Only the file of a NIC's takeover may be larger. An
	// attachment's file may contain its record twice, and a record lists all host ports. Runtimes may publish whole
	// ranges of ports.
	MaxRecord = 1 << 20

	// firstRead is the size of the first read in bytes, which suffices for most files.
	firstRead = 2 << 10
)

// Read returns the content of a small file. It follows no symbolic link and does not wait on a FIFO. The error matches
// ErrDamaged if the file has more than limit bytes, if it is a FIFO or a device, or if it belongs to neither root nor
// the caller. For a directory, the error matches unix.EISDIR, and for a symbolic link unix.ELOOP.
func Read(path string, limit int) ([]byte, error) {
	return read(path, limit, Open)
}

// ReadKernel returns the content of a file that the kernel provides, such as in /proc. Unlike Read, it accepts any
// owner, since the owner may have no ID in a user namespace.
func ReadKernel(path string) ([]byte, error) {
	return read(path, MaxRecord, OpenAny)
}

func read(path string, limit int, open func(path string, flags int) (int, error)) ([]byte, error) {
	fd, err := open(path, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)

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

		// A short read means the end of the file on every local file system and in the files of /proc that we read. So
		// skip a second read, which would double the system calls.
		if filled < len(buf) {
			return buf[:filled], nil
		}
		buf = append(buf, make([]byte, len(buf))...)
	}
}

// ReadNamed returns the content of a file that a configuration or a command line names. Any user may own the file, and
// it may be a symbolic link. It must be a regular file, or of a type in also, and have at most limit bytes. If not, the
// error matches fs.ErrInvalid. ReadNamed does not open a file of another type, since opening some devices has an
// effect. It returns when ctx ends, even if the file system does not answer.
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

	// With O_NONBLOCK, opening a FIFO does not wait for a writer, and reading without a writer returns the end of the
	// file.
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

// Open opens a regular file that belongs to root or the caller, and returns its file descriptor. It returns an error
// for any other file. Open does not wait for the other end of a FIFO.
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
		unix.Close(fd) // ignore the error: nothing was written yet
		return -1, PathError("open", path, err)
	}

	return fd, nil
}

// OpenAny opens a file of any type and owner. It follows no symbolic link, and adds the flags O_CLOEXEC and O_NONBLOCK.
func OpenAny(path string, flags int) (int, error) {
	fd, err := Restart(func() (int, error) {
		return unix.Open(path, flags|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	})
	if err != nil {
		return -1, PathError("open", path, err)
	}
	return fd, nil
}

// Create calls Open with O_CREAT. If the directories above the file are missing, it creates them and tries again.
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

// WriteAll writes all of data, usually with one system call.
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

// Replace replaces the content of the file at path. It writes data to the file temp, and renames temp to path. Readers
// see either the old or the new content.
func Replace(temp, path string, data []byte) error {
	return replace(temp, path, data, func(int) error { return nil })
}

// ReplaceDurably replaces a file like Replace. It returns after an fsync of the file and of its directory.
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

// replace writes data to temp, calls sync, and renames temp to path.
func replace(temp, path string, data []byte, sync func(fd int) error) error {
	fd, err := Create(temp, unix.O_WRONLY|unix.O_TRUNC)
	if err != nil {
		return err
	}

	if err = WriteAll(fd, temp, data); err == nil {
		err = sync(fd)
	}

	// Some file systems report a full disk only at close.
	err = errors.Join(err, PathError("close", temp, unix.Close(fd)))
	if err == nil {
		err = os.Rename(temp, path)
	}

	if errors.Is(err, os.ErrNotExist) {
		// The directory of path does not exist yet, since rename returned ENOENT although temp exists. Create it and
		// try again.
		if err = os.MkdirAll(filepath.Dir(path), 0o700); err == nil {
			err = os.Rename(temp, path)
		}
	}

	if err != nil {
		return errors.Join(err, Remove(temp))
	}

	return nil
}

// Remove removes a file. A missing file is no error.
func Remove(path string) error {
	if err := unix.Unlink(path); err != unix.ENOENT {
		return PathError("remove", path, err)
	}
	return nil
}

// CleanDir returns the path of a directory without redundant parts. It returns an error if the path is empty, is
// relative or contains a NUL. It does not access the disk.
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

// ReadDir lists a directory, sorted by name. For a missing directory it returns no entries and no error.
func ReadDir(path string) ([]os.DirEntry, error) {
	entries, err := os.ReadDir(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return entries, err
}

// Restart calls a function again for as long as a signal interrupts its system call (EINTR).
func Restart[T any](call func() (T, error)) (T, error) {
	for {
		v, err := call()
		if err != unix.EINTR {
			return v, err
		}
	}
}

// PathError returns err with the operation and the path as an *os.PathError, or nil if err is nil.
func PathError(op, path string, err error) error {
	if err == nil {
		return nil
	}
	return &os.PathError{Op: op, Path: path, Err: err}
}

// ErrLocked means that another process or goroutine still held the lock when the context ended.
var ErrLocked = errors.New("locked by another process")

// These are the first and the longest pause between two attempts of Await. The pause doubles with each attempt.
const (
	firstPause = 200 * time.Microsecond
	lastPause  = 10 * time.Millisecond
)

// Await calls try, which tries to take the lock of the file at path, until try returns true or an error. If ctx ends
// first, the error matches ErrLocked and ctx's cause. Await polls, since a wait in the kernel could not be cancelled.
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

// TryFlock calls flock(2) with the operation how, without waiting. It returns false if another process or goroutine has
// the lock.
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

// TryLock opens a file and locks it with flock(2). Unlock, or the end of the process, releases the lock. TryLock
// returns -1 without an error if another process or goroutine has the lock. With O_CREAT it creates a missing file and
// its directory. If the last holder removed or replaced the file, TryLock locks the new one.
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

// Unlock releases a flock(2) lock and closes the file. Closing alone does not suffice, since a child process that is
// just being started may have the file descriptor too.
func Unlock(fd int) error { return errors.Join(unix.Flock(fd, unix.LOCK_UN), unix.Close(fd)) }

// LockRange calls fcntl(2) with F_OFD_GETLK or F_OFD_SETLK, for an open file description lock on a range of bytes. A
// length of 0 means all bytes from start on. For F_OFD_GETLK the result is a conflicting lock, or has the type F_UNLCK
// if there is none.
func LockRange(fd, command int, kind int16, start, length int64) (unix.Flock_t, error) {
	lock := unix.Flock_t{Type: kind, Whence: unix.SEEK_SET, Start: start, Len: length}
	if err := unix.FcntlFlock(uintptr(fd), command, &lock); err != nil {
		return lock, fmt.Errorf("fcntl: %w", err)
	}
	return lock, nil
}
