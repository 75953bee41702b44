package state

import (
	"errors"
	"fmt"
	"os"

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

// recordError wraps what reading a record came to, but for a missing file: that
// is an answer and no fault of the record.
func recordError(path, network, hash string, err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return err
	}
	return &RecordError{Path: path, Network: network, Hash: hash, Err: bare(err)}
}

// bare takes the path off an error that is about to get it from elsewhere.
func bare(err error) error {
	if e, ok := err.(*os.PathError); ok {
		return e.Err
	}
	return err
}

// foreignFile is a file among the records that has no record's name.
func foreignFile(path string) *RecordError {
	return &RecordError{Path: path, Err: fmt.Errorf("%w: no record has such a file name", ErrDamaged)}
}
