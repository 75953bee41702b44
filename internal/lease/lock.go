package lease

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lockorder"
)

// ErrSuperseded means that a later ADD has replaced the record.
var ErrSuperseded = errors.New("replaced by a later ADD")

// LockedRecord is the lock of one record, until Close or the end of the process. Only one goroutine may use it at a
// time. In the order of locks it comes before the lock of a state directory: an ADD holds it while it waits for a DHCP
// server.
type LockedRecord struct {
	dir   *Store
	hash  string
	fd    int
	order *lockorder.Acquisition
}

// Lock takes the lock of a record, which need not exist. If another process holds the lock until ctx ends, the error
// matches file.ErrLocked and ctx's error.
func (d *Store) Lock(ctx context.Context, hash string) (*LockedRecord, error) {
	return d.lock(ctx, hash, lockorder.Lease)
}

// lock waits for the lock of a record. rank is the lock's place in the order of locks.
func (d *Store) lock(ctx context.Context, hash string, rank lockorder.Rank) (h *LockedRecord, err error) {
	order := lockorder.Wait(rank)
	err = file.Await(ctx, d.lockPath(hash), func() (bool, error) {
		h, err = d.tryLock(hash)
		return h != nil, err
	})
	if err != nil {
		order.Release()
		return nil, fmt.Errorf("lock lease record %s: %w", hash, err)
	}

	h.order = order
	return h, nil
}

// TryLock takes the lock of a record without waiting. It returns nil without an error if another process has the
// lock.
func (d *Store) TryLock(hash string) (*LockedRecord, error) {
	h, err := d.tryLock(hash)
	if err != nil {
		return nil, fmt.Errorf("lock lease record %s: %w", hash, err)
	}
	if h != nil {
		h.order = lockorder.Tried(lockorder.Lease)
	}
	return h, nil
}

func (d *Store) tryLock(hash string) (*LockedRecord, error) {
	if err := ident.CheckHash(hash); err != nil {
		return nil, err
	}
	fd, err := file.TryLock(d.lockPath(hash), unix.O_RDWR|unix.O_CREAT)
	if err != nil || fd < 0 {
		return nil, err
	}
	return &LockedRecord{dir: d, hash: hash, fd: fd}, nil
}

// Hash returns the record's hash.
func (h *LockedRecord) Hash() string { return h.hash }

// Load reads the record. No other process can change the record while the lock is held.
func (h *LockedRecord) Load() (*Record, error) { return h.dir.Load(h.hash) }

// Create writes a record with a new token, and replaces any existing one. If the state is Adding, Create does not
// wait for the disk, since after a power cut such a record has no owner.
func (h *LockedRecord) Create(r *Record) error {
	r.Token = fmt.Sprintf("%016x", rand.Uint64())
	if err := h.put(r); err != nil {
		return fmt.Errorf("create lease record: %w", err)
	}
	return nil
}

// Replace writes a record over the existing one with the same token. If there is no record, the error matches
// os.ErrNotExist. If the existing record has another token, the error matches ErrSuperseded. In both cases Replace
// writes nothing.
func (h *LockedRecord) Replace(r *Record) error {
	if err := h.Same(r); err != nil {
		return fmt.Errorf("replace lease record: %w", err)
	}
	if err := h.put(r); err != nil {
		return fmt.Errorf("replace lease record: %w", err)
	}
	return nil
}

// Same returns an error if the existing record does not have r's token: the same errors as Replace.
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

	out, err := h.dir.toDisk(r)
	if err != nil {
		return err
	}

	data, err := encode(out)
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
	if err := errors.Join(file.Remove(h.dir.recordPath(h.hash)), file.Remove(h.dir.tempPath(h.hash))); err != nil {
		return fmt.Errorf("remove lease record: %w", err)
	}
	return nil
}

// Remember turns the record of a pod that is gone into a sticky one, which Recall finds, and removes the original.
// The caller must not use r afterwards.
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
	if h.fd < 0 {
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
