package lease

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// DefaultDir is the default directory of the records.
const DefaultDir = "/var/lib/tombolo/leases"

// These are parts of file names. No hash contains a dot, so these names never clash.
const (
	recordSuffix = ".json"
	lockSuffix   = ".lock"
	tempPrefix   = ".tmp-"
	keeperLock   = "keeper.lock"
)

// Store is a directory of lease records. Several goroutines and processes may call its methods at once.
type Store struct {
	path string
	// Clock is the kernel's clock. Tests replace it.
	Clock Clock
}

// Open returns the directory at an absolute path. It makes no system call. The first write creates the directory.
func Open(dir string) (*Store, error) {
	path, err := file.CleanDir(dir)
	if err != nil {
		return nil, fmt.Errorf("open lease directory: %w", err)
	}
	return &Store{path: path, Clock: kernelClock()}, nil
}

// Path returns the directory's cleaned path.
func (d *Store) Path() string { return d.path }

// private returns an error if other users may write to the directory. The keeper must trust the records: it enters
// the namespaces that they name, and changes these namespaces and the host's firewall.
func (d *Store) private() error {
	var st unix.Stat_t
	if err := unix.Stat(d.path, &st); err != nil {
		return &os.PathError{Op: "stat", Path: d.path, Err: err}
	}
	const others = 0o022
	if st.Mode&others != 0 || st.Uid != 0 && int(st.Uid) != unix.Geteuid() {
		return fmt.Errorf("others than root may write to %s (owner %d, mode %03o): chown root %[1]s && chmod 700 %[1]s",
			d.path, st.Uid, st.Mode&0o777)
	}
	return nil
}

// RecordHash returns the hash in the name of a record's file. ok is false for every other file.
func RecordHash(name string) (hash string, ok bool) {
	hash, ok = strings.CutSuffix(name, recordSuffix)
	return hash, ok && ident.IsHash(hash)
}

func (d *Store) recordPath(hash string) string { return d.path + "/" + hash + recordSuffix }
func (d *Store) lockPath(hash string) string   { return d.path + "/" + hash + lockSuffix }
func (d *Store) tempPath(hash string) string   { return d.path + "/" + tempPrefix + hash }

// Load reads a record. If there is none, the error matches os.ErrNotExist. If the record cannot be read or used, the
// error wraps a *state.RecordError.
func (d *Store) Load(hash string) (*Record, error) {
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

// load reads the record at path, and checks that it belongs to the hash.
func (d *Store) load(path, hash string) (*Record, error) {
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

// Hashes returns the hashes of all records, sorted, without reading the records. A missing directory is no error.
func (d *Store) Hashes() ([]string, error) {
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

// List reads all records, sorted by hash. For each record that cannot be used it returns a *state.RecordError. The
// error is set only if the directory cannot be read.
func (d *Store) List() ([]*Record, []*state.RecordError, error) {
	hashes, err := d.Hashes()
	if err != nil {
		return nil, nil, err
	}
	found, bad := state.LoadAll(hashes, d.Load)
	return found, bad, nil
}

// Recall returns the last lease of the client in the record next, or nil if none is known. It looks for a remembered
// lease, and for a lease from before the last boot. For a sticky client it searches the records of all containers,
// otherwise only the record of the same container.
func (d *Store) Recall(next *Record) *dhcpc.Lease {
	key := next.Client.key()
	isLast := func(r *Record) bool {
		isBefore := r.Lease != nil && (r.State == Sticky || r.State == Bound && r.Boot != next.Boot)
		return isBefore && r.Network == next.Network && r.Client.key() == key
	}

	var found []*Record
	if next.Client.Sticky {
		found, _ = d.recordsContaining(key, isLast)
	} else if r, err := d.Load(next.Hash()); err == nil && isLast(r) {
		found = append(found, r)
	}
	if len(found) == 0 {
		return nil
	}
	return slices.MaxFunc(found, func(a, b *Record) int { return a.Lease.Obtained.Compare(b.Lease.Obtained) }).Lease
}

// Same returns the other records of r's network whose client looks the same to a server: the client identifier or,
// without one, the MAC address is equal. It leaves out sticky records and unreadable ones.
func (d *Store) Same(r *Record) ([]*Record, error) {
	key := r.Client.key()
	return d.recordsContaining(key, func(other *Record) bool {
		return other.Token != r.Token && other.State != Sticky && other.Network == r.Network &&
			other.Client.key() == key
	})
}

// recordsContaining returns the records whose files contain text and that the function pass accepts. After a boot, the
// keeper calls it for every record. So it decodes only the few files that contain text. It leaves out unreadable files.
func (d *Store) recordsContaining(text string, pass func(*Record) bool) ([]*Record, error) {
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
