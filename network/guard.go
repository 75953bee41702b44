package network

import (
	"context"
	"errors"
	"io/fs"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/build"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/nft"
)

// A guarded pod is held to its MAC and its addresses for as long as its port is there: the
// elements say so before the port is made, and go after it. A process may wait in the
// pod's namespace for its interface, and bring it up before anybody else does; and it goes
// on sending until the interface is gone.

// guard is what the firewall has of a pod before its addresses lead to it.
type guard struct {
	attached bool          // the port is there
	held     *nft.Endpoint // what holds it, since before its port was there; nil: nothing
	wanted   nft.Endpoint  // what was last asked for
}

// holdBefore enters what holds the pod to its MAC and its addresses, before its port is there.
// A pod that gets its addresses later has its host ports then, too.
func (a *adding) holdBefore(ctx context.Context, p *plan) error {
	if !p.rec.Guarded {
		return nil
	}
	g := &a.guard
	g.wanted = endpoint.Of(&p.rec)
	ep := g.wanted
	if a.getsMore() {
		ep.Ports, ep.Masquerade = nil, false
	}
	a.back.push(func(ctx context.Context) error {
		if g.attached {
			return nil // it could not be deleted, and stays guarded
		}
		if g.held == nil {
			// The kernel's answer may have been lost, and the elements be there. But what a
			// killed Add left may have a port yet, whose guard these are.
			if _, err := a.s.Links.Link(ctx, p.port.Name); !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
		return a.s.Firewall.Remove(ctx, ep, g.wanted)
	})
	if err := a.enlist(ctx, p, func() error { return a.s.Firewall.Add(ctx, ep) }); err != nil {
		return err
	}
	g.held = &ep
	return nil
}

// getsMore says whether the pod gets addresses after it got its port.
func (a *adding) getsMore() bool { return a.leasing != nil || a.nw.SLAAC }

// admit enters the pod into the firewall's sets, as far as it is not there yet.
func (a *adding) admit(ctx context.Context, p *plan) error {
	ep := endpoint.Of(&p.rec)
	if a.guard.held == nil {
		a.back.push(func(ctx context.Context) error { return a.s.Firewall.Remove(ctx, ep) })
		return a.enlist(ctx, p, func() error { return a.s.Firewall.Add(ctx, ep) })
	}
	a.guard.wanted = ep
	if !a.getsMore() {
		// All of it is there, unless somebody has flushed it meanwhile.
		if same, err := a.s.Firewall.Untouched(ctx); err != nil || same {
			return err
		}
	}
	return a.enlist(ctx, p, func() error { return a.s.Firewall.Update(ctx, *a.guard.held, ep) })
}

// enlist enters an endpoint, in the place of what a pod that is gone left.
func (a *adding) enlist(ctx context.Context, p *plan, enter func() error) error {
	if err := a.wanted(); err != nil {
		return err
	}
	err := enter()
	if errors.Is(err, fs.ErrNotExist) {
		// A set went missing since we looked.
		if _, err := build.Ready(ctx, a.s, p.want); err != nil {
			return err
		}
		err = enter()
	}
	var conflict *nft.ConflictError
	for errors.As(err, &conflict) {
		if err := a.wanted(); err != nil {
			return err
		}
		stale, lookErr := a.isStale(ctx, conflict)
		if lookErr != nil {
			return errors.Join(err, lookErr)
		}
		if !stale {
			return a.explainConflict(conflict)
		}
		if string(conflict.Owner) == a.hash && !a.guard.attached {
			// What a killed Add left may have a port yet, whose guard this is.
			if err := a.s.Links.Detach(ctx, p.port.Name, endpoint.AliasOwner(a.hash)); err != nil {
				return err
			}
		}
		// Whatever else it left, nobody will miss.
		if err := a.s.Firewall.RemoveOwners(ctx, conflict.Owner); err != nil {
			return err
		}
		err = enter()
	}
	return err
}

// isStale says whether the owner of an element is gone: it has no port, and no record
// of an Add that may be about to make one. The attachment itself is its own
// predecessor, of which a killed Add left something.
func (a *adding) isStale(ctx context.Context, conflict *nft.ConflictError) (bool, error) {
	switch string(conflict.Owner) {
	case "":
		return false, nil
	case a.hash:
		return true, nil
	}
	rec, err := a.s.Dir.Load(conflict.Network, string(conflict.Owner))
	if err == nil && rec.State != state.Ready {
		return false, nil
	}
	l, err := a.s.Links.Link(ctx, "veth"+string(conflict.Owner))
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	owner, ours := endpoint.ParseAlias(l.Alias)
	return !ours || owner.Hash != string(conflict.Owner), nil
}

// explainConflict says which pod has a port that is wanted, in the operator's
// words.
func (a *adding) explainConflict(conflict *nft.ConflictError) error {
	if conflict.Port == "" {
		return conflict
	}
	owner := "another program"
	if conflict.Owner != "" {
		owner = "endpoint " + string(conflict.Owner)
		if rec, err := a.s.Dir.Load(conflict.Network, string(conflict.Owner)); err == nil {
			if rec.ContainerID == a.pod.ContainerID {
				// Some runtimes hand a container's ports to all of its networks.
				return fail.Errorf(ErrConflict, "port %s is already published by this container's %s of network %q: leave portMappings out of the capabilities of one of the two networks",
					conflict.Port, rec.IfName, rec.Network)
			}
			owner = describePod(rec)
		}
	}
	return fail.Errorf(ErrConflict, "port %s is already published by %s", conflict.Port, owner)
}

// describePod names a pod as its operator knows it.
func describePod(rec *state.Attachment) string {
	id := rec.ContainerID
	if len(id) > 12 {
		id = id[:12] + "…"
	}
	if rec.Pod == "" {
		return "container " + id
	}
	return "pod " + rec.Pod + " (container " + id + ")"
}
