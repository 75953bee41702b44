package lease

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// DefaultDir is where the records are unless the configuration says otherwise.
const DefaultDir = "/var/lib/tombolo/leases"

// The names of files. No hash has a dot in it, so that none of these clash.
const (
	recordSuffix = ".json"
	lockSuffix   = ".lock"
	tempPrefix   = ".tmp-"
	keeperLock   = "keeper.lock"
)

// A Dir is a directory of records. Its methods may be called from several goroutines
// and processes at once.
type Dir struct {
	path string
	// Clock is the kernel's; a test sets one of its own.
	Clock Clock
}

// Open returns the directory at an absolute path. It makes no system call: the
// directory appears when something is first written.
func Open(dir string) (*Dir, error) {
	path, err := file.CleanDir(dir)
	if err != nil {
		return nil, fmt.Errorf("open lease directory: %w", err)
	}
	return &Dir{path: path, Clock: kernelClock()}, nil
}

// Path returns the directory's path, cleaned.
func (d *Dir) Path() string { return d.path }

// private refuses a directory in which others may put records: by those the keeper enters
// namespaces, and changes them and the host's firewall.
func (d *Dir) private() error {
	var st unix.Stat_t
	if err := unix.Stat(d.path, &st); err != nil {
		return &os.PathError{Op: "stat", Path: d.path, Err: err}
	}
	const others = 0o022
	if st.Mode&others != 0 || st.Uid != 0 && int(st.Uid) != unix.Geteuid() {
		return fmt.Errorf("others than root may write to %s (owner %d, mode %03o): chown root %[1]s && chmod 700 %[1]s", d.path, st.Uid, st.Mode&0o777)
	}
	return nil
}

// RecordHash returns the hash of the record that a file of the directory holds. It is
// false for every other file.
func RecordHash(name string) (hash string, ok bool) {
	hash, ok = strings.CutSuffix(name, recordSuffix)
	return hash, ok && ident.IsHash(hash)
}

func (d *Dir) recordPath(hash string) string { return d.path + "/" + hash + recordSuffix }
func (d *Dir) lockPath(hash string) string   { return d.path + "/" + hash + lockSuffix }
func (d *Dir) tempPath(hash string) string   { return d.path + "/" + tempPrefix + hash }

// Load reads a record. A missing one matches os.ErrNotExist; one that cannot be used is a *state.RecordError.
func (d *Dir) Load(hash string) (*Record, error) {
	if err := ident.CheckHash(hash); err != nil {
		return nil, fmt.Errorf("load lease record: %w", err)
	}
	path := d.recordPath(hash)
	r, err := d.load(path, hash)
	if err != nil {
		return nil, fmt.Errorf("load lease: %w", (&state.RecordError{Path: path, Hash: hash}).Wrap(err))
	}
	return r, nil
}

func (d *Dir) load(path, hash string) (*Record, error) {
	data, err := file.Read(path, file.MaxRecord)
	if err != nil {
		return nil, err
	}
	r, err := d.fromDisk(data)
	if err != nil {
		return nil, err
	}
	if r.Hash() != hash {
		return nil, fmt.Errorf("%w: it is the record of network %s, container %s, interface %s, whose file is %s%s",
			file.ErrDamaged, r.Network, r.ContainerID, r.IfName, r.Hash(), recordSuffix)
	}
	return r, nil
}

// Hashes lists the records that there are, in the order of their hashes, without
// reading them. A missing directory has none.
func (d *Dir) Hashes() ([]string, error) {
	entries, err := os.ReadDir(d.path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("list lease records: %w", err)
	}
	var list []string
	for _, e := range entries {
		if hash, ok := RecordHash(e.Name()); ok {
			list = append(list, hash)
		}
	}
	return list, nil
}

// List reads all records, in the order of their hashes. A record that cannot be used comes as a
// *state.RecordError each; only where the directory cannot be read is there no answer.
func (d *Dir) List() ([]*Record, []*state.RecordError, error) {
	hashes, err := d.Hashes()
	if err != nil {
		return nil, nil, err
	}
	found, bad := state.LoadAll(hashes, d.Load)
	return found, bad, nil
}

// Recall gives the lease that a client had last, so that its next one can be asked
// for the same address; nil if none is remembered.
func (d *Dir) Recall(network string, clientID []byte) (*Record, error) {
	r, err := d.Load(stickyHash(network, clientID))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return r, err
}

// Same gives the other records whose client is r's to a server: of the same network and
// with the same client identifier or, where there is none, MAC address. Those that are
// Sticky are left out, and those that cannot be read.
func (d *Dir) Same(r *Record) ([]*Record, error) {
	key := r.Client.key()
	return d.having(key, func(other *Record) bool {
		return other.Token != r.Token && other.State != Sticky && other.Network == r.Network && other.Client.key() == key
	})
}

// having reads the records whose files have a text in them, and gives those that pass. After a boot that is asked for
// every record, so few are to be decoded. Files that cannot be read are left out.
func (d *Dir) having(text string, pass func(*Record) bool) ([]*Record, error) {
	hashes, err := d.Hashes()
	var found []*Record
	for _, hash := range hashes {
		data, err := file.Read(d.recordPath(hash), file.MaxRecord)
		if err != nil || !bytes.Contains(data, []byte(text)) {
			continue
		}
		if r, err := d.fromDisk(data); err == nil && pass(r) {
			found = append(found, r)
		}
	}
	return found, err
}
