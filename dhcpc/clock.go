package dhcpc

import (
	"context"
	"time"
)

// clock tells the time and waits: tests have one of their own.
type clock interface {
	Now() time.Time
	// Wait returns at a time, or with ctx's error as soon as ctx is done. The zero
	// time never comes.
	Wait(ctx context.Context, until time.Time) error
}

type systemClock struct{}

func (systemClock) Now() time.Time { return time.Now() }

func (systemClock) Wait(ctx context.Context, until time.Time) error {
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
