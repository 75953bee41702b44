package state

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/file"
)

const tempPrefix = ".tmp-"

// readFile reads a record's file.
func readFile(path string) ([]byte, error) { return file.Read(path, file.MaxRecord) }

// replaceFile puts a file in place whole, by way of a temporary file in the
// state directory and rename(2). Readers see the old or the new one.
func (d *Dir) replaceFile(path string, data []byte) error {
	temp := fmt.Sprintf("%s/%s%016x", d.path, tempPrefix, rand.Uint64())
	return file.Replace(temp, path, data)
}

// Clean removes the temporary files that crashes have left. It needs the
// exclusive lock, under which nobody is writing one.
func (l *Lock) Clean() error {
	if l.mode != Exclusive {
		return fmt.Errorf("clean %s: the lock is %s, and has to be exclusive", l.dir.path, l.mode)
	}
	entries, err := file.ReadDir(l.dir.path)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tempPrefix) {
			errs = append(errs, file.Remove(l.dir.path+"/"+e.Name()))
		}
	}
	return errors.Join(errs...)
}
