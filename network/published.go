package network

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network/internal/chained"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/inspect"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/network/internal/teardown"
	"github.com/tombolo-cni/tombolo/nft"
)

// Interface is a pod's interface that another program made.
type Interface struct {
	NetNS     string         // path of the pod's namespace
	Addresses []netip.Prefix // of those that the host reaches the pod by
}

// Publication is what Publish is asked for.
type Publication struct {
	Ports []HostPort
	// SNAT says whose calls come to the pod from the host's address. Of a pod of another program's, what SNATNeeded
	// means is SNATLink; a network has the rules for it.
	SNAT nft.SNAT
}

// Publish has ports of the host lead to a pod that is attached already, in place of those that do,
// as if its Add had been asked for them; without any, none does. It undoes itself. An attachment
// that is not on record is what other says, and gets a record of what it has; with nil it is
// ErrNotAttached. It needs CAP_NET_ADMIN, and CAP_SYS_ADMIN to enter a pod of another program's.
func (n *Node) Publish(ctx context.Context, key Key, other *Interface, what Publication) error {
	ports := what.Ports
	rec, err := n.toChange(ctx, key, other)
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
	if rec.Other {
		at.Other = rec
		if rec.State == "" {
			if err := at.Find(ctx, s); err != nil {
				return err
			}
		}
	}
	return do(at, s)
}

// attached gives the record of an attachment, or what is to be the record of another program's.
func (n *Node) attached(ctx context.Context, key Key, other *Interface) (*state.Attachment, error) {
	if err := n.usableFor(ctx, key); err != nil {
		return nil, err
	}
	rec, err := n.dir.Find(key.Network, key.hash())
	switch {
	case err == nil && other == nil && !rec.Other && rec.State != state.Ready:
		// A plugin of a list has its DEL before that of the one whose ADD did not finish, and has given it nothing.
		return nil, fail.Errorf(ErrNotAttached, "the ADD of container %s did not finish: DEL it and ADD it again", key.ContainerID)
	case err == nil && (!rec.Other || other == nil):
		return rec, nil
	case err == nil:
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fail.State(err)
	case other == nil:
		return nil, fail.Errorf(ErrNotAttached, "container %s has no attachment %s to network %q on record", key.ContainerID, key.IfName, key.Network)
	}
	rec = &state.Attachment{Network: key.Network, ContainerID: key.ContainerID, IfName: key.IfName, NetNS: other.NetNS, Other: true, DataDir: n.leaseDir}
	for _, p := range other.Addresses {
		if !p.IsValid() {
			return nil, fail.Errorf(ErrInvalid, "interface %s of container %s has an invalid address", key.IfName, key.ContainerID)
		}
		rec.Addresses = append(rec.Addresses, ipam.Address{Prefix: p})
	}
	return rec, nil
}

// toChange is attached for calls that change it. Of a record of another program's attachment that is damaged nothing
// is known but whose it is: it goes, with what that has in the firewall.
func (n *Node) toChange(ctx context.Context, key Key, other *Interface) (*state.Attachment, error) {
	rec, err := n.attached(ctx, key, other)
	if !errors.Is(err, ErrState) || !teardown.IsDamagedOther(n.dir, key.Network, key.hash()) {
		return rec, err
	}
	n.log.Warn(err.Error())
	s, err := n.open(n.mark)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	if err := teardown.DamagedOther(ctx, s, key.Network, key.hash()); err != nil {
		return nil, err
	}
	return n.attached(ctx, key, other)
}

// compare compares an attachment that is on record. It changes nothing.
func (n *Node) compare(ctx context.Context, key Key, do func(*session.Session, *state.Attachment, *inspect.Findings) error) ([]tombolo.Difference, error) {
	rec, err := n.attached(ctx, key, nil)
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
		return inspect.Published(ctx, s, rec, endpoint.Published(what.Ports), chained.SNAT(rec, what.SNAT), found)
	})
}

// Limit gives a pod that is attached already limits in place of those that it has, as if its Add had
// been asked for them; the zero Shape is none. It gives the link that shapes what the pod sends, nil if
// that has no limit. An attachment that is not on record is as with Publish.
func (n *Node) Limit(ctx context.Context, key Key, other *Interface, limits bandwidth.Shape) (*bridge.Link, error) {
	rec, err := n.toChange(ctx, key, other)
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

// Admit has other firewalls let pass what a pod sends that is attached already, and what answers, and
// gives its network an ingress policy. A pod of ours is admitted by its Add. An attachment that is not
// on record is as with Publish.
func (n *Node) Admit(ctx context.Context, key Key, other *Interface, how Admission) error {
	rec, err := n.toChange(ctx, key, other)
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

// Unadmit takes back what Admit did for a pod of another program's.
func (n *Node) Unadmit(ctx context.Context, key Key) error {
	rec, err := n.toChange(ctx, key, nil)
	if err != nil {
		return err
	}
	return n.chained(ctx, rec, func(at *chained.Attachment, s *session.Session) error { return at.Unadmit(ctx, s) })
}

// CheckAdmitted compares with what Admit was asked for. An attachment that is not on record is
// ErrNotAttached. It changes nothing.
func (n *Node) CheckAdmitted(ctx context.Context, key Key, policy nft.Policy) ([]tombolo.Difference, error) {
	return n.compare(ctx, key, func(s *session.Session, rec *state.Attachment, found *inspect.Findings) error {
		return inspect.Admitted(ctx, s, rec, policy, found)
	})
}

// CollectOthers takes down what attachments of other programs' have by Publish, but for those in keep,
// and with CollectDead, those whose pods are gone.
func (n *Node) CollectOthers(ctx context.Context, network string, keep []Key) error {
	s, err := n.openFor(ctx, network)
	if err != nil {
		return err
	}
	defer s.Close()
	return teardown.CollectOthers(ctx, s, network, owners(keep))
}
