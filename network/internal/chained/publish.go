// Package chained gives an attachment that is there what plugins further down a chain ask for: host
// ports and limits. They are on the attachment's record, as if its Add had been asked for them.
package chained

import (
	"context"
	"errors"
	"io/fs"
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

// Attachment names one.
type Attachment struct {
	Network, Hash string
	// Other is one of another program's, with what is known of it: it gets a record of its own. It is
	// nil for one that is on record.
	Other *state.Attachment
	// ReclaimLater has the rest of a dead pod of the network taken down when no lock is held.
	ReclaimLater func(hash string)
}

// change locks the record of an attachment whose Add is done, and has it changed. One of another
// program's that has nothing of ours afterwards has no record.
func (at Attachment) change(ctx context.Context, s *session.Session, do func(a, next *state.Attachment) error) error {
	dir := s.Dir
	if at.Other != nil {
		dir = dir.Others()
	}
	created := false
	lock, err := dir.LockAttachment(at.Network, at.Hash)
	if errors.Is(err, fs.ErrNotExist) && at.Other != nil {
		if err := s.Enter(ctx); err != nil {
			return err
		}
		at.Other.Epoch = s.Epoch.Token()
		pending, err := dir.Create(at.Other)
		if err != nil {
			return fail.State(err)
		}
		defer pending.Close()
		created = true
	} else if err != nil {
		return fail.State(err)
	}
	defer lock.Close()
	a, err := dir.Load(at.Network, at.Hash)
	if err != nil {
		if created {
			err = errors.Join(err, dir.Remove(at.Network, at.Hash))
		}
		return fail.State(err)
	}
	if a.State != state.Ready && !a.Other {
		return fail.Errorf(fail.ErrTryAgain, "the ADD of container %s did not finish: DEL it and ADD it again", a.ContainerID)
	}
	if err := s.Enter(ctx); err != nil {
		return err
	}
	a.State = state.Ready
	next := *a
	err = do(a, &next)
	now, loadErr := dir.Load(at.Network, at.Hash)
	if loadErr != nil || !now.Other || len(now.Published) > 0 || now.Admitted || now.Bandwidth != (state.Bandwidth{}) {
		return err
	}
	if removeErr := dir.Remove(at.Network, at.Hash); removeErr != nil {
		err = errors.Join(err, fail.State(removeErr))
	}
	return err
}

// seen is an attachment as the firewall has it. What its network has switched off since has no sets, and is left
// out.
func seen(s *session.Session, a *state.Attachment) (*state.Attachment, error) {
	if a.Other {
		return a, nil
	}
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

// SNAT says which calls come to a pod from the host's address. Where SNATNeeded was asked for a pod of another
// program, it is SNATLink: the firewall neither knows the other pods of that bridge, nor sees their answers to
// each other.
func SNAT(a *state.Attachment, asked nft.SNAT) nft.SNAT {
	if a.Other && asked == nft.SNATNeeded {
		return nft.SNATLink
	}
	return asked
}

// Publish has ports of the host lead to the attachment, in place of those that do. The record says
// so first: by it, a Del finds what a killed call has made.
func (at Attachment) Publish(ctx context.Context, s *session.Session, ports []state.Published, snat nft.SNAT) error {
	// One of another program's may be in a network of ours: of pods made before an installer copied its own bridge here.
	if at.Other != nil || snat != nft.SNATNeeded {
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
		next.Published, next.PortSNAT = ports, endpoint.SNATName(SNAT(a, snat))
		err := at.publish(ctx, s, a, next)
		if err != nil {
			err = errors.Join(err, teardown.Unpublished(context.WithoutCancel(ctx), s, next))
		}
		return err
	})
}

func (at Attachment) publish(ctx context.Context, s *session.Session, a, next *state.Attachment) error {
	if a.Bridge == "" {
		return fail.Errorf(fail.ErrNoLink, "the host has no route to an address of interface %s of container %s, or it is its own: no port can lead there", a.IfName, a.ContainerID)
	}
	if err := at.refuseOthers(ctx, s, a); err != nil {
		return err
	}
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
	dir := s.Dir.Of(a)
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
		// As long as the rest is not done, the record says so: one of another program's, which goes with its
		// ports, by its state, and one of ours by having none.
		dir, going := s.Dir.Of(a), next
		if a.Other {
			undone := *a
			undone.State = state.Adding
			going = &undone
		}
		if err := dir.UpdateLocked(going); err != nil {
			return fail.State(err)
		}
		if err := teardown.Unpublished(ctx, s, a); err != nil || going == next {
			return err
		}
		if err := dir.UpdateLocked(next); err != nil {
			return fail.State(err)
		}
		return nil
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
