package network

import (
	"context"

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

// limited are the limits of a pod as the kernel enforces them, and the ifb that they go by.
type limited struct {
	shape bandwidth.Shape
	ifb   string
}

// shape gives a pod's port, by its index, the limits that were asked for, which are not none.
// It is called before the port is up: see bridge.Port.BeforeUp.
func (a *adding) shape(ctx context.Context, rec *state.Attachment, index, mtu int) error {
	target := recorded.Target(rec)
	target.PortIndex, target.MTU = index, mtu
	conn, err := bandwidth.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	a.back.push(func(ctx context.Context) error { return removeLimits(ctx, target) })
	if a.limited.shape.IsZero() { // else this is a second try, and the operator was told
		if a.limited.shape, err = chained.Effective(a.s, a.pod.Limits, mtu); err != nil {
			return err
		}
	}
	if a.limited.shape.Egress.Rate > 0 {
		a.limited.ifb = target.IFB
	}
	if _, err := conn.Ensure(ctx, target, a.limited.shape); err != nil {
		return err
	}
	return a.node.step("bandwidth")
}
