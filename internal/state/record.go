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

// withOperation adds the name of the failed operation to an error. It returns nil if err is nil.
func withOperation(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf(format+": %w", append(args, err)...)
}

// readFile reads a record's file.
func readFile(path string) ([]byte, error) { return file.Read(path, file.MaxRecord) }

// tempPath returns the path of the temporary file that replaces the file at path when it is complete. If a crash
// leaves the temporary file, the next write overwrites it, or it is removed with the record. Every path has one
// writer at a time.
func (d *Dir) tempPath(path string) string { return d.path + "/.tmp-" + ident.Hash(path, "", "") }

// replaceFile replaces a file as a whole. Readers see the old or the new one.
func (d *Dir) replaceFile(path string, data []byte) error {
	return file.Replace(d.tempPath(path), path, data)
}

// remove removes a record's file and the temporary file of an interrupted update.
func (d *Dir) remove(path string) error {
	if err := file.Remove(path); err != nil {
		return err
	}
	return file.Remove(d.tempPath(path))
}

// version is the version of the records and files that we write.
const version = 1

// Encode returns a record as one line of JSON. record points to a struct, and v to its version field, which Encode
// sets.
func Encode(v *int, record any) []byte {
	*v = version
	return append(strict.Append(make([]byte, 0, 1024), record), '\n')
}

// checkable is a record that can check itself. Check returns an error if the record could not be read back or used.
type checkable interface{ Check() error }

// EncodeChecked checks a record and encodes it. It returns an error if the result is longer than the limit most, in
// bytes.
func EncodeChecked(v *int, record checkable, most int) ([]byte, error) {
	if err := record.Check(); err != nil {
		return nil, err
	}
	data := Encode(v, record)
	if len(data) > most {
		return nil, fmt.Errorf("its record has %d bytes, at most %d are kept", len(data), most)
	}
	return data, nil
}

// Decode parses a record and, if it implements checked, checks it. If a newer version wrote it, the error matches
// ErrVersion, otherwise ErrDamaged.
func Decode(data []byte, v *int, record any) error {
	err := strict.Unmarshal(data, record, strict.Everything).First()
	switch {
	case *v > version:
		return fmt.Errorf("%w: version %d, and this tombolo reads up to %d", ErrVersion, *v, version)
	case err == nil && *v < 1:
		err = errors.New("it has no version")
	}

	if of, is := record.(checkable); err == nil && is {
		err = of.Check()
	}
	return withOperation(err, "%w", ErrDamaged)
}

var (
	// ErrDamaged means that the content of a file is not valid. It is file.ErrDamaged.
	ErrDamaged = file.ErrDamaged

	// ErrVersion means that a newer Tombolo wrote a file. We leave such a file alone. The operator can install that
	// version again, or empty the node and remove the state directory.
	ErrVersion = errors.New("written by a newer version")
)

// A RecordError is an error about one record's file. It unwraps to ErrDamaged, ErrVersion or the system's error.
type RecordError struct {
	Path string // the file

	// Network and Hash come from the file's name, so that an attachment can be removed even if its record is damaged.
	// Hash is empty for a network's record. Both are empty if the file's name is not the name of a record.
	Network, Hash string

	NIC string // set for an uplink's record

	Err error
}

// Error returns a message with the path of the file, the error and, for a damaged file, the way to get rid of it.
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

// Wrap sets e.Err to err, an error from reading the record, and returns e. It returns err itself if the file is
// missing, since a missing record is no damage.
func (e *RecordError) Wrap(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return err
	}
	if pathErr, ok := err.(*os.PathError); ok {
		err = pathErr.Err // e names the path already
	}
	e.Err = err
	return e
}

// list reads the records in a directory, sorted by name. It returns each record that cannot be used as a
// *RecordError.
func list[T any](dir string, isName func(string) bool, load func(name string) (*T, error)) (found []*T,
	bad []*RecordError, _ error) {
	entries, err := file.ReadDir(dir)
	if err != nil {
		return nil, nil, err
	}

	var names []string
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), suffix)
		if !ok || !isName(name) {
			bad = append(bad, &RecordError{Path: dir + "/" + e.Name(),
				Err: fmt.Errorf("%w: no record has such a file name", ErrDamaged)})
			continue
		}
		names = append(names, name)
	}

	found, unread := LoadAll(names, load)
	return found, append(bad, unread...), nil
}

// LoadAll loads records by their names. It returns errors about damaged records in bad, and skips records that do not
// exist any more.
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

// writableSize is the number of bytes that CheckWritable tries to write. The records of one call are smaller.
const writableSize = 16 << 10

// CheckWritable returns an error if no record could be written now, because the file system is full or mounted
// read-only. It writes to a file without a name, so nothing remains. If the directory does not exist, it tries the
// closest parent that does. It takes no lock.
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
	return withOperation(err, "the state directory %s cannot be written", d.path)
}
