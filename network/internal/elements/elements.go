// Package elements enters a pod into the firewall's sets while its Add is under way.
package elements

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/build"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/nft"
)

// A guarded pod is held to its MAC and its addresses for as long as its port is there: the
// elements say so before the port is made, and go after it. A process may wait in the
// pod's namespace for its interface, and bring it up before anybody else does; and it goes
// on sending until the interface is gone.

// Entry is a pod in the firewall's sets, as far as its Add has come.
type Entry struct {
	Session     *session.Session
	Hash        string
	ContainerID string
	GetsMore    bool // addresses, after it got its port
	// Undo is told of each step how to take it back.
	Undo func(func(context.Context) error)
	// ReclaimLater has the rest of a dead pod of the network taken down after the Add.
	ReclaimLater func(hash string)
	Pending      *state.Pending // the pod's record
	Attached     bool           // the port is there

	held   *nft.Endpoint // what holds the pod, since before its port was there; nil: nothing
	wanted nft.Endpoint  // what was last asked for
}

// Plan is what the pod's elements are made from.
type Plan struct {
	Record *state.Attachment // Withheld of its ports is set where the container has one already
	Want   *build.Want       // nil if the Add is done
	Port   string            // the port's name
}

// HoldBefore enters what holds the pod to its MAC and its addresses, before its port is there.
// A pod that gets its addresses later has its host ports then, too.
func (e *Entry) HoldBefore(ctx context.Context, p Plan) error {
	if !p.Record.Guarded {
		return nil
	}
	var ep nft.Endpoint
	derive := func() {
		e.wanted = endpoint.Of(p.Record)
		if ep = e.wanted; e.GetsMore {
			ep.Ports, ep.Masquerade = nil, false
		}
	}
	derive()
	e.Undo(func(ctx context.Context) error {
		if e.Attached {
			return nil // it could not be deleted, and stays guarded
		}
		if e.held == nil {
			// The kernel's answer may have been lost, and the elements be there. But what a
			// killed Add left may have a port yet, whose guard these are.
			if _, err := e.Session.Links.Link(ctx, p.Port); !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
		return e.Session.Firewall.Remove(ctx, ep, e.wanted)
	})
	if err := e.enter(ctx, p, func() error { derive(); return e.Session.Firewall.Add(ctx, ep) }); err != nil {
		return err
	}
	e.held = &ep
	return nil
}

// Add enters the pod into the firewall's sets, as far as it is not there yet.
func (e *Entry) Add(ctx context.Context, p Plan) error {
	ep := endpoint.Of(p.Record)
	if e.held == nil {
		e.Undo(func(ctx context.Context) error { return e.Session.Firewall.Remove(ctx, ep) })
		return e.enter(ctx, p, func() error { ep = endpoint.Of(p.Record); return e.Session.Firewall.Add(ctx, ep) })
	}
	e.wanted = ep
	if !e.GetsMore {
		// All of it is there, unless somebody has flushed it meanwhile.
		if same, err := e.Session.Firewall.Unchanged(ctx); err != nil || same {
			return err
		}
	}
	return e.enter(ctx, p, func() error { ep = endpoint.Of(p.Record); return e.Session.Firewall.Update(ctx, *e.held, ep) })
}

// Publish has an attachment whose Add is done publish what the plan says; until then it is before.
func (e *Entry) Publish(ctx context.Context, before nft.Endpoint, record *state.Attachment) error {
	e.held, e.GetsMore, e.Attached = &before, true, true
	return e.Add(ctx, Plan{Record: record})
}

// RefuseAddress says which pod has an address at a link, of those that are there.
func (e *Entry) RefuseAddress(ctx context.Context, link string, own netip.Addr) error {
	held, err := e.Session.Firewall.AddressOwner(ctx, link, own)
	if err != nil || held == nil {
		return err
	}
	if stale, err := e.IsStale(ctx, held); stale || err != nil {
		return err
	}
	return fmt.Errorf("another pod of this node has it: %w", held)
}

// enter enters an endpoint, in the place of what a pod that is gone left.
func (e *Entry) enter(ctx context.Context, p Plan, add func() error) error {
	if err := session.Wanted(e.Pending); err != nil {
		return err
	}
	err := add()
	if errors.Is(err, fs.ErrNotExist) && p.Want != nil {
		// A set went missing since we looked.
		if _, err := build.Ready(ctx, e.Session, p.Want); err != nil {
			return err
		}
		err = add()
	}
	var conflict *nft.ConflictError
	for errors.As(err, &conflict) {
		if err := session.Wanted(e.Pending); err != nil {
			return err
		}
		stale, lookErr := e.IsStale(ctx, conflict)
		if lookErr != nil {
			return errors.Join(err, lookErr)
		}
		if !stale {
			withheld, shareErr := e.withhold(ctx, p, conflict)
			if shareErr != nil {
				return shareErr
			}
			if !withheld {
				return e.explainConflict(conflict)
			}
			err = add()
			continue
		}
		if string(conflict.Owner) == e.Hash && !e.Attached {
			// What a killed Add left may have a port yet, whose guard this is.
			if err := e.Session.Links.Detach(ctx, p.Port, endpoint.AliasOwner(e.Hash)); err != nil {
				return err
			}
		}
		// Whatever else it left, nobody will miss.
		if err := e.Session.Firewall.RemoveOwners(ctx, conflict.Owner); err != nil {
			return err
		}
		if string(conflict.Owner) != e.Hash && conflict.Network == p.Record.Network {
			e.ReclaimLater(string(conflict.Owner))
		}
		err = add()
	}
	return err
}

// IsStale says whether the owner of an element is gone: it has no port, and no record
// of an Add that may be about to make one. The attachment itself is its own
// predecessor, of which a killed Add left something.
func (e *Entry) IsStale(ctx context.Context, conflict *nft.ConflictError) (bool, error) {
	switch string(conflict.Owner) {
	case "":
		return false, nil
	case e.Hash:
		return true, nil
	}
	rec, err := e.Session.Dir.Load(conflict.Network, string(conflict.Owner))
	if err == nil && rec.State != state.Ready {
		return false, nil
	}
	l, err := e.Session.Links.Link(ctx, "veth"+string(conflict.Owner))
	if errors.Is(err, fs.ErrNotExist) {
		renamed, err := e.Session.Renamed(ctx, string(conflict.Owner))
		return !renamed, err
	}
	if err != nil {
		return false, err
	}
	owner, ours := endpoint.ParseAlias(l.Alias)
	return !ours || owner.Hash != string(conflict.Owner), nil
}

// withhold leaves a host port to another attachment of the same container, which has it already:
// some runtimes hand a container's ports to all of its networks. That attachment's record says who
// waits, so that its Del passes the port on.
func (e *Entry) withhold(ctx context.Context, p Plan, conflict *nft.ConflictError) (bool, error) {
	if conflict.Port == "" || conflict.Owner == "" {
		return false, nil
	}
	has, err := e.Session.Dir.Load(conflict.Network, string(conflict.Owner))
	if err != nil || has.ContainerID != e.ContainerID {
		return false, nil
	}
	found := false
	for i := range p.Record.Published {
		if one := &p.Record.Published[i]; !one.Withheld && endpoint.Port(one).String() == conflict.Port {
			one.Withheld, found = true, true
		}
	}
	if !found {
		return false, nil
	}
	me := state.Waiting{Network: p.Record.Network, Hash: e.Hash}
	for _, a := range p.Record.Addresses {
		me.Addresses = append(me.Addresses, a.Prefix)
	}
	if err := e.Session.Await(ctx, has, me); err != nil {
		return false, fail.Errorf(fail.ErrTryAgain, "port %s is published by the container's %s of network %q, at which another call is at work: %w", conflict.Port, has.IfName, has.Network, err)
	}
	return true, nil
}

// explainConflict says which pod has a port that is wanted, in the operator's
// words. Where it is an address, that pod's reservation is lost, and the next Add gets another.
func (e *Entry) explainConflict(conflict *nft.ConflictError) error {
	if conflict.Port == "" {
		return conflict
	}
	owner := "another program"
	if conflict.Owner != "" {
		owner = "endpoint " + string(conflict.Owner)
		if rec, err := e.Session.Dir.Load(conflict.Network, string(conflict.Owner)); err == nil {
			owner = describe(rec)
		}
	}
	return fail.Errorf(fail.ErrConflict, "port %s is already published by %s", conflict.Port, owner)
}

// describe names a pod as its operator knows it.
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
