package cni

import (
	"context"
	"errors"
	"testing"
	"time"
)

func TestDeadlineThatIsFarStopsNothing(t *testing.T) {
	t.Parallel()
	ctx := withDeadline(time.Hour)
	defer ctx.cancel()
	if err := ctx.Err(); err != nil {
		t.Errorf("before anybody waits: %v", err)
	}
	select {
	case <-ctx.Done():
		t.Error("it is done")
	default:
	}
	if err := ctx.Err(); err != nil {
		t.Errorf("with somebody waiting: %v", err)
	}
	at, ok := ctx.Deadline()
	if !ok || time.Until(at) > time.Hour {
		t.Errorf("deadline %v, %t", at, ok)
	}
	ctx.cancel()
	<-ctx.Done()
	if !errors.Is(ctx.Err(), context.Canceled) {
		t.Errorf("after cancel: %v", ctx.Err())
	}
}

func TestDeadlineThatIsPastStopsEverything(t *testing.T) {
	t.Parallel()
	ctx := withDeadline(-time.Second)
	defer ctx.cancel()
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		t.Errorf("before anybody waits: %v", ctx.Err())
	}
	<-ctx.Done()
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		t.Errorf("with somebody waiting: %v", ctx.Err())
	}
}

// A context that is derived from it ends with it.
func TestDeadlineIsPassedOn(t *testing.T) {
	t.Parallel()
	parent := withDeadline(-time.Second)
	defer parent.cancel()
	child, cancel := context.WithTimeout(parent, time.Hour)
	defer cancel()
	<-child.Done()
	if !errors.Is(child.Err(), context.DeadlineExceeded) {
		t.Errorf("child: %v", child.Err())
	}
}
