package lease

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lockorder"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// DefaultDir is the default directory of lease records.
const DefaultDir = "/var/lib/tombolo/leases"

// These are parts of the names of files in the directory. A hash is hexadecimal, so no record's lock has the name
// keeperLock.
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

// Open returns the directory at an absolute path. It makes no system call. The first lock or record creates the
// directory.
func Open(dir string) (*Store, error) {
	path, err := file.CleanDir(dir)
	if err != nil {
		return nil, fmt.Errorf("open lease directory: %w", err)
	}
	return &Store{path: path, Clock: kernelClock()}, nil
}

// Path returns the directory's cleaned path.
func (d *Store) Path() string { return d.path }

// private returns an error if users other than root and the caller may write to the directory. The keeper must trust
// the records: it enters the namespaces that they name, and changes these namespaces and the host's firewall.
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
	bad := &state.RecordError{Path: d.recordPath(hash), Hash: hash}
	r, err := state.ReadRecord(bad, d.fromDisk, func(r *Record) error {
		if r.Hash() != hash {
			return fmt.Errorf("%w: it is the record of network %s, container %s, interface %s, whose file is %s%s",
				file.ErrDamaged, r.Network, r.ContainerID, r.IfName, r.Hash(), recordSuffix)
		}
		return nil
	})
	return r, state.WithOperation(err, "load lease")
}

// Hashes returns the hashes of all records, sorted, without reading the records. A missing directory is no error.
func (d *Store) Hashes() ([]string, error) {
	hashes, _, err := state.RecordNames(d.path, ident.IsHash)
	return hashes, state.WithOperation(err, "list lease records")
}

// List reads all records, sorted by hash. For each record that cannot be used it returns a *state.RecordError. The
// error is set only if the directory cannot be read.
func (d *Store) List() ([]*Record, []*state.RecordError, error) {
	hashes, err := d.Hashes()
	found, bad := state.LoadAll(hashes, d.Load)
	return found, bad, err
}

// Recall returns the last lease of the client in the record next, or nil if there is none. The last lease is in a
// record of the state Sticky, or in a record of the state Bound from an earlier boot. For a sticky client Recall
// searches the records of all containers. For any other client it reads only the record with next's hash.
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

// Same returns the other records of r's network whose client looks the same to a server. Such a client has an equal
// client identifier or, without one, an equal MAC. Same leaves out unreadable records and records in the state Sticky.
func (d *Store) Same(r *Record) ([]*Record, error) {
	key := r.Client.key()
	return d.recordsContaining(key, func(other *Record) bool {
		return other.Token != r.Token && other.State != Sticky && other.Network == r.Network &&
			other.Client.key() == key
	})
}

// recordsContaining returns the records whose files contain text, and for which pass returns true. It leaves out
// unreadable files. After a boot, the keeper calls it for every record, so it decodes only the few files that contain
// text.
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

// ErrSuperseded means that a later ADD, or another caller of Create, has replaced the record.
var ErrSuperseded = errors.New("replaced by a later ADD")

// LockedRecord is the lock of one record, held until Close or the end of the process. Only one goroutine may use it at
// a time. In the order of locks it comes before the lock of a state directory: an ADD holds it while it waits for a
// DHCP server.
type LockedRecord struct {
	dir   *Store
	hash  string
	fd    int
	order *lockorder.Acquisition
}

// Lock takes the lock of a record, which need not exist. If the lock does not become free before ctx ends, the error
// matches file.ErrLocked and ctx's cause. If ctx has ended already, Lock tries once.
func (d *Store) Lock(ctx context.Context, hash string) (*LockedRecord, error) {
	return d.lock(ctx, hash, lockorder.Lease)
}

// lock waits for the lock of a record. rank is the lock's place in the order of locks.
func (d *Store) lock(ctx context.Context, hash string, rank lockorder.Rank) (*LockedRecord, error) {
	order := lockorder.Wait(rank)
	fd, err := -1, ident.CheckHash(hash)
	if err == nil {
		err = file.Await(ctx, d.lockPath(hash), func() (_ bool, err error) {
			fd, err = file.TryLock(d.lockPath(hash), unix.O_RDWR|unix.O_CREAT)
			return fd >= 0, err
		})
	}

	if err != nil {
		order.Release()
		return nil, fmt.Errorf("lock lease record %s: %w", hash, err)
	}
	return &LockedRecord{dir: d, hash: hash, fd: fd, order: order}, nil
}

// Load reads the record. Nobody else changes the record while the lock is held.
func (h *LockedRecord) Load() (*Record, error) { return h.dir.Load(h.hash) }

// Create writes a record with a new token, and replaces any existing one. If the state is Adding, Create does not
// wait for the disk, since nothing needs such a record after a power cut.
func (h *LockedRecord) Create(r *Record) error {
	r.Token = fmt.Sprintf("%016x", rand.Uint64())
	return state.WithOperation(h.put(r), "create lease record")
}

// Replace overwrites the existing record, which must have the token of r. If there is no record, the error matches
// os.ErrNotExist. If the existing record has another token, the error matches ErrSuperseded. In both cases Replace
// writes nothing.
func (h *LockedRecord) Replace(r *Record) error {
	err := h.Same(r)
	if err == nil {
		err = h.put(r)
	}
	return state.WithOperation(err, "replace lease record")
}

// Same returns an error unless the existing record has r's token. The error matches os.ErrNotExist if there is no
// record, and ErrSuperseded if the record has another token.
func (h *LockedRecord) Same(r *Record) error {
	now, err := h.dir.Load(h.hash)
	if err != nil {
		return err
	}
	if now.Token != r.Token {
		return fmt.Errorf("%s: %w", h.dir.recordPath(h.hash), ErrSuperseded)
	}
	return nil
}

// put writes a record to its file. It waits for the disk unless the state is Adding.
func (h *LockedRecord) put(r *Record) error {
	if h.fd < 0 {
		return &os.PathError{Op: "write", Path: h.dir.recordPath(h.hash), Err: os.ErrClosed}
	}

	data, err := h.dir.toDisk(r)
	if err != nil {
		return err
	}

	if hash := r.Hash(); hash != h.hash {
		return fmt.Errorf("%s is the record of another lease than %s", h.dir.recordPath(h.hash), hash)
	}

	temp, path := h.dir.tempPath(h.hash), h.dir.recordPath(h.hash)
	if r.State == Adding {
		return file.Replace(temp, path, data)
	}

	lockorder.Slow("the disk")
	return file.ReplaceDurably(temp, path, data)
}

// Remove removes the record. A missing record is no error. Remove does not wait for the disk. If a power cut brings
// the record back, the record belongs to an earlier boot, and its lease is released once more.
func (h *LockedRecord) Remove() error {
	err := errors.Join(file.Remove(h.dir.recordPath(h.hash)), file.Remove(h.dir.tempPath(h.hash)))
	return state.WithOperation(err, "remove lease record")
}

// Remember turns the record of a pod that is gone into a record of the state Sticky, which Recall finds. It removes the
// original. The caller must not use r afterwards.
func (h *LockedRecord) Remember(ctx context.Context, r *Record) error {
	r.State = Sticky
	r.NetNS, r.NetNSCookie, r.HostIf, r.Error = "", 0, "", ""
	r.Applied, r.Policy, r.Six = Applied{}, Policy{}, nil
	sticky, err := h.dir.lock(ctx, r.Hash(), lockorder.Remembered)
	if err == nil {
		err = errors.Join(sticky.Create(r), sticky.Close())
	}

	if err != nil {
		return fmt.Errorf("remember lease: %w", err)
	}
	return h.Remove()
}

// Close releases the lock. If there is no record, Close also removes the lock's file. A second Close does nothing.
func (h *LockedRecord) Close() error {
	if h == nil || h.fd < 0 {
		return nil
	}

	var err error
	if unix.Access(h.dir.recordPath(h.hash), unix.F_OK) == unix.ENOENT {
		err = file.Remove(h.dir.lockPath(h.hash))
	}

	fd := h.fd
	h.fd = -1
	h.order.Release()
	return errors.Join(err, file.Unlock(fd))
}

// The keeper's lock and heartbeat are open file description locks on one file. They end with the process, even if it is
// killed, and a heartbeat writes nothing to disk. The keeper locks the byte at livesAt as long as it runs. For each
// heartbeat it locks the byte at offset beatsAt plus the time in milliseconds, and then unlocks the byte of the
// previous heartbeat. A process that asks the kernel for a conflicting lock (F_OFD_GETLK) learns the offset of that
// byte. /proc/locks shows both locks.
const (
	livesAt = 0
	beatsAt = 1 << 32 // the byte for time 0; tests use times before the boot
)

const (
	// Beat is the interval between the keeper's heartbeats.
	Beat = 5 * time.Second

	// Silence is the time without a heartbeat after which the keeper counts as stopped or stuck.
	Silence = 4 * Beat
)

var (
	// ErrNoKeeper means that no keeper runs for the lease directory.
	ErrNoKeeper = errors.New("no keeper runs")

	// ErrSilent means that the keeper's last heartbeat is older than Silence: the keeper is stopped (SIGSTOP, a
	// debugger, a frozen cgroup) or stuck.
	ErrSilent = errors.New("the keeper is stopped or stuck")

	// ErrOtherKeeper means that another keeper runs for the lease directory.
	ErrOtherKeeper = errors.New("another keeper has the lease directory")
)

// CheckKeeper returns an error with advice for an operator if no keeper renews the directory's leases. The error
// matches ErrNoKeeper or ErrSilent, or comes from a system call.
func (d *Store) CheckKeeper() error {
	runs, since, err := d.heartbeat()
	switch {
	case err != nil:
		return fmt.Errorf("look for the lease keeper: %w", err)
	case !runs:
		return fmt.Errorf("%w for the leases of %s: start it (systemctl start tombolod, or tombolod --leases %s)",
			ErrNoKeeper, d.path, d.path)
	case since > Silence:
		return fmt.Errorf("%w: no heartbeat for %v from the one for %s: restart it (systemctl restart tombolod)",
			ErrSilent, since.Round(time.Second), d.path)
	}

	return nil
}

// heartbeat asks the kernel whether a keeper runs, and how long ago its last heartbeat was. since is 0 before the
// keeper's first heartbeat.
func (d *Store) heartbeat() (runs bool, since time.Duration, _ error) {
	fd, err := file.Open(d.path+"/"+keeperLock, unix.O_RDWR)
	if err != nil {
		return false, 0, state.Ignore(err, os.ErrNotExist)
	}
	defer unix.Close(fd)
	lives, err := file.LockRange(fd, unix.F_OFD_GETLK, unix.F_WRLCK, livesAt, 1)
	if err != nil || lives.Type == unix.F_UNLCK {
		return false, 0, err
	}

	beats, err := file.LockRange(fd, unix.F_OFD_GETLK, unix.F_WRLCK, livesAt+1, 0)
	if err != nil || beats.Type == unix.F_UNLCK {
		return true, 0, err // the keeper has only just started
	}

	return true, max(uptime()-time.Duration(beats.Start-beatsAt)*time.Millisecond, 0), nil
}

// Heartbeat is the keeper's lock on a lease directory. While the keeper calls Beat regularly, other processes see that
// it works.
type Heartbeat struct {
	dir  *Store
	fd   int
	beat int64 // the locked byte of the last heartbeat, 0 before the first
}

// Keep makes the caller the keeper of the directory, until Close or the end of the process. If another keeper runs, the
// error matches ErrOtherKeeper. It is also an error if other users may write to the directory.
func (d *Store) Keep() (*Heartbeat, error) {
	fd, err := file.Create(d.path+"/"+keeperLock, unix.O_RDWR)
	if err != nil {
		return nil, fmt.Errorf("keep leases: %w", err)
	}

	_, err = file.LockRange(fd, unix.F_OFD_SETLK, unix.F_WRLCK, livesAt, 1)
	switch {
	case errors.Is(err, unix.EAGAIN):
		err = fmt.Errorf("%w: %s (`fuser -v %s/%s` shows which)", ErrOtherKeeper, d.path, d.path, keeperLock)
	case err == nil:
		err = d.private()
	}

	if err != nil {
		return nil, errors.Join(fmt.Errorf("keep leases: %w", err), unix.Close(fd))
	}

	p := &Heartbeat{dir: d, fd: fd}
	if err := p.Beat(); err != nil {
		return nil, errors.Join(err, p.Close())
	}

	return p, nil
}

// Beat records a heartbeat. It fails if the lock's file was removed, since no other process would see the
// heartbeat. The keeper should then start again.
func (p *Heartbeat) Beat() error {
	var st unix.Stat_t
	if err := unix.Fstat(p.fd, &st); err != nil || st.Nlink == 0 {
		return fmt.Errorf("keeper's heartbeat: %s/%s was removed: %w", p.dir.path, keeperLock, os.ErrNotExist)
	}
	return p.beatAt(uptime())
}

// beatAt locks the byte for the time now, and unlocks the byte of the previous heartbeat.
func (p *Heartbeat) beatAt(now time.Duration) error {
	beat := beatsAt + now.Milliseconds()
	if beat == p.beat {
		return nil
	}

	_, err := file.LockRange(p.fd, unix.F_OFD_SETLK, unix.F_WRLCK, beat, 1)
	if err == nil && p.beat != 0 {
		_, err = file.LockRange(p.fd, unix.F_OFD_SETLK, unix.F_UNLCK, p.beat, 1)
	}

	if err == nil {
		p.beat = beat
	}
	return state.WithOperation(err, "keeper's heartbeat")
}

// Close ends the caller's role as keeper. It unlocks explicitly, since a child process that is just being started may
// have the file descriptor too. A second Close does nothing.
func (p *Heartbeat) Close() error {
	if p.fd < 0 {
		return nil
	}
	_, err := file.LockRange(p.fd, unix.F_OFD_SETLK, unix.F_UNLCK, 0, 0)
	err = errors.Join(err, unix.Close(p.fd))
	p.fd = -1
	return err
}

// uptime returns CLOCK_MONOTONIC. That clock stops while the machine is suspended, when no keeper can record a
// heartbeat.
func uptime() time.Duration { return state.Since(unix.CLOCK_MONOTONIC) }
