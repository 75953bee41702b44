package lease

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/lockorder"
)

// As in package internal/state, these are thin wraps of system calls rather than
// os.File, which would start the runtime's poller in the plugin.

// maxRecord bounds what is read and written, in bytes. A lease takes some 1,200; one
// with every option that fits into a packet, under 20,000.
const maxRecord = 64 << 10

// firstRead holds a usual record in one read(2).
const firstRead = 4 << 10

// readFile reads a small file whole. It follows no symbolic link and does not hang on
// a FIFO. A file over maxRecord is an ErrDamaged, and not read further.
func readFile(path string) ([]byte, error) {
	fd, err := openFile(path, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return readFrom(fd, path)
}

// readKernel reads a file of the kernel's, whose owner a user namespace may not know.
func readKernel(path string) ([]byte, error) {
	fd, err := openAny(path, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return readFrom(fd, path)
}

func readFrom(fd int, path string) ([]byte, error) {
	buf := make([]byte, firstRead)
	filled := 0
	for {
		n, err := restart(func() (int, error) { return unix.Read(fd, buf[filled:]) })
		if err != nil {
			return nil, &os.PathError{Op: "read", Path: path, Err: err}
		}
		filled += n
		if filled > maxRecord {
			return nil, fmt.Errorf("%w: it is larger than %d bytes", ErrDamaged, maxRecord)
		}
		// A short read is the end of the file, on every local file system.
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

// createFile is openFile with O_CREAT that makes the directory when it is missing,
// which it learns from the failure and not beforehand.
func (d *Dir) createFile(path string, flags int) (int, error) {
	fd, err := openFile(path, flags|unix.O_CREAT)
	if !errors.Is(err, os.ErrNotExist) {
		return fd, err
	}
	if err := d.Make(); err != nil {
		return -1, err
	}
	return openFile(path, flags|unix.O_CREAT)
}

// putFile puts a file in place whole, and with durable on the disk before it returns.
func (d *Dir) putFile(temp, path string, data []byte, durable bool) error {
	fd, err := d.createFile(temp, unix.O_WRONLY|unix.O_TRUNC)
	if err != nil {
		return err
	}
	err = writeAll(fd, temp, data)
	if err == nil && durable {
		lockorder.Slow("the disk")
		if err = unix.Fsync(fd); err != nil {
			err = &os.PathError{Op: "sync", Path: temp, Err: err}
		}
	}
	err = errors.Join(err, unix.Close(fd))
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		return errors.Join(err, removeFile(temp))
	}
	if durable {
		return d.sync()
	}
	return nil
}

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

// removeFile unlinks a file; that it is gone already is success.
func removeFile(path string) error {
	if err := unix.Unlink(path); err != nil && err != unix.ENOENT {
		return &os.PathError{Op: "remove", Path: path, Err: err}
	}
	return nil
}

func exists(path string) bool {
	var st unix.Stat_t
	return unix.Lstat(path, &st) == nil
}

func restart(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if err != unix.EINTR {
			return n, err
		}
	}
}
