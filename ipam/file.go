package ipam

import (
	"errors"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
)

// The directory is the reference plugin's too, and its files may be any user's: they are
// opened by file.OpenAny, not by file.Open.

// pathError adds what was done to what to an errno.
func pathError(op, path string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: path, Err: err}
}

// readAt reads up to limit bytes from the start of fd, and one more to show
// that there are more. Of a regular file, which all of ours are, one call
// returns that much or all there is.
func readAt(fd int, path string, limit int) ([]byte, error) {
	buf := make([]byte, limit+1)
	n, err := file.Restart(func() (int, error) { return unix.Pread(fd, buf, 0) })
	if err != nil {
		return nil, pathError("read", path, err)
	}
	return buf[:n], nil
}

// readFile reads up to limit+1 bytes of the file at path. It does not wait for
// the writer of a pipe.
func readFile(path string, limit int) ([]byte, error) {
	fd, err := file.OpenAny(path, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return readAt(fd, path, limit)
}

// createFile makes a file that was not there, or fails with EEXIST. Where it
// cannot be written whole it is removed again.
func createFile(path, text string) error {
	fd, err := file.OpenAny(path, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL)
	if err != nil {
		return err
	}
	err = file.WriteAll(fd, path, []byte(text))
	// Some file systems say only at the close that there was no room.
	if closeErr := unix.Close(fd); err == nil {
		err = pathError("close", path, closeErr)
	}
	if err != nil {
		return errors.Join(err, file.Remove(path))
	}
	return nil
}
