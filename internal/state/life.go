package state

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/file"
)

// A NewLife is what Enter tells its caller when it begins an epoch.
type NewLife struct {
	Epoch Epoch

	// Previous is the epoch that is over. It is nil if none was recorded, or
	// its file was damaged: then pods of this very life may be running whose
	// records and reservations are lost.
	Previous *Epoch

	// Stale are the attachments of earlier lives. Their records are removed
	// when the callback has succeeded.
	Stale []*Attachment
}

// Enter takes the shared lock and sees to it that the directory belongs to the
// present life of the node, whose epoch it returns with the lock.
//
// If the epoch is missing, damaged or over, one process begins a new one under the
// exclusive lock, while all others wait: it calls begin, which may be nil, for what
// has to happen before the first allocation (rebuild reservations from the kernel,
// drop those of an earlier life), then removes the records of earlier lives and
// temporary files, and publishes the epoch last. If any of that fails the epoch is
// not published, so the next caller does it all again: begin has to be idempotent.
//
// An epoch of a newer version is an error that matches ErrVersion. For the rest
// Enter fails as Lock does. The caller must be in the node's own network namespace
// and, to begin an epoch, its PID namespace.
func (d *Dir) Enter(ctx context.Context, begin func(NewLife) error) (*Lock, Epoch, error) {
	l, err := d.Lock(ctx, Shared)
	if err != nil {
		return nil, Epoch{}, err
	}
	var epoch Epoch
	var found error
	err = l.Ensure(ctx,
		func() (bool, error) {
			epoch, found = d.epochOf(l.netns)
			return found == nil, ignoreLost(found)
		},
		func() error {
			if err := l.Clean(); err != nil {
				return err
			}
			var err error
			epoch, err = d.beginLife(epoch, found, begin)
			return err
		})
	if err != nil {
		return nil, Epoch{}, errors.Join(fmt.Errorf("enter %s: %w", d.path, err), l.Close())
	}
	return l, epoch, nil
}

// ignoreLost returns nil for the errors that a new epoch heals.
func ignoreLost(err error) error {
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, ErrStale) || errors.Is(err, ErrDamaged) {
		return nil
	}
	return err
}

// beginLife does what Enter promises. It runs under the exclusive lock; old and
// found are what Epoch returned under it.
func (d *Dir) beginLife(old Epoch, found error, begin func(NewLife) error) (Epoch, error) {
	epoch, err := d.newEpoch()
	if err != nil {
		return Epoch{}, fmt.Errorf("begin epoch: %w", err)
	}
	life := NewLife{Epoch: epoch}
	if errors.Is(found, ErrStale) {
		life.Previous = &old
	}
	if life.Stale, err = d.staleAttachments(life); err != nil {
		return Epoch{}, fmt.Errorf("begin epoch: %w", err)
	}
	if begin != nil {
		if err := begin(life); err != nil {
			return Epoch{}, fmt.Errorf("begin epoch: %w", err)
		}
	}
	if err := d.dropStale(life); err != nil {
		return Epoch{}, fmt.Errorf("begin epoch: drop records of earlier lives: %w", err)
	}
	// From here on others take the directory for this life's.
	if err := d.replaceFile(d.epochPath(), encode(epochVersion, epoch.fields)); err != nil {
		return Epoch{}, fmt.Errorf("begin epoch: %w", err)
	}
	return epoch, nil
}

// isStale tells whether a record with this token is of an earlier life. With an
// epoch known to be over every record is. Without, only another boot proves it: a
// record of this boot may belong to a pod that runs.
func (life *NewLife) isStale(token string) bool {
	if life.Previous != nil {
		return true
	}
	boot, _, ok := strings.Cut(token, tokenSeparator)
	return ok && boot != life.Epoch.Boot
}

// staleAttachments collects the attachments of earlier lives. Damaged records
// tell nothing, and are left out.
func (d *Dir) staleAttachments(life NewLife) ([]*Attachment, error) {
	networks, err := d.Networks()
	if err != nil {
		return nil, err
	}
	var stale []*Attachment
	for _, network := range networks {
		attachments, _, err := d.List(network)
		if err != nil {
			return nil, err
		}
		for _, a := range attachments {
			if life.isStale(a.Epoch) {
				stale = append(stale, a)
			}
		}
	}
	return stale, nil
}

// dropStale removes the records of earlier lives: everything, damaged or not, when
// an epoch is known to be over, else those whose token says so.
func (d *Dir) dropStale(life NewLife) error {
	errs := []error{d.dropStaleUplinks()}
	if life.Previous != nil {
		return errors.Join(append(errs, os.RemoveAll(d.attachmentsPath()), os.RemoveAll(d.networksPath()))...)
	}
	for _, a := range life.Stale {
		errs = append(errs, d.Remove(a.Network, a.Hash()))
	}
	networks, _, err := d.ListNetworks()
	errs = append(errs, err)
	for _, n := range networks {
		if life.isStale(n.Epoch) {
			path, err := d.networkPath(n.Name)
			errs = append(errs, err, file.Remove(path))
		}
	}
	return errors.Join(errs...)
}
