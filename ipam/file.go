package ipam

import (
	"errors"
	"io/fs"

	"golang.org/x/sys/unix"
)

// The functions below do with few system calls what package os does with more:
// os.File registers every file with the netpoller, in vain for regular ones,
// and its first use starts that. An ADD opens five small files.

// retry calls f again while a signal interrupts it. Only some file systems do
// that to these calls.
func retry[T any](f func() (T, error)) (T, error) {
	for {
		v, err := f()
		if !errors.Is(err, unix.EINTR) {
			return v, err
		}
	}
}

// pathError adds what was done to what to an errno.
func pathError(op, path string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: path, Err: err}
}

// openFile opens path, and returns a descriptor that a child does not inherit. It does not
// wait for the other end of a FIFO.
func openFile(path string, flags int, mode uint32) (int, error) {
	fd, err := retry(func() (int, error) { return unix.Open(path, flags|unix.O_CLOEXEC|unix.O_NONBLOCK, mode) })
	return fd, pathError("open", path, err)
}

// readAt reads up to limit bytes from the start of fd, and one more to show
// that there are more. Of a regular file, which all of ours are, one call
// returns that much or all there is.
func readAt(fd int, path string, limit int) ([]byte, error) {
	buf := make([]byte, limit+1)
	n, err := retry(func() (int, error) { return unix.Pread(fd, buf, 0) })
	if err != nil {
		return nil, pathError("read", path, err)
	}
	return buf[:n], nil
}

// readFile reads up to limit+1 bytes of the file at path. It does not wait for
// the writer of a pipe.
func readFile(path string, limit int) ([]byte, error) {
	fd, err := openFile(path, unix.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return readAt(fd, path, limit)
}

// writeAt writes all of text at the start of fd.
func writeAt(fd int, path, text string) error {
	for done := 0; done < len(text); {
		n, err := retry(func() (int, error) { return unix.Pwrite(fd, []byte(text[done:]), int64(done)) })
		if err != nil {
			return pathError("write", path, err)
		}
		done += n
	}
	return nil
}

// createFile makes a file that was not there, or fails with EEXIST. Where it
// cannot be written whole it is removed again.
func createFile(path, text string) error {
	fd, err := openFile(path, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = writeAt(fd, path, text)
	// Some file systems say only at the close that there was no room.
	if closeErr := unix.Close(fd); err == nil {
		err = pathError("close", path, closeErr)
	}
	if err != nil {
		return errors.Join(err, removeFile(path))
	}
	return nil
}

// removeFile removes a file. One that is gone is success.
func removeFile(path string) error {
	err := unix.Unlink(path)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return pathError("remove", path, err)
}
