package network

import (
	"context"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/chained"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
)

func (a *adding) removeLimits(ctx context.Context, target bandwidth.Target) error {
	// The port's own go with it.
	target.Port = ""
	return bandwidth.On(a.s.Links.Socket()).Remove(ctx, target)
}

// limited are the limits of a pod as the kernel enforces them, and the ifb that they go by.
type limited struct {
	shape bandwidth.Shape
	ifb   string
}

// shape gives a pod's port the limits that were asked for, if any. That is done before the port
// comes up, when its index is known (bridge.Port's BeforeUp), unless the pod gets addresses later.
func (a *adding) shape(ctx context.Context, rec *state.Attachment, index, mtu int) error {
	if !a.pod.Limits.IsZero() {
		if err := a.limit(ctx, rec, index, mtu); err != nil {
			return err
		}
	}
	return a.node.step("bandwidth")
}

func (a *adding) limit(ctx context.Context, rec *state.Attachment, index, mtu int) error {
	target := recorded.Target(rec)
	target.PortIndex, target.MTU = index, mtu
	a.back.push(func(ctx context.Context) error { return a.removeLimits(ctx, target) })
	var err error
	if a.limited.shape.IsZero() { // else this is a second try, and the operator was told
		if a.limited.shape, err = chained.Effective(a.s, a.pod.Limits, mtu); err != nil {
			return err
		}
	}
	if a.limited.shape.Egress.Rate > 0 {
		a.limited.ifb = target.IFB
	}
	_, err = bandwidth.On(a.s.Links.Socket()).Ensure(ctx, target, a.limited.shape)
	return err
}
