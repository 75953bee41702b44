package session

import (
	"context"
	"time"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
)

// ErrDeleted is how an ADD ends whose record was removed.
func ErrDeleted() error {
	return fail.Errorf(fail.ErrTryAgain, "the attachment was deleted, or collected as garbage, while it was being made")
}

// Wanted is the error with which an ADD ends whose record was removed. It asks before it
// makes, or takes away, what has the same name for the next ADD of the attachment. One that is done
// is wanted: nil.
func Wanted(record *state.Pending) error {
	if record == nil {
		return nil
	}
	gone, err := record.Gone()
	if gone {
		return ErrDeleted()
	}
	return err
}

// lookEvery is how often an ADD that waits for others looks whether it is wanted still.
const lookEvery = 100 * time.Millisecond

// WhileWanted does something that may take long, and ends it when the attachment's record
// is removed: the call that removes it wants the ADD to end, and may wait for a lock that it has.
func WhileWanted(ctx context.Context, record *state.Pending, do func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	deleted := ErrDeleted()
	done, watched := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		tick := time.NewTicker(lookEvery)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
			}
			if gone, err := record.Gone(); gone && err == nil {
				cancel(deleted)
				return
			}
		}
	}()
	err := do(ctx)
	close(done)
	<-watched
	if err != nil && context.Cause(ctx) == deleted {
		return deleted
	}
	return err
}
