package network

import (
	"context"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/chained"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
)

func removeLimits(ctx context.Context, target bandwidth.Target) error {
	conn, err := bandwidth.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	// The port's own go with it.
	target.Port = ""
	return conn.Remove(ctx, target)
}

// shape gives a pod the limits that were asked for. It gives those that the kernel enforces,
// and what to shape by; limits of nothing are none.
func (a *adding) shape(ctx context.Context, rec *state.Attachment, att *bridge.Attachment) (effective bandwidth.Shape, ifb string, _ error) {
	asked := a.pod.Limits
	if asked.IsZero() {
		return bandwidth.Shape{}, "", nil
	}
	effective, err := chained.Effective(a.s, asked, att.MTU)
	if err != nil {
		return bandwidth.Shape{}, "", err
	}
	target := recorded.Target(rec)
	target.PortIndex = att.Index
	conn, err := bandwidth.Dial(nil)
	if err != nil {
		return bandwidth.Shape{}, "", err
	}
	defer conn.Close()
	a.back.push(func(ctx context.Context) error { return removeLimits(ctx, target) })
	if effective.Egress.Rate > 0 {
		ifb = target.IFB
	}
	_, err = conn.Ensure(ctx, target, effective)
	return effective, ifb, err
}
