package state

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/strict"
)

// doing says in an error what failed; nil stays nil.
func doing(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf(format+": %w", append(args, err)...)
}

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

// version is that of the records and files that we write.
const version = 1

// Encode returns a record, a pointer to a struct, as its file has it: on one line. v is its version.
func Encode(v *int, record any) []byte {
	*v = version
	return append(strict.Append(make([]byte, 0, 1024), record), '\n')
}

// checked is a record that says what in it would not be read back, or could not be used.
type checked interface{ Check() error }

// EncodeChecked is Encode of a record that Check accepts, if that has so many bytes at most.
func EncodeChecked(v *int, record checked, most int) ([]byte, error) {
	if err := record.Check(); err != nil {
		return nil, err
	}
	data := Encode(v, record)
	if len(data) > most {
		return nil, fmt.Errorf("its record has %d bytes, at most %d are kept", len(data), most)
	}
	return data, nil
}

// Decode reads a record, and checks it if it can be. It fails with ErrVersion if a newer version wrote it, else with
// ErrDamaged.
func Decode(data []byte, v *int, record any) error {
	err := strict.Unmarshal(data, record, strict.Everything).First()
	switch {
	case *v > version:
		return fmt.Errorf("%w: version %d, and this tombolo reads up to %d", ErrVersion, *v, version)
	case err == nil && *v < 1:
		err = errors.New("it has no version")
	}
	if of, is := record.(checked); err == nil && is {
		err = of.Check()
	}
	return doing(err, "%w", ErrDamaged)
}

var (
	// ErrDamaged is file.ErrDamaged.
	ErrDamaged = file.ErrDamaged

	// ErrVersion says that a newer Tombolo wrote a file. It is left alone:
	// either that version comes back, or the node is emptied and the state
	// directory removed.
	ErrVersion = errors.New("written by a newer version")
)

// A RecordError says what is wrong with one record's file. It unwraps to
// ErrDamaged, ErrVersion or the system's error.
type RecordError struct {
	Path string // the file

	// Network and Hash are what the file's name says, so that an attachment
	// can be removed though its record is lost. Hash is empty for a network's
	// record, and both are for a file that has no record's name.
	Network, Hash string

	NIC string // of an uplink's record

	Err error
}

// Error names the file and says what becomes of it.
func (e *RecordError) Error() string {
	text := fmt.Sprintf("record %s: %v", e.Path, e.Err)
	switch {
	case !errors.Is(e.Err, ErrDamaged):
		return text
	case e.Hash != "":
		return text + "; a DEL or GC of the attachment removes it"
	case e.Network != "":
		return text + "; the next ADD to the network builds it again and replaces the file"
	case e.NIC != "":
		return text + "; look what `ip address` and `ip route` say, then remove the file"
	default:
		return text + "; remove the file by hand if no other program needs it"
	}
}

// Unwrap returns the cause.
func (e *RecordError) Unwrap() error { return e.Err }

// Wrap puts what reading the record came to into e, but for a missing file: that is an answer and
// no fault of the record.
func (e *RecordError) Wrap(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return err
	}
	if of, ok := err.(*os.PathError); ok {
		err = of.Err // e says the path
	}
	e.Err = err
	return e
}

// list reads the records of a directory, in the order of their names. Each that cannot be used is a *RecordError.
func list[T any](dir string, isName func(string) bool, load func(name string) (*T, error)) (found []*T, bad []*RecordError, _ error) {
	entries, err := file.ReadDir(dir)
	if err != nil {
		return nil, nil, err
	}
	var names []string
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), suffix)
		if !ok || !isName(name) {
			bad = append(bad, &RecordError{Path: dir + "/" + e.Name(), Err: fmt.Errorf("%w: no record has such a file name", ErrDamaged)})
			continue
		}
		names = append(names, name)
	}
	found, unread := LoadAll(names, load)
	return found, append(bad, unread...), nil
}

// LoadAll loads records by their names, and gives those that cannot be read besides. One that has gone meanwhile is
// left out.
func LoadAll[T any](names []string, load func(name string) (*T, error)) (found []*T, bad []*RecordError) {
	for _, name := range names {
		record, err := load(name)
		var damaged *RecordError
		switch {
		case err == nil:
			found = append(found, record)
		case errors.As(err, &damaged):
			bad = append(bad, damaged)
		}
	}
	return found, bad
}

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
	return doing(err, "the state directory %s cannot be written", d.path)
}
