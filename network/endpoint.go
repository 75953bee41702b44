package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/nft"
)

// endpointPart implements podPart for a pod's elements in the nf_tables sets of our tables. They serve its guard
// (anti-spoofing rules), its host ports, its masquerading, and frames from the LAN. The guard's elements are added
// before the port is created, and deleted once the port is down or gone. In any other order, a process in the pod's
// namespace could send unguarded frames.
type endpointPart struct{}

func (endpointPart) look(ctx context.Context, p *podSite) error {
	diffs, err := p.s.Firewall.CheckEndpoint(ctx, endpoint.In(p.Attachment, p.nw))
	p.found.addAll(diffs, tombolo.RemedyRepair)
	return err
}

func (endpointPart) mend(ctx context.Context, p *podSite) error {
	return p.s.Firewall.Replace(ctx, endpoint.In(p.Attachment, p.nw))
}

// entry adds a pod's elements to the firewall's sets, and holds the state of that work.
type entry struct {
	node       *Node
	s          *session
	hash       string
	network    *state.Network // nil during an Add: then the attachment's record has the network's settings
	getsMore   bool           // the pod gets more addresses, or new host ports, after its port is created
	pending    *state.Pending // the pod's record, during the Add
	attached   bool           // the pod's port exists on the bridge
	isTakeover bool           // the Add took over host ports from the container's attachment to a LAN
	undo       undoSteps

	guard     *nft.Endpoint // the pod's elements that existed before add; nil if none
	requested nft.Endpoint  // the elements that the pod's record last asked for
}

// endpoint returns the elements that the pod's record asks for, in the form of package nft.
func (e *entry) endpoint(rec *state.Attachment) nft.Endpoint {
	if e.network != nil {
		return endpoint.In(rec, e.network)
	}
	return endpoint.Of(rec)
}

// guardBefore adds the elements of a pod with a guard, or behind a shared NIC, to the firewall's sets before the pod's
// port exists. They restrict the pod to its MAC and addresses, or send frames from the LAN to it. For any other pod,
// guardBefore does nothing. If the pod gets more addresses later, guardBefore leaves out host ports and masquerading,
// and the method add adds them.
func (e *entry) guardBefore(ctx context.Context, rec *state.Attachment, required *requirement) error {
	if rec.Guard == "" && rec.NIC == "" {
		return nil
	}

	var ep nft.Endpoint
	derive := func() {
		e.requested = e.endpoint(rec)
		if ep = e.requested; e.getsMore {
			ep.Ports, ep.Masquerade = nil, false
		}
	}
	derive()
	e.undo.push(func(ctx context.Context) error {
		if e.attached {
			return nil // the port could not be deleted, and stays guarded
		}

		if e.guard == nil {
			// The kernel's answer may have been lost, so the elements may exist. But keep them if the port of a
			// killed Add still exists, since they guard it.
			if l, err := e.s.link(ctx, rec.HostIf); err != nil || l.Index != 0 {
				return err
			}
		}

		return e.s.Firewall.Remove(ctx, ep, e.requested)
	})
	if err := e.enter(ctx, rec, required, func() error { derive(); return e.s.Firewall.Add(ctx, ep) }); err != nil {
		return err
	}

	e.guard = &ep
	return nil
}

// add adds the elements to the firewall's sets that the pod needs and guardBefore has not added. If another attachment
// of the container has a host port, add sets Withheld for this port in the record, or takes the port over (withhold).
// required describes the network, to restore missing sets; it is nil outside an Add.
func (e *entry) add(ctx context.Context, rec *state.Attachment, required *requirement) error {
	ep := e.endpoint(rec)
	if e.guard == nil {
		e.undo.push(func(ctx context.Context) error { return e.s.Firewall.Remove(ctx, ep) })
		return e.enter(ctx, rec, required, func() error { ep = e.endpoint(rec); return e.s.Firewall.Add(ctx, ep) })
	}

	e.requested = ep
	if !e.getsMore {
		// All elements exist unless another program has flushed the tables since.
		if same, err := e.s.rules().Unchanged(); err != nil || same {
			return err
		}
	}
	return e.enter(ctx, rec, required,
		func() error { ep = e.endpoint(rec); return e.s.Firewall.Update(ctx, *e.guard, ep) })
}

// refuseAddress returns an error if another pod behind the link already has own, the address that this pod is to get.
// link is the shared NIC or, without one, the link with the network's gateways. The error names the other pod. The
// remains of a pod that is gone do not count.
func (e *entry) refuseAddress(ctx context.Context, link string, own netip.Addr) error {
	owner, err := e.s.Firewall.AddressOwner(ctx, link, own)
	if err != nil || owner == nil {
		return err
	}
	if stale, err := e.isStale(ctx, owner); stale || err != nil {
		return err
	}
	return fmt.Errorf("another pod of this node has it: %w", owner)
}

// enter calls add, a function that adds the pod's elements. If a set is missing and required is not nil, enter builds
// the network again, and calls add again. If an element conflicts with an element of a pod that is gone, enter deletes
// all elements of that pod, and calls add again. If another attachment of the container has a host port, enter calls
// withhold, and calls add again.
func (e *entry) enter(ctx context.Context, rec *state.Attachment, required *requirement, add func() error) error {
	if err := refuseDeleted(e.pending); err != nil {
		return err
	}

	err := add()
	if errors.Is(err, fs.ErrNotExist) && required != nil {
		// A set has disappeared since the network was checked.
		if _, err := ensureReady(ctx, e.s, required); err != nil {
			return err
		}
		err = add()
	}

	for conflict := (*nft.ConflictError)(nil); errors.As(err, &conflict); err = add() {
		if err := refuseDeleted(e.pending); err != nil {
			return err
		}

		stale, lookErr := e.isStale(ctx, conflict)
		if lookErr != nil {
			return errors.Join(err, lookErr)
		}

		if !stale {
			if err := e.withhold(ctx, rec, conflict); err != nil {
				return err
			}
			continue
		}

		if string(conflict.Owner) == e.hash && !e.attached {
			// A killed Add of this attachment may have left a guarded port, whose element conflicts. Delete the port.
			if err := e.s.Links.Detach(ctx, rec.HostIf, endpoint.AliasOwner(e.hash)); err != nil {
				return err
			}
		}

		// The owner of the conflicting element is gone and needs none of its elements, so delete all of them.
		if err := e.s.Firewall.RemoveOwners(ctx, conflict.Owner); err != nil {
			return err
		}

		if string(conflict.Owner) != e.hash && conflict.Network == rec.Network {
			e.s.deferUntilClose(func() error { // runs when the Add has released its locks
				ctx, cancel := context.WithTimeout(context.Background(), reclaimTimeout)
				defer cancel()
				_, err := e.node.teardown(e.s, rec.Network, nil).collectDead(ctx, false)
				return err
			})
		}
	}

	return err
}

// isStale reports whether the owner of a conflicting element is gone. Such an owner has no port, and no record of an
// Add that may be about to create one. The result is also true if the owner is this attachment itself, since then a
// killed Add has left the element.
func (e *entry) isStale(ctx context.Context, conflict *nft.ConflictError) (bool, error) {
	hash := string(conflict.Owner)
	if hash == "" || hash == e.hash {
		return hash != "", nil
	}

	rec, err := e.s.Dir.Load(conflict.Network, hash)
	if err == nil && rec.State != state.Ready {
		return false, nil
	}

	l, err := e.s.link(ctx, ident.Port(hash))
	if err != nil {
		return false, err
	}

	if l.Index == 0 {
		renamed, err := e.s.isRenamed(ctx, hash)
		return !renamed, err
	}

	owner, ours := endpoint.ParseAlias(l.Alias)
	return !ours || owner.Hash != hash, nil
}

// withhold handles a conflict over a host port. Some runtimes pass a container's ports to all of its networks. If
// another attachment of the same container has the port, withhold marks the port as withheld in rec. It adds rec's
// attachment to the Waiting list of the other attachment, whose Del then passes the port on. If only the other
// attachment is on a LAN, withhold calls takeOver instead.
//
// For any other conflict, withhold returns an error that names the owner of the port or address.
func (e *entry) withhold(ctx context.Context, rec *state.Attachment, conflict *nft.ConflictError) error {
	taken := func(owner string) error {
		return failf(ErrConflict, "port %s is already published by %s", conflict.Port, owner)
	}
	has, err := e.s.Dir.Load(conflict.Network, string(conflict.Owner))
	switch {
	case conflict.Port == "" && err == nil:
		return fmt.Errorf("%s has the address: %w", describe(has), conflict)
	case conflict.Port == "":
		return conflict
	case conflict.Owner == "":
		return taken("another program")
	case err != nil:
		return taken("endpoint " + string(conflict.Owner))
	}

	// Handle all ports that the two attachments share at once, since each conflict costs a transaction.
	theirs := map[string]bool{}
	for _, p := range has.Published {
		theirs[p.String()] = !p.Withheld
	}

	var shared []int // the ports' indexes in the record
	for i, one := range rec.Published {
		if has.ContainerID == rec.ContainerID && !one.Withheld &&
			(theirs[one.String()] || one.Count == 0 && one.String() == conflict.Port) {
			shared = append(shared, i)
		}
	}

	if len(shared) == 0 {
		return taken(describe(has))
	}

	if rec.DefaultRoute == "" && has.DefaultRoute != "" {
		err = e.takeOver(ctx, rec, has, shared)
	} else {
		for _, i := range shared {
			rec.Published[i].Withheld = true
		}

		me := newWaiting(rec)
		me.Addresses = prefixesOf(rec.Addresses)
		err = e.s.addWaiting(ctx, has, me, 0)
	}

	if err != nil {
		return failf(ErrTryAgain,
			"port %s is published by the container's %s of network %q, at which another call is at work: %w",
			conflict.Port, has.IfName, has.Network, err)
	}

	return nil
}

// takeOver withholds host ports from lan, an attachment of the same container to a LAN, so that rec can publish them.
// It prefers rec because at lan the ports would not be reachable at 127.0.0.1. shared contains the ports' indexes in
// rec.Published. session.linkSiblings later adds lan to the Waiting list of rec, so that lan gets the ports when rec is
// removed.
func (e *entry) takeOver(ctx context.Context, rec, lan *state.Attachment, shared []int) error {
	err := e.s.changePorts(ctx, newWaiting(lan), 0, func(lan *state.Attachment) {
		for i := range lan.Published {
			lan.Published[i].Withheld = lan.Published[i].Withheld || slices.ContainsFunc(shared, func(own int) bool {
				return rec.Published[own].String() == lan.Published[i].String()
			})
		}
	})

	e.isTakeover = true
	e.undo.push(func(ctx context.Context) error {
		_ = e.s.Firewall.Remove(ctx, e.endpoint(rec)) // delete the elements that exist
		return e.s.publish(ctx, newWaiting(lan))
	})
	return err
}

// describe returns the name of a pod for messages to the operator.
func describe(rec *state.Attachment) string {
	id := rec.ContainerID
	if len(id) > 12 {
		id = id[:12] + "…"
	}
	if rec.Pod == "" {
		return "container " + id
	}
	return "pod " + rec.Pod + " (container " + id + ")"
}

// isKnown reports whether an attachment's record lists all its elements in the firewall's sets. It returns false for
// nil.
func isKnown(rec *state.Attachment) bool {
	return rec != nil && rec.State == state.Ready && !rec.Moving
}

// removeElements deletes the attachment's elements from the firewall's sets, by the keys in its record. If the record
// does not contain all keys, or the deletion by key fails, it searches for the elements by their owner. It first sets
// the port down if the pod has a guard (anti-spoofing rules), or may have one. Without this, the pod could send
// anything until the port is gone. If the port cannot be set down, the elements stay, unless the link belongs to
// another owner.
func removeElements(ctx context.Context, s *session, r *remains) error {
	var err error
	if !isKnown(r.rec) || r.rec.Guard != "" {
		err = s.Links.Shut(ctx, r.port(), endpoint.AliasOwner(r.hash))
		if err != nil && !errors.Is(err, bridge.ErrForeign) {
			return err
		}
	}

	if isKnown(r.rec) && s.Firewall.Remove(ctx, endpoint.Of(r.rec)) == nil {
		return err
	}
	return errors.Join(err, s.Firewall.RemoveOwners(ctx, nft.Owner(r.hash)))
}
