package state

import (
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
)

// readFile reads a record's file.
func readFile(path string) ([]byte, error) { return file.Read(path, file.MaxRecord) }

// tempPath is where a file is written before it takes the place of path. One that a crash leaves is
// written over, or goes with the record. Every path has one writer at a time.
func (d *Dir) tempPath(path string) string { return d.path + "/.tmp-" + ident.Hash(path, "", "") }

// replaceFile puts a file in place whole. Readers see the old or the new one.
func (d *Dir) replaceFile(path string, data []byte) error {
	return file.Replace(d.tempPath(path), path, data)
}

// remove removes a record's file and what a crash left of a later one.
func (d *Dir) remove(path string) error {
	if err := file.Remove(path); err != nil {
		return err
	}
	return file.Remove(d.tempPath(path))
}
