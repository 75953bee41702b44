package state

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// Enter takes the shared lock and sees to it that the directory belongs to the
// present epoch, which it returns with the lock.
//
// If the epoch is missing, damaged or over, one process begins a new one under the
// exclusive lock, while all others wait: it removes the records of an epoch that is over, and publishes the
// new one last. If any of that fails, the next caller does it all again. Where no epoch was recorded, all records
// stay: of pods that are gone, GC knows.
//
// An epoch of a newer version is an error that matches ErrVersion. For the rest
// Enter fails as Lock does. The caller must be in the node's own network namespace
// and, to begin an epoch, its PID namespace.
func (d *Dir) Enter(ctx context.Context) (*Lock, Epoch, error) {
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
			epoch, err = d.beginEpoch(errors.Is(found, ErrStale))
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

// beginEpoch does what Enter promises, under the exclusive lock. stale says that an epoch is over.
func (d *Dir) beginEpoch(stale bool) (Epoch, error) {
	epoch, err := d.newEpoch()
	if err != nil {
		return Epoch{}, fmt.Errorf("begin epoch: %w", err)
	}
	if stale { // records of takeovers say themselves of which epoch they are
		err = errors.Join(os.RemoveAll(d.attachmentsPath()), os.RemoveAll(d.networksPath()))
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
