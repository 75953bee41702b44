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

// ErrSuperseded says that a record has been replaced by that of a later ADD.
var ErrSuperseded = errors.New("replaced by a later ADD")

// Held is the lock of one record, until Close or the end of the process. It is not
// safe for use by several goroutines at once. It comes before the lock of a state
// directory: an ADD has it for as long as its server takes.
type Held struct {
	dir   *Dir
	hash  string
	fd    int
	order *lockorder.Held
}

// Lock takes the lock of a record, which need not exist. It waits until ctx ends, and
// then its error matches file.ErrLocked and ctx's.
func (d *Dir) Lock(ctx context.Context, hash string) (*Held, error) {
	return d.lock(ctx, hash, lockorder.Lease)
}

func (d *Dir) lock(ctx context.Context, hash string, rank lockorder.Rank) (h *Held, err error) {
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

// TryLock is Lock that does not wait: both results are nil where another holds the
// lock.
func (d *Dir) TryLock(hash string) (*Held, error) {
	h, err := d.tryLock(hash)
	if err != nil {
		return nil, fmt.Errorf("lock lease record %s: %w", hash, err)
	}
	if h != nil {
		h.order = lockorder.Tried(lockorder.Lease)
	}
	return h, nil
}

func (d *Dir) tryLock(hash string) (*Held, error) {
	if err := ident.CheckHash(hash); err != nil {
		return nil, err
	}
	fd, err := file.TryLock(d.lockPath(hash), unix.O_RDWR|unix.O_CREAT)
	if err != nil || fd < 0 {
		return nil, err
	}
	return &Held{dir: d, hash: hash, fd: fd}, nil
}

// Hash returns the record's hash.
func (h *Held) Hash() string { return h.hash }

// Load is Dir.Load, whose answer stays true as long as the lock is held.
func (h *Held) Load() (*Record, error) { return h.dir.Load(h.hash) }

// Create writes a record with a new token, in the place of any that there is. It does not wait for the disk where
// the record says Adding: after a power cut such a record has no owner.
func (h *Held) Create(r *Record) error {
	r.Token = fmt.Sprintf("%016x", rand.Uint64())
	if err := h.put(r); err != nil {
		return fmt.Errorf("create lease record: %w", err)
	}
	return nil
}

// Replace writes a record over the one of the same token. If that is gone the error
// matches os.ErrNotExist, and if it is another's, ErrSuperseded; then nothing is
// written.
func (h *Held) Replace(r *Record) error {
	if err := h.Same(r); err != nil {
		return fmt.Errorf("replace lease record: %w", err)
	}
	if err := h.put(r); err != nil {
		return fmt.Errorf("replace lease record: %w", err)
	}
	return nil
}

// Same says whether the record that there is now has r's token: its error is the
// one of Replace.
func (h *Held) Same(r *Record) error {
	now, err := h.dir.Load(h.hash)
	if err != nil {
		return err
	}
	if now.Token != r.Token {
		return fmt.Errorf("%s: %w", h.dir.recordPath(h.hash), ErrSuperseded)
	}
	return nil
}

func (h *Held) put(r *Record) error {
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

// Remove removes the record; that it is gone already is success. It does not wait for
// the disk: a record that a power cut brings back is of an earlier boot, and its lease
// is released once more.
func (h *Held) Remove() error {
	if err := errors.Join(file.Remove(h.dir.recordPath(h.hash)), file.Remove(h.dir.tempPath(h.hash))); err != nil {
		return fmt.Errorf("remove lease record: %w", err)
	}
	return nil
}

// Remember writes the record of a pod that is gone as a Sticky one, under the name that
// Recall looks for, and removes it. r must not be used afterwards.
func (h *Held) Remember(ctx context.Context, r *Record) error {
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

// Close gives the lock up. Its file goes with the record. Closing twice does nothing.
func (h *Held) Close() error {
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
