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
// a name. Of a directory that is not there, it looks at the one where it would be made. It takes no lock.
func (d *Dir) CheckWritable() error {
	path := d.path
	fd, err := openUnnamed(path + "/.")
	for errors.Is(err, fs.ErrNotExist) && path != "/" {
		path = filepath.Dir(path)
		fd, err = openUnnamed(path + "/.")
	}
	if err == nil {
		err = errors.Join(file.WriteAll(fd, path, make([]byte, writableSize)), unix.Close(fd))
	}
	if err != nil {
		return fmt.Errorf("the state directory %s cannot be written: %w", d.path, err)
	}
	return nil
}
