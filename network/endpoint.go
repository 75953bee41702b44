package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/nft"
)

// endpointPart is a pod's elements in the sets of our table: its guard, its host ports, that it is masqueraded, and that
// frames from the LAN are led to it. The guard is there before the port is made, and goes after it: a process may wait in the pod's namespace for its interface, bring
// it up before any other does, and send until it is gone.
type endpointPart struct{}

func (endpointPart) look(ctx context.Context, p *attached) error {
	diffs, err := p.s.Firewall.CheckEndpoint(ctx, endpoint.In(p.Attachment, p.nw))
	p.found.AddAll(diffs, tombolo.RemedyRepair)
	return err
}

func (endpointPart) mend(ctx context.Context, p *attached) error {
	return p.s.Firewall.Replace(ctx, endpoint.In(p.Attachment, p.nw))
}

// entry is a pod in the firewall's sets, as far as its Add has come.
type entry struct {
	node     *Node
	s        *session
	hash     string
	in       *state.Network // nil while the Add is under way, which asks for what its network has
	getsMore bool           // addresses, after it got its port
	pending  *state.Pending // the pod's record, while the Add is under way
	attached bool           // the port is there
	tookOver bool           // host ports of the container's attachment to a LAN
	back     undo

	held   *nft.Endpoint // what holds the pod, since before its port was there; nil: nothing
	wanted nft.Endpoint  // what was last asked for
}

// endpoint is the pod as the firewall is to have it.
func (e *entry) endpoint(rec *state.Attachment) nft.Endpoint {
	if e.in != nil {
		return endpoint.In(rec, e.in)
	}
	return endpoint.Of(rec)
}

// holdBefore enters what holds the pod to its MAC and its addresses, and what leads frames from the LAN to it, before
// its port is there.
// A pod that gets its addresses later has its host ports then, too.
func (e *entry) holdBefore(ctx context.Context, rec *state.Attachment, want *want) error {
	if rec.Guard == "" && rec.NIC == "" {
		return nil
	}
	var ep nft.Endpoint
	derive := func() {
		e.wanted = e.endpoint(rec)
		if ep = e.wanted; e.getsMore {
			ep.Ports, ep.Masquerade = nil, false
		}
	}
	derive()
	e.back.push(func(ctx context.Context) error {
		if e.attached {
			return nil // it could not be deleted, and stays guarded
		}
		if e.held == nil {
			// The kernel's answer may have been lost, and the elements be there. But what a
			// killed Add left may have a port yet, whose guard these are.
			if l, err := e.s.link(ctx, rec.HostIf); err != nil || l.Index != 0 {
				return err
			}
		}
		return e.s.Firewall.Remove(ctx, ep, e.wanted)
	})
	if err := e.enter(ctx, rec, want, func() error { derive(); return e.s.Firewall.Add(ctx, ep) }); err != nil {
		return err
	}
	e.held = &ep
	return nil
}

// add enters the pod into the firewall's sets, as far as it is not there yet. Withheld of the record's ports is set
// where the container has one already. want is nil if the Add is done.
func (e *entry) add(ctx context.Context, rec *state.Attachment, want *want) error {
	ep := e.endpoint(rec)
	if e.held == nil {
		e.back.push(func(ctx context.Context) error { return e.s.Firewall.Remove(ctx, ep) })
		return e.enter(ctx, rec, want, func() error { ep = e.endpoint(rec); return e.s.Firewall.Add(ctx, ep) })
	}
	e.wanted = ep
	if !e.getsMore {
		// All of it is there, unless another program has flushed it meanwhile.
		if same, err := e.s.seen().Unchanged(); err != nil || same {
			return err
		}
	}
	return e.enter(ctx, rec, want, func() error { ep = e.endpoint(rec); return e.s.Firewall.Update(ctx, *e.held, ep) })
}

// refuseAddress says which pod has an address at a link, of those that are there.
func (e *entry) refuseAddress(ctx context.Context, link string, own netip.Addr) error {
	held, err := e.s.Firewall.AddressOwner(ctx, link, own)
	if err != nil || held == nil {
		return err
	}
	if stale, err := e.isStale(ctx, held); stale || err != nil {
		return err
	}
	return fmt.Errorf("another pod of this node has it: %w", held)
}

// enter enters an endpoint, in the place of what a pod that is gone left.
func (e *entry) enter(ctx context.Context, rec *state.Attachment, want *want, add func() error) error {
	if err := wanted(e.pending); err != nil {
		return err
	}
	err := add()
	if errors.Is(err, fs.ErrNotExist) && want != nil {
		// A set went missing since we looked.
		if _, err := ready(ctx, e.s, want); err != nil {
			return err
		}
		err = add()
	}
	for conflict := (*nft.ConflictError)(nil); errors.As(err, &conflict); err = add() {
		if err := wanted(e.pending); err != nil {
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
			// It is the guard of a port that a killed Add may have left.
			if err := e.s.Links.Detach(ctx, rec.HostIf, endpoint.AliasOwner(e.hash)); err != nil {
				return err
			}
		}
		// No other remains of that Add are needed.
		if err := e.s.Firewall.RemoveOwners(ctx, conflict.Owner); err != nil {
			return err
		}
		if string(conflict.Owner) != e.hash && conflict.Network == rec.Network {
			e.s.Later(func() error { // when the Add has given up its locks
				ctx, cancel := context.WithTimeout(context.Background(), reclaimTimeout)
				defer cancel()
				_, err := e.node.teardown(e.s, rec.Network, nil).CollectDead(ctx, false)
				return err
			})
		}
	}
	return err
}

// isStale says whether the owner of an element is gone: it has no port, and no record of an Add that may be about
// to make one. An element of this attachment is one that a killed Add left.
func (e *entry) isStale(ctx context.Context, conflict *nft.ConflictError) (bool, error) {
	hash := string(conflict.Owner)
	if hash == "" || hash == e.hash {
		return hash != "", nil
	}
	rec, err := e.s.Dir.Load(conflict.Network, hash)
	if err == nil && rec.State != state.Ready {
		return false, nil
	}
	l, err := e.s.link(ctx, "veth"+hash)
	if err != nil {
		return false, err
	}
	if l.Index == 0 {
		renamed, err := e.s.Renamed(ctx, hash)
		return !renamed, err
	}
	owner, ours := endpoint.ParseAlias(l.Alias)
	return !ours || owner.Hash != hash, nil
}

// withhold leaves a host port to another attachment of the same container, which has it already: some runtimes hand
// a container's ports to all of its networks. That attachment's record names those that wait, so that its Del
// passes the port on. The error of any other conflict names the pod that has the port or address. Where that is an
// address, that pod's reservation is lost, and the next Add gets another.
func (e *entry) withhold(ctx context.Context, rec *state.Attachment, conflict *nft.ConflictError) error {
	if conflict.Port == "" {
		if has, err := e.s.Dir.Load(conflict.Network, string(conflict.Owner)); err == nil {
			return fmt.Errorf("%s has the address: %w", describe(has), conflict)
		}
		return conflict
	}
	taken := func(by string) error {
		return failf(ErrConflict, "port %s is already published by %s", conflict.Port, by)
	}
	if conflict.Owner == "" {
		return taken("another program")
	}
	has, err := e.s.Dir.Load(conflict.Network, string(conflict.Owner))
	if err != nil {
		return taken("endpoint " + string(conflict.Owner))
	}
	// All that it has at once: each conflict costs a transaction.
	theirs := map[string]bool{}
	for _, p := range has.Published {
		theirs[p.String()] = !p.Withheld
	}
	var shared []int // by their indexes in the record
	for i, one := range rec.Published {
		if has.ContainerID == rec.ContainerID && !one.Withheld && (theirs[one.String()] || one.Count == 0 && one.String() == conflict.Port) {
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
		me := waitingOf(rec)
		me.Addresses = prefixesOf(rec.Addresses)
		err = e.s.await(ctx, has, me, 0)
	}
	if err != nil {
		return failf(ErrTryAgain, "port %s is published by the container's %s of network %q, at which another call is at work: %w", conflict.Port, has.IfName, has.Network, err)
	}
	return nil
}

// takeOver has a network of the node take host ports over from the container's attachment to a LAN, whose ports are not
// reached by 127.0.0.1. meet has that one wait for them.
func (e *entry) takeOver(ctx context.Context, rec, lan *state.Attachment, shared []int) error {
	err := e.s.amend(ctx, waitingOf(lan), 0, func(lan *state.Attachment) {
		for i := range lan.Published {
			lan.Published[i].Withheld = lan.Published[i].Withheld || slices.ContainsFunc(shared, func(own int) bool {
				return rec.Published[own].String() == lan.Published[i].String()
			})
		}
	})
	e.tookOver = true
	e.back.push(func(ctx context.Context) error {
		_ = e.s.Firewall.Remove(ctx, e.endpoint(rec)) // or as much of it as is there
		return e.s.Publish(ctx, waitingOf(lan))
	})
	return err
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

// isKnown says whether an attachment's record, which may be nil, tells all that the firewall's sets have of it.
func isKnown(rec *state.Attachment) bool {
	return rec != nil && rec.State == state.Ready && !rec.Moving
}

// RemoveElements takes an attachment out of the firewall's sets: by its keys where
// its record tells them, else by its owner's name, which is a search.
func (s *session) RemoveElements(ctx context.Context, hash string, rec *state.Attachment) error {
	if isKnown(rec) && s.Firewall.Remove(ctx, endpoint.Of(rec)) == nil {
		return nil
	}
	return s.Firewall.RemoveOwners(ctx, nft.Owner(hash))
}
