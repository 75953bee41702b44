package state

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/tombolo-cni/tombolo/internal/file"
	"golang.org/x/sys/unix"
)

// writableSize is more than a call's records take.
const writableSize = 16 << 10

// CheckWritable says why no record could be written now: the directory is on a file system
// that is full or mounted read-only. Nothing is left of the look: it writes to a file without
// a name, or, on file systems that have none, asks for what is free. Of a directory that is
// not there, it looks at the one where it would be made. It takes no lock.
func (d *Dir) CheckWritable() error {
	path := d.path
	for {
		err := writable(path)
		if parent := filepath.Dir(path); errors.Is(err, fs.ErrNotExist) && parent != path {
			path = parent
			continue
		}
		if err != nil {
			return fmt.Errorf("the state directory %s cannot be written: %w", d.path, err)
		}
		return nil
	}
}

func writable(dir string) error {
	fd, err := file.Restart(func() (int, error) {
		return unix.Open(dir, unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
	})
	switch {
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EISDIR), errors.Is(err, unix.EINVAL):
		return roomIn(dir)
	case err != nil:
		return err
	}
	defer unix.Close(fd)
	return file.WriteAll(fd, dir, make([]byte, writableSize))
}

func roomIn(dir string) error {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return err
	}
	switch {
	case s.Flags&unix.ST_RDONLY != 0:
		return unix.EROFS
	case s.Bfree*uint64(s.Bsize) < writableSize, s.Files > 0 && s.Ffree == 0:
		return unix.ENOSPC
	}
	return nil
}
