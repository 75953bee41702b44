package network

import (
	"context"
	"errors"
	"io/fs"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/chained"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/inspect"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/nft"
)

// Publication is what Publish is asked for.
type Publication struct {
	Ports []HostPort
	// SNAT says whose calls come to the pod from the host's address.
	SNAT nft.SNAT
}

// Publish has ports of the host lead to a pod that is attached already, in place of those that do,
// as if its Add had been asked for them; without any, none does. It undoes itself. An attachment
// that is not on record, or whose Add did not finish, is ErrNotAttached. It needs CAP_NET_ADMIN.
func (n *Node) Publish(ctx context.Context, key Key, what Publication) error {
	ports := what.Ports
	rec, err := n.attached(ctx, key)
	if err != nil {
		return err
	}
	if len(ports) > 0 {
		if err := chained.RefuseUnreachable(ports, rec.Addresses); err != nil {
			return err
		}
		if err := chained.RefuseListeners(ctx, key.ContainerID, ports, rec.Addresses, false); err != nil {
			return err
		}
	}
	return n.chained(ctx, rec, func(at *chained.Attachment, s *session.Session) error {
		if len(ports) == 0 {
			return at.Unpublish(ctx, s)
		}
		return at.Publish(ctx, s, endpoint.Published(ports), what.SNAT)
	})
}

// chained has an attachment changed that is there already.
func (n *Node) chained(ctx context.Context, rec *state.Attachment, do func(*chained.Attachment, *session.Session) error) error {
	s, err := n.open(n.mark)
	if err != nil {
		return err
	}
	defer s.Close()
	at := &chained.Attachment{Network: rec.Network, Hash: rec.Hash(), ReclaimLater: func(hash string) { n.reclaimLater(s, rec.Network, hash) }}
	return do(at, s)
}

// attached gives the record of an attachment whose Add is done. A plugin of a list has its DEL before that of the one
// whose ADD did not finish, and has given it nothing.
func (n *Node) attached(ctx context.Context, key Key) (*state.Attachment, error) {
	if err := n.usableFor(ctx, key); err != nil {
		return nil, err
	}
	rec, err := n.dir.Load(key.Network, key.hash())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fail.Errorf(ErrNotAttached, "container %s has no attachment %s to network %q on record", key.ContainerID, key.IfName, key.Network)
	case err != nil:
		return nil, fail.State(err)
	case rec.State != state.Ready:
		return nil, fail.Errorf(ErrNotAttached, "the ADD of container %s did not finish: DEL it and ADD it again", key.ContainerID)
	}
	return rec, nil
}

// compare compares an attachment that is on record. It changes nothing.
func (n *Node) compare(ctx context.Context, key Key, do func(*session.Session, *state.Attachment, *inspect.Findings) error) ([]tombolo.Difference, error) {
	rec, err := n.attached(ctx, key)
	if err != nil {
		return nil, err
	}
	s, err := n.open(n.mark)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	found := &inspect.Findings{}
	err = do(s, rec, found)
	return found.List, err
}

// CheckPublished compares the host ports of an attachment with those that Publish was asked for. An attachment
// that is not on record is ErrNotAttached. It changes nothing.
func (n *Node) CheckPublished(ctx context.Context, key Key, what Publication) ([]tombolo.Difference, error) {
	return n.compare(ctx, key, func(s *session.Session, rec *state.Attachment, found *inspect.Findings) error {
		return inspect.Published(ctx, s, rec, endpoint.Published(what.Ports), what.SNAT, found)
	})
}

// Limit gives a pod that is attached already limits in place of those that it has, as if its Add had
// been asked for them; the zero Shape is none. It gives the link that shapes what the pod sends, nil if
// that has no limit. An attachment that is not on record is as with Publish.
func (n *Node) Limit(ctx context.Context, key Key, limits bandwidth.Shape) (*bridge.Link, error) {
	rec, err := n.attached(ctx, key)
	if err != nil {
		return nil, err
	}
	var by *bridge.Link
	err = n.chained(ctx, rec, func(at *chained.Attachment, s *session.Session) error {
		ifb, err := at.Limit(ctx, s, limits)
		if err == nil && ifb != "" {
			by, err = s.Links.Link(ctx, ifb)
		}
		return err
	})
	return by, err
}

// CheckLimits compares the limits of an attachment with those that Limit was asked for. An attachment that is
// not on record is ErrNotAttached. It changes nothing.
func (n *Node) CheckLimits(ctx context.Context, key Key, limits bandwidth.Shape) ([]tombolo.Difference, error) {
	return n.compare(ctx, key, func(s *session.Session, rec *state.Attachment, found *inspect.Findings) error {
		return inspect.Limited(ctx, s, rec, limits, found)
	})
}

// Admission is what Admit is asked for.
type Admission struct {
	Policy nft.Policy // of the network; the stricter of this and Network.Policy counts
	// AdminChain is a chain of the operator's that iptables is to call first, where it works over nf_tables:
	// see foreign.Config. Empty is none.
	AdminChain string
}

// Admit gives the network of a pod that is attached already an ingress policy, and has iptables call a chain of the
// operator's. Its Add has other firewalls let pass what the pod sends. An attachment that is not on record is as with
// Publish.
func (n *Node) Admit(ctx context.Context, key Key, how Admission) error {
	rec, err := n.attached(ctx, key)
	if err != nil {
		return err
	}
	return n.chained(ctx, rec, func(at *chained.Attachment, s *session.Session) error {
		if how.AdminChain != "" {
			if err := ensureAdmin(ctx, s, how.AdminChain); err != nil {
				return err
			}
		}
		return at.Admit(ctx, s, recorded.PolicyName(how.Policy), how.AdminChain)
	})
}

// ensureAdmin looks first, which mostly costs nothing.
func ensureAdmin(ctx context.Context, s *session.Session, name string) error {
	ready, err := s.Foreign(name).Ready(ctx)
	if err == nil && !ready {
		_, err = s.Foreign(name).Ensure(ctx)
	}
	return err
}

// CheckAdmitted compares with what Admit was asked for. An attachment that is not on record is
// ErrNotAttached. It changes nothing.
func (n *Node) CheckAdmitted(ctx context.Context, key Key) ([]tombolo.Difference, error) {
	return n.compare(ctx, key, func(s *session.Session, rec *state.Attachment, found *inspect.Findings) error {
		return inspect.Admitted(ctx, s, rec, found)
	})
}
