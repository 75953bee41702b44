package network

import (
	"context"
	"errors"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// limitsPart is the part that limits a pod's traffic. It consists of qdiscs on the port, and of an IFB link for the
// traffic from the pod.
type limitsPart struct{}

func (limitsPart) look(ctx context.Context, p *podSite) error {
	if p.Bandwidth.IsZero() {
		return nil
	}
	diffs, err := bandwidth.On(p.s.Links.Socket()).Check(ctx, shaperTarget(p.Attachment), p.Bandwidth)
	p.found.addAll(diffs, tombolo.RemedyRepair)
	return err
}

func (limitsPart) mend(ctx context.Context, p *podSite) error {
	if p.Bandwidth.IsZero() {
		return nil
	}
	target := shaperTarget(p.Attachment)
	target.PortIndex = p.link.Index
	_, err := bandwidth.On(p.s.Links.Socket()).Ensure(ctx, target, p.Bandwidth)
	return err
}

// shaperTarget returns the port and the IFB link that shape an attachment's traffic.
func shaperTarget(rec *state.Attachment) bandwidth.Target {
	return bandwidth.Target{
		Port: rec.HostIf, MTU: rec.MTU, IFB: bandwidth.IFBName(rec.Hash()),
		Alias: endpoint.Alias(rec.Hash(), rec.Network, nil), Owner: endpoint.AliasOwner(rec.Hash()),
	}
}

// setLimits writes the limits into rec. If traffic from the pod is limited, it also writes the name of the IFB link
// that shapes this traffic.
func setLimits(rec *state.Attachment, s bandwidth.Shape) {
	rec.Bandwidth, rec.IFB = s, ""
	if s.Egress.Rate > 0 {
		rec.IFB = bandwidth.IFBName(rec.Hash())
	}
}

// ifbNames returns the names of the IFB links that may shape the attachment's traffic. Without a complete record the
// limits are unknown, so it returns the name that the attachment's IFB would have.
func (r *remains) ifbNames() []string {
	if r.rec != nil && r.rec.State == state.Ready && r.rec.IFB == "" {
		return nil
	}
	return []string{bandwidth.IFBName(r.hash)}
}

// limit limits the pod's port as requested, if at all. bridge.Attach calls it as soon as the port's index is known,
// and before the port is up (bridge.Port's BeforeUp).
func (a *addCall) limit(ctx context.Context, index, mtu int) (err error) {
	if a.pod.Limits.IsZero() {
		return a.node.reportStep("bandwidth")
	}

	target := shaperTarget(a.rec)
	target.PortIndex, target.MTU = index, mtu
	conn := bandwidth.On(a.s.Links.Socket())

	// Undo only the IFB link: the port's own qdiscs and filters are deleted together with the port.
	a.undo.push(func(ctx context.Context) error {
		return conn.Remove(ctx, bandwidth.Target{IFB: target.IFB, Owner: target.Owner})
	})
	if a.limits.IsZero() { // do not repeat the warning in a second attempt
		if a.limits, err = effectiveLimits(a.s, a.pod.Limits, mtu); err != nil {
			return err
		}
	}

	if _, err = conn.Ensure(ctx, target, a.limits); err != nil {
		return err
	}

	return a.node.reportStep("bandwidth")
}

// Limit replaces the limits of an attached pod, as if its Add had requested the new ones. The zero Shape means no
// limits. Limit returns the IFB link that shapes the traffic from the pod, or nil if that traffic is not limited. If
// there is no complete attachment, the error matches ErrNotAttached.
func (c Change) Limit(ctx context.Context, limits bandwidth.Shape) (port *bridge.Link, _ error) {
	err := c.do(ctx, func(s *session, a, next *state.Attachment) error {
		target, conn := shaperTarget(a), bandwidth.On(s.Links.Socket())
		if limits.IsZero() {
			if a.Bandwidth.IsZero() {
				return nil
			}
			setLimits(next, limits)
			if err := conn.Remove(ctx, target); err != nil {
				return err
			}
			return s.Dir.UpdateLocked(next)
		}

		effective, err := effectiveLimits(s, limits, a.MTU)
		if err != nil {
			return err
		}

		setLimits(next, effective)
		if err := s.Dir.UpdateLocked(next); err != nil {
			return stateError(err)
		}

		if _, err := conn.Ensure(ctx, target, effective); err != nil {
			return errors.Join(err, conn.Remove(context.WithoutCancel(ctx), target), s.Dir.UpdateLocked(a))
		}

		if next.IFB != "" {
			port, err = s.Links.Link(ctx, next.IFB)
		}

		return err
	})

	return port, err
}

// effectiveLimits returns the limits as the kernel enforces them, and warns of differences from the request.
func effectiveLimits(s *session, requested bandwidth.Shape, mtu int) (bandwidth.Shape, error) {
	effective, adjusted, err := requested.Effective(mtu)
	if err != nil {
		return bandwidth.Shape{}, failf(ErrInvalid, "bandwidth: %w", err)
	}
	for _, adj := range adjusted {
		s.warn("bandwidth: " + adj)
	}
	return effective, nil
}
