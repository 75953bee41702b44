package cni

import (
	"context"
	"sync"
	"time"
)

// lazyDeadline is a context with a deadline that starts its timer when somebody
// waits for it. In most calls nobody does: they ask Err between two requests to
// the kernel, and a timer would set up the runtime's poller, with a thread of its
// own, for nothing.
type lazyDeadline struct {
	context.Context // Background: values, none
	at              time.Time

	mu     sync.Mutex
	waited context.Context // once Done has been called
	stop   context.CancelFunc
}

func withDeadline(after time.Duration) *lazyDeadline {
	return &lazyDeadline{Context: context.Background(), at: time.Now().Add(after)}
}

// Deadline implements context.Context.
func (d *lazyDeadline) Deadline() (time.Time, bool) { return d.at, true }

// Done implements context.Context.
func (d *lazyDeadline) Done() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.waited == nil {
		d.waited, d.stop = context.WithDeadline(context.Background(), d.at)
	}
	return d.waited.Done()
}

// Err implements context.Context.
func (d *lazyDeadline) Err() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.waited != nil {
		return d.waited.Err()
	}
	if !time.Now().Before(d.at) {
		return context.DeadlineExceeded
	}
	return nil
}

// cancel gives the timer back, if there is one.
func (d *lazyDeadline) cancel() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.stop != nil {
		d.stop()
	}
}
