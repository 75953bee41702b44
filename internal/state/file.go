package state

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// The functions here are thin wraps of system calls rather than os.File: the
// first os.File of a process starts the runtime's poller, which costs a
// short-lived plugin more than all of its records do.

const (
	// maxRecord bounds what is read and written, in bytes. A dual-stack
	// attachment takes some 700, twice.
	maxRecord = 64 << 10

	// firstRead holds any file of a usual size in one read(2).
	firstRead = 2 << 10

	tempPrefix = ".tmp-"
)

// readFile reads a small file whole. It follows no symbolic link and does not
// hang on a FIFO. A file over maxRecord is an ErrDamaged, and not read further.
func readFile(path string) ([]byte, error) { return readUpTo(path, maxRecord) }

// readUpTo is readFile of a file of up to limit bytes.
func readUpTo(path string, limit int) ([]byte, error) {
	fd, err := openFile(path, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return readFrom(fd, path, limit)
}

// readKernel reads a file of the kernel's, whose owner a user namespace may not know.
func readKernel(path string) ([]byte, error) {
	fd, err := openAny(path, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return readFrom(fd, path, maxRecord)
}

func readFrom(fd int, path string, limit int) ([]byte, error) {
	buf := make([]byte, firstRead)
	filled := 0
	for {
		n, err := restart(func() (int, error) { return unix.Read(fd, buf[filled:]) })
		if err != nil {
			return nil, &os.PathError{Op: "read", Path: path, Err: err}
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

// openFile opens a file that only a Tombolo has written. It does not wait for the other
// end of a FIFO, nor takes one for a file.
func openFile(path string, flags int) (int, error) {
	fd, err := openAny(path, flags)
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
		return -1, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, nil
}

// openAny is open(2) with the flags that every file wants.
func openAny(path string, flags int) (int, error) {
	fd, err := restart(func() (int, error) {
		return unix.Open(path, flags|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	})
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, nil
}

// createFile is openFile with O_CREAT that makes the directories above the file
// when they are missing, which it learns from the failure and not beforehand.
func createFile(path string, flags int) (int, error) {
	fd, err := openFile(path, flags|unix.O_CREAT)
	if !errors.Is(err, os.ErrNotExist) {
		return fd, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return -1, err
	}
	return openFile(path, flags|unix.O_CREAT)
}

// writeAll writes data in as few calls as the kernel takes: one.
func writeAll(fd int, path string, data []byte) error {
	for len(data) > 0 {
		n, err := restart(func() (int, error) { return unix.Write(fd, data) })
		if err != nil {
			return &os.PathError{Op: "write", Path: path, Err: err}
		}
		data = data[n:]
	}
	return nil
}

// replaceFile puts a file in place whole, by way of a temporary file in the
// state directory and rename(2). Readers see the old or the new one.
func (d *Dir) replaceFile(path string, data []byte) error {
	temp := fmt.Sprintf("%s/%s%016x", d.path, tempPrefix, rand.Uint64())
	return replaceBy(temp, unix.O_EXCL, path, data)
}

// replaceBy puts a file in place by way of temp, which is opened with these flags
// besides and gone afterwards.
func replaceBy(temp string, flags int, path string, data []byte) error {
	fd, err := createFile(temp, unix.O_WRONLY|flags)
	if err != nil {
		return err
	}
	err = errors.Join(writeAll(fd, temp, data), unix.Close(fd))
	if err == nil {
		err = renameFile(temp, path)
	}
	if err != nil {
		return errors.Join(err, removeFile(temp))
	}
	return nil
}

// renameFile renames, making the directory of the new name when it is missing.
func renameFile(from, to string) error {
	err := os.Rename(from, to)
	if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
		return err
	}
	return os.Rename(from, to)
}

// removeFile unlinks a file; that it is gone already is success.
func removeFile(path string) error {
	if err := unix.Unlink(path); err != nil && err != unix.ENOENT {
		return &os.PathError{Op: "remove", Path: path, Err: err}
	}
	return nil
}

// Clean removes the temporary files that crashes have left. It needs the
// exclusive lock, under which nobody is writing one.
func (l *Lock) Clean() error {
	if l.mode != Exclusive {
		return fmt.Errorf("clean %s: the lock is %s, and has to be exclusive", l.dir.path, l.mode)
	}
	entries, err := readDir(l.dir.path)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tempPrefix) {
			errs = append(errs, removeFile(l.dir.path+"/"+e.Name()))
		}
	}
	return errors.Join(errs...)
}

// readDir lists a directory in the order of names; a missing one is empty.
func readDir(path string) ([]os.DirEntry, error) {
	entries, err := os.ReadDir(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return entries, err
}

// restart repeats a system call that a signal cut short.
func restart(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if err != unix.EINTR {
			return n, err
		}
	}
}
