package state

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// Enter takes the shared lock, and returns it together with the node's present epoch.
//
// If the recorded epoch is missing, damaged or over, one process begins a new epoch under the exclusive lock, while
// all others wait. It deletes the records of an epoch that is over, and writes the new epoch last. If a step fails,
// the next caller begins again. If no epoch was recorded, all records stay, and GC later removes the attachments of
// pods that are gone.
//
// If a newer version wrote the epoch, the error matches ErrVersion. Otherwise Enter fails as Lock does. The caller
// must be in the node's own network namespace and, to begin an epoch, in its PID namespace.
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

// ignoreLost returns nil for the errors that beginning a new epoch resolves, and any other err unchanged.
func ignoreLost(err error) error {
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, ErrStale) || errors.Is(err, ErrDamaged) {
		return nil
	}
	return err
}

// beginEpoch writes a new epoch. If the previous epoch is stale, beginEpoch first deletes its records. The caller
// holds the exclusive lock.
func (d *Dir) beginEpoch(stale bool) (Epoch, error) {
	epoch, err := d.newEpoch()
	if err != nil {
		return Epoch{}, fmt.Errorf("begin epoch: %w", err)
	}

	if stale { // records of takeovers name their own epoch
		err = errors.Join(os.RemoveAll(d.attachmentsPath()), os.RemoveAll(d.networksPath()))
	}

	if err != nil {
		return Epoch{}, fmt.Errorf("begin epoch: drop records of earlier epochs: %w", err)
	}

	// Write the epoch last, since other processes regard the directory as usable as soon as it has the new epoch.
	if err := d.replaceFile(d.epochPath(), Encode(&epoch.Version, &epoch)); err != nil {
		return Epoch{}, fmt.Errorf("begin epoch: %w", err)
	}

	return epoch, nil
}
