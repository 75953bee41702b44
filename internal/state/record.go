package state

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/file"
)

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
		return text + "; remove the file by hand if nobody else needs it"
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

// list reads the records of a directory, in the order of their names. What cannot be used comes as
// a *RecordError each.
func list[T any](dir string, isName func(string) bool, load func(name string) (*T, error)) (found []*T, bad []*RecordError, _ error) {
	entries, err := file.ReadDir(dir)
	if err != nil {
		return nil, nil, err
	}
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), suffix)
		if !ok || !isName(name) {
			bad = append(bad, &RecordError{Path: dir + "/" + e.Name(), Err: fmt.Errorf("%w: no record has such a file name", ErrDamaged)})
			continue
		}
		record, err := load(name)
		var damaged *RecordError
		switch {
		case err == nil:
			found = append(found, record)
		case errors.As(err, &damaged):
			bad = append(bad, damaged)
		}
	}
	return found, bad, nil
}
