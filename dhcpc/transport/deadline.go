package transport

import (
	"context"
	"time"
)

type deadliner interface{ SetReadDeadline(t time.Time) error }

// deadline bounds what is read from a connection by a time and by a context. The
// function that it returns ends that, and waits until it has.
func deadline(ctx context.Context, conn deadliner, until time.Time) (func(), error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := conn.SetReadDeadline(until); err != nil {
		return nil, err
	}
	if ctx.Done() == nil {
		return func() {}, nil
	}
	fired := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(fired)
		_ = conn.SetReadDeadline(time.Unix(1, 0)) // long past: every reader stops
	})
	return func() {
		if !stop() {
			<-fired // else it could cut the next read short
		}
	}, nil
}

// orDone is the context's error where that is why reading ended.
func orDone(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}
