package keeper

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/lease"
)

// A pod's interface that another program made gets its first address and routes from that program,
// which fails if they are there already, and routes from others in its list too. So the keeper
// leaves it alone until it has its address. Then the keeper has the kernel end the address with the
// lease, and changes what another lease changes. Nothing of the host's goes by such an address.

// While the address is waited for: how often it is looked for at first, for how long, and then.
const (
	awaitOften  = time.Second
	awaitAtMost = time.Minute
)

// ready says whether the pod's interface may be put right.
func (v *visit) ready(p pod) (bool, error) {
	if !v.r.Apart || v.m.seen || v.r.State != lease.Bound {
		return true, nil
	}
	want := v.r.Policy.Apply(v.r.Lease)
	if !v.r.Applied.Without(want).Empty() {
		return true, nil // a keeper was killed while it changed the address
	}
	lacking, err := p.(confirmed).lacks(want)
	if err == nil && lacking {
		pause := awaitOften
		if now().Sub(v.r.Created) > awaitAtMost {
			pause = awaitAtMost
		}
		v.m.look = now().Add(pause)
	}
	v.m.seen = err == nil && !lacking
	return v.m.seen, err
}

// toGive is what is to be set of what the pod is to have. Of an interface that is Apart, routes that
// it was given are others' to change.
func (v *visit) toGive(p pod, want lease.Applied) (lease.Applied, error) {
	if !v.r.Apart || v.r.State != lease.Bound || !want.Without(v.r.Applied).Empty() || !v.r.Applied.Without(want).Empty() {
		return want, nil
	}
	lacking, err := p.(confirmed).lacks(want)
	switch {
	case err != nil:
		return lease.Applied{}, err
	case !lacking:
		return lease.Applied{Addresses: want.Addresses}, nil
	case v.m.seen:
		return want, nil // with the address, the kernel took routes
	}
	return lease.Applied{}, nil
}

// unlessLeft says that a pod is gone whose namespace is not found, once its lease has ended: until
// then it may be that the keeper does not see the mounts of the runtime.
func unlessLeft(r *lease.Record, cause error) error {
	if r.State == lease.Bound && r.Lease.Left(now()) != 0 {
		return fmt.Errorf("%w: does the keeper see the mounts below /run/netns?", cause)
	}
	return fmt.Errorf("%w: %w", errGone, cause)
}

// dialInside has the pod send and hear on its own interface.
func (p *kernelPod) dialInside(ctx context.Context, local netip.Addr) (dhcpc.Transport, error) {
	return transport.Dialer(&transport.Config{NetNS: p.ns, Link: p.link, MAC: []byte(p.r.Client.MAC), ARP: p.r.Client.DetectConflicts})(ctx, local)
}
