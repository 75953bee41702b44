package dhcpc

import (
	"context"
	"time"
)

// Clock tells the time and waits: a test has one of its own.
type Clock interface {
	Now() time.Time
	// Wait returns at a time, or with ctx's error as soon as ctx is done. The zero
	// time never comes.
	Wait(ctx context.Context, until time.Time) error
}

// SystemClock is the machine's clock. In a process the time that the machine sleeps does not count, as
// in Go's timers.
type SystemClock struct{}

// Now is time.Now.
func (SystemClock) Now() time.Time { return time.Now() }

// Wait waits for a time or for ctx.
func (SystemClock) Wait(ctx context.Context, until time.Time) error {
	if ctx == nil {
		return argument("no context")
	}
	if until.IsZero() {
		<-ctx.Done()
		return ctx.Err()
	}
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
