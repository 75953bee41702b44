// Package chained gives an attachment that is there what plugins further down a chain ask for: host
// ports and limits. They are on the attachment's record, as if its Add had been asked for them.
package chained

import (
	"context"
	"errors"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/hostport"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/build"
	"github.com/tombolo-cni/tombolo/network/internal/elements"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/network/internal/teardown"
	"github.com/tombolo-cni/tombolo/nft"
)

// Attachment names one that is on record.
type Attachment struct {
	Network, Hash string
	// ReclaimLater has the rest of a dead pod of the network taken down when no lock is held.
	ReclaimLater func(hash string)
}

// change locks the record of an attachment whose Add is done, and has it changed.
func (at Attachment) change(ctx context.Context, s *session.Session, do func(a, next *state.Attachment) error) error {
	lock, err := s.Dir.LockAttachment(at.Network, at.Hash)
	if err != nil {
		return fail.State(err)
	}
	defer lock.Close()
	a, err := s.Dir.Load(at.Network, at.Hash)
	if err != nil {
		return fail.State(err)
	}
	if a.State != state.Ready {
		return fail.Errorf(fail.ErrTryAgain, "the ADD of container %s did not finish: DEL it and ADD it again", a.ContainerID)
	}
	if err := s.Enter(ctx); err != nil {
		return err
	}
	next := *a
	return do(a, &next)
}

// seen is an attachment as the firewall has it. What its network has switched off since has no sets, and is left
// out.
func seen(s *session.Session, a *state.Attachment) (*state.Attachment, error) {
	n, err := s.Dir.LoadNetwork(a.Network)
	if err != nil {
		return nil, fail.State(err)
	}
	one := *a
	one.Masquerade = one.Masquerade && n.Masquerade
	if !n.Guard {
		one.Guarded, one.SLAAC, one.MACOnly, one.Untrusted = false, false, false, false
	}
	return &one, nil
}

// Publish has ports of the host lead to the attachment, in place of those that do. The record says
// so first: by it, a Del finds what a killed call has made.
func (at Attachment) Publish(ctx context.Context, s *session.Session, ports []state.Published, snat nft.SNAT) error {
	if snat != nft.SNATNeeded {
		if err := s.Enter(ctx); err != nil {
			return err
		}
		err := at.setNetwork(ctx, s, func(n *state.Network) bool {
			before := n.PortSNAT
			n.PortSNAT = true
			return !before
		})
		if err != nil {
			return err
		}
	}
	return at.change(ctx, s, func(a, next *state.Attachment) error {
		next.Published, next.PortSNAT = ports, endpoint.SNATName(snat)
		err := at.publish(ctx, s, a, next)
		if err != nil {
			err = errors.Join(err, teardown.Unpublished(context.WithoutCancel(ctx), s, next))
		}
		return err
	})
}

func (at Attachment) publish(ctx context.Context, s *session.Session, a, next *state.Attachment) error {
	if err := build.Reach(ctx, s, next); err != nil {
		return err
	}
	before, err := seen(s, a)
	if err != nil {
		return err
	}
	after, err := seen(s, next)
	if err != nil {
		return err
	}
	// Elements that are not in the next record are deleted before it is written, so that a Del after a call
	// that was killed finds all there are.
	has := endpoint.Of(before)
	if stays := common(has, endpoint.Of(after)); len(stays.Ports) < len(has.Ports) || stays.PortSNAT != has.PortSNAT {
		if err := s.Firewall.Update(ctx, has, stays); err != nil {
			return err
		}
		has = stays
	}
	dir := s.Dir
	if err := dir.UpdateLocked(next); err != nil {
		return fail.State(err)
	}
	entry := &elements.Entry{Session: s, Hash: at.Hash, ContainerID: a.ContainerID, ReclaimLater: at.ReclaimLater}
	err = entry.Publish(ctx, has, after)
	if err == nil && slices.ContainsFunc(next.Published, func(p state.Published) bool { return p.Withheld }) {
		err = dir.UpdateLocked(next)
	}
	if err == nil {
		err = FlushStale(ctx, s.Links, next)
	}
	if err == nil {
		if endpoint.PublishesIPv4(a) && !endpoint.PublishesIPv4(next) {
			return teardown.Unpublished(ctx, s, a)
		}
		return nil
	}
	ctx = context.WithoutCancel(ctx)
	return errors.Join(err,
		s.Firewall.Update(ctx, endpoint.Of(after), endpoint.Of(before)),
		dir.UpdateLocked(a))
}

// common is has with the ports alone that next has too. It has no SNAT of its own if next has none: then next
// is not compared with that.
func common(has, next nft.Endpoint) nft.Endpoint {
	has.Ports = slices.DeleteFunc(slices.Clone(has.Ports), func(p nft.Port) bool { return !slices.Contains(next.Ports, p) })
	if next.PortSNAT == nft.SNATNeeded {
		has.PortSNAT = next.PortSNAT
	}
	return has
}

// Unpublish has no port lead there any more. Those that others of the container have waited for
// are passed on.
func (at Attachment) Unpublish(ctx context.Context, s *session.Session) error {
	return at.change(ctx, s, func(a, next *state.Attachment) error {
		if len(a.Published) == 0 {
			return teardown.NotPublished(ctx, s, a)
		}
		next.Published, next.Waiting, next.PortSNAT = nil, nil, ""
		before, err := seen(s, a)
		if err != nil {
			return err
		}
		after, err := seen(s, next)
		if err != nil {
			return err
		}
		err = fail.Join(
			func() error { return s.Firewall.Update(ctx, endpoint.Of(before), endpoint.Of(after)) },
			func() error { s.PassPorts(ctx, a.Waiting); return nil },
			func() error { return flush(ctx, s.Links, a) },
		)
		if err != nil {
			return err
		}
		// As long as the rest is not done, the record says so by having none.
		if err := s.Dir.UpdateLocked(next); err != nil {
			return fail.State(err)
		}
		return teardown.Unpublished(ctx, s, a)
	})
}

// FlushStale has the kernel forget the flows to a new pod's ports that lead elsewhere.
func FlushStale(ctx context.Context, links *bridge.Conn, rec *state.Attachment) error {
	return flows(links, rec, func(conn *hostport.Conn, ports []nft.Port) error {
		return conn.FlushStale(ctx, endpoint.Addresses(rec), ports...)
	})
}

// flush has it forget those that lead to the pod.
func flush(ctx context.Context, links *bridge.Conn, rec *state.Attachment) error {
	return flows(links, rec, func(conn *hostport.Conn, ports []nft.Port) error {
		return conn.Flush(ctx, endpoint.Addresses(rec), ports...)
	})
}

func flows(links *bridge.Conn, rec *state.Attachment, do func(*hostport.Conn, []nft.Port) error) error {
	ports := endpoint.Ports(rec)
	if !hostport.HasFlows(ports...) {
		return nil
	}
	conn, err := hostport.Dial(&hostport.Config{Routes: links.Routes()})
	if err != nil {
		return err
	}
	defer conn.Close()
	return do(conn, ports)
}
