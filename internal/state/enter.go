package state

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// EpochStart is what Enter tells its caller when it begins an epoch.
type EpochStart struct {
	Epoch Epoch

	// Previous is the epoch that is over. It is nil if none was recorded, or
	// its file was damaged: then pods of this very epoch may be running whose
	// records and reservations are lost.
	Previous *Epoch

	// Stale are the attachments of the previous epoch. Their records are removed
	// when the callback has succeeded. Where no epoch was recorded, all records stay: of pods that are
	// gone, GC knows.
	Stale []*Attachment
}

// Enter takes the shared lock and sees to it that the directory belongs to the
// present epoch, which it returns with the lock.
//
// If the epoch is missing, damaged or over, one process begins a new one under the
// exclusive lock, while all others wait: it calls begin, which may be nil, for what
// has to happen before the first allocation (rebuild reservations from the kernel,
// drop those of an earlier epoch), then removes the records of earlier epochs, and publishes the epoch last. If any of that fails the epoch is
// not published, so the next caller does it all again: begin has to be idempotent.
//
// An epoch of a newer version is an error that matches ErrVersion. For the rest
// Enter fails as Lock does. The caller must be in the node's own network namespace
// and, to begin an epoch, its PID namespace.
func (d *Dir) Enter(ctx context.Context, begin func(EpochStart) error) (*Lock, Epoch, error) {
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
			var err error
			epoch, err = d.beginEpoch(epoch, found, begin)
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

// beginEpoch does what Enter promises. It runs under the exclusive lock; old and
// found are what Epoch returned under it.
func (d *Dir) beginEpoch(old Epoch, found error, begin func(EpochStart) error) (Epoch, error) {
	epoch, err := d.newEpoch()
	if err != nil {
		return Epoch{}, fmt.Errorf("begin epoch: %w", err)
	}
	start := EpochStart{Epoch: epoch}
	if errors.Is(found, ErrStale) {
		start.Previous = &old
		if start.Stale, err = d.allAttachments(); err != nil {
			return Epoch{}, fmt.Errorf("begin epoch: %w", err)
		}
	}
	if begin != nil {
		if err := begin(start); err != nil {
			return Epoch{}, fmt.Errorf("begin epoch: %w", err)
		}
	}
	err = d.dropStaleUplinks()
	if start.Previous != nil {
		err = errors.Join(err, os.RemoveAll(d.attachmentsPath()), os.RemoveAll(d.networksPath()))
	}
	if err != nil {
		return Epoch{}, fmt.Errorf("begin epoch: drop records of earlier epochs: %w", err)
	}
	// From here on others take the directory for those of this epoch.
	if err := d.replaceFile(d.epochPath(), Encode(&epoch.Version, &epoch)); err != nil {
		return Epoch{}, fmt.Errorf("begin epoch: %w", err)
	}
	return epoch, nil
}

// allAttachments collects the attachments that are on record. Damaged records tell nothing, and are
// left out.
func (d *Dir) allAttachments() ([]*Attachment, error) {
	networks, err := d.Networks()
	if err != nil {
		return nil, err
	}
	var all []*Attachment
	for _, network := range networks {
		attachments, _, err := d.List(network)
		if err != nil {
			return nil, err
		}
		all = append(all, attachments...)
	}
	return all, nil
}
