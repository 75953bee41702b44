package nft

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// Add adds an endpoint: one transaction of a few elements, however many are there.
//
// The error is a *ConflictError, which matches fs.ErrExist, where one of them is
// there already, or what excludes it: a port on all addresses and the same port on
// one of the same family. See Replace. It matches fs.ErrNotExist where the table or a set is
// missing, for which Ensure is the cure. Nothing is added then.
func (c *Conn) Add(ctx context.Context, ep Endpoint) error {
	if err := ep.check(); err != nil {
		return err
	}
	elements, comment := ep.elements(), ownerComment(ep.Owner, ruleset.NetworkKey(ep.Network))
	return c.retry(ctx, func() error {
		generation := c.seen.Generation() // if it is old, the transaction is refused, and it is forgotten
		if len(ep.Ports) > 0 && generation == nil {
			seen, err := nftnl.SeenGeneration(c.tables.Conn)
			if err != nil {
				return err
			}
			generation = &seen
		}
		excluding, err := c.findExcluding(elements)
		if err != nil {
			return explainMissing(err)
		}
		err = fs.ErrExist
		if len(excluding) == 0 {
			t := c.tables.Begin(generation)
			for _, el := range elements {
				t.NewElement(el, comment)
			}
			err = c.commitEndpoints(t)
		}
		if errors.Is(err, fs.ErrExist) {
			err = c.findConflict(&ep, elements)
		}
		return explainMissing(err)
	})
}

// findConflict says what refuses an endpoint's elements, and whose it is.
func (c *Conn) findConflict(ep *Endpoint, elements []ruleset.Element) error {
	have, err := c.tables.Lookup(elements)
	if err != nil {
		return err
	}
	excluding, err := c.findExcluding(elements)
	if err != nil {
		return err
	}
	for _, el := range append(have, excluding...) {
		if el != nil {
			return newConflict(c.tables.Name, *el, ep.portOf(el.Element))
		}
	}
	return nftnl.ErrOvertaken // gone again
}

// explainMissing tells what to do about a missing set.
func explainMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the network's firewall is not (or no longer) set up: %w", err)
	}
	return err
}

// Replace adds endpoints also where others' elements are in the way: elements that are right are left alone, those
// of other owners are taken over, and so are published ports that exclude those of the endpoints. Elements of a
// guarded endpoint for when it had no address, or no SLAAC, go in the same transaction; for other addresses that it
// had, see Move. Each endpoint is all there or as it was before; of several, those before an error are there.
//
// It is for a caller that knows the endpoint to be right: where a stale element is in a new pod's way, or after
// Ensure had to make a set anew. The error matches fs.ErrNotExist where the table or a set is missing.
func (c *Conn) Replace(ctx context.Context, eps ...Endpoint) error {
	for i := range eps {
		if err := eps[i].check(); err != nil {
			return err
		}
	}
	var group, gone []ruleset.ElementState
	for i := range eps {
		group = append(group, eps[i].commented()...)
		for _, el := range eps[i].leftovers() {
			gone = append(gone, ruleset.ElementState{Element: el, Comment: ownerComment(eps[i].Owner, ruleset.NetworkKey(eps[i].Network))})
		}
		if len(group) < ruleset.GroupSize && i < len(eps)-1 {
			continue
		}
		if err := c.replace(ctx, group, gone, nil); err != nil {
			return explainMissing(err)
		}
		group, gone = group[:0], gone[:0]
	}
	return nil
}

// commented gives an endpoint's elements with its comment.
func (ep *Endpoint) commented() []ruleset.ElementState {
	comment := ownerComment(ep.Owner, ruleset.NetworkKey(ep.Network))
	elements := ep.elements()
	list := make([]ruleset.ElementState, len(elements))
	for i, el := range elements {
		list[i] = ruleset.ElementState{Element: el, Comment: comment}
	}
	return list
}

func withoutComments(list []ruleset.ElementState) []ruleset.Element {
	elements := make([]ruleset.Element, len(list))
	for i := range list {
		elements[i] = list[i].Element
	}
	return elements
}

// replace adds the elements of group in place of those that have their keys or exclude them, and removes those in
// gone, if they are there with their comments. No element is in both lists. refuse, unless nil, gets the elements
// to be replaced, and its error ends the call.
func (c *Conn) replace(ctx context.Context, group, gone []ruleset.ElementState, refuse func(is []*ruleset.ElementState) error) error {
	elements := withoutComments(group)
	return c.retry(ctx, func() error {
		asked := publishedBy(elements)
		if i := slices.IndexFunc(elements, asked.exclude); i >= 0 {
			return newConflict(c.tables.Name, group[i], "")
		}
		generation, err := nftnl.SeenGeneration(c.tables.Conn)
		if err != nil {
			return err
		}
		have, err := c.tables.Lookup(slices.Concat(elements, withoutComments(gone)))
		if err != nil {
			return err
		}
		excluding, err := c.findExcluding(elements)
		if err != nil {
			return err
		}
		if refuse != nil {
			if err := refuse(slices.Concat(have[:len(elements)], excluding)); err != nil {
				return err
			}
		}
		// One that excludes an element of the group may be in gone too. If two of the group contradict each other, the
		// kernel says so.
		t, settled := c.tables.Begin(&generation), map[string]bool{}
		remove := func(el ruleset.Element) {
			if id := el.ID(); !settled[id] {
				settled[id] = true
				t.DelElement(el)
			}
		}
		for _, el := range excluding {
			remove(el.Element)
		}
		for i, el := range have[len(elements):] {
			if el != nil && el.Comment == gone[i].Comment {
				remove(el.Element)
			}
		}
		for i, want := range group {
			switch {
			case have[i] == nil:
			case have[i].Comment == want.Comment && bytes.Equal(have[i].Data, want.Data):
				settled[want.ID()] = true
				continue
			default:
				remove(want.Element)
			}
			t.NewElement(want.Element, want.Comment)
		}
		return c.commitEndpoints(t)
	})
}

// Move makes of an endpoint as it was one as it is by now, in one transaction: when
// its lease gave it another address, or its first one. A look sees all of the
// old or all of the new, and so do packets, but for one that a rule on another processor
// is just at: so a guarded port is open at no time, and shut at none, and a published
// port leads to one of the addresses or to the other.
//
// Both have the same Owner and Network. It adds the new one's elements as Replace does, and removes those that only
// the old one had as Remove does, if they are there and the owner's. So it is safe to call again, and an old one
// with too many does no harm. Connections that exist keep the address they were led to.
//
// The error matches fs.ErrNotExist where the table or a set is missing, for which
// Ensure is the cure; nothing has changed then.
func (c *Conn) Move(ctx context.Context, old, next Endpoint) error {
	return c.move(ctx, old, next, nil)
}

// Update is Move for an endpoint that takes nothing from others: as with Add, the error is a *ConflictError where
// another owner has an element of the new one, or what excludes it, and nothing has changed then. The owner's own
// elements are no conflict. So an endpoint that was guarded by Add before its port was there gets its host ports by
// this, and is guarded throughout.
func (c *Conn) Update(ctx context.Context, old, next Endpoint) error {
	comment := ownerComment(next.Owner, ruleset.NetworkKey(next.Network))
	return c.move(ctx, old, next, func(is []*ruleset.ElementState) error {
		for _, el := range is {
			if el != nil && el.Comment != comment {
				return newConflict(c.tables.Name, *el, next.portOf(el.Element))
			}
		}
		return nil
	})
}

// move is both; refuse is nil where everything is taken over.
func (c *Conn) move(ctx context.Context, old, next Endpoint, refuse func(is []*ruleset.ElementState) error) error {
	for _, ep := range []*Endpoint{&old, &next} {
		if err := ep.check(); err != nil {
			return err
		}
	}
	if old.Owner != next.Owner || old.Network != next.Network {
		return invalid("endpoint %s of network %s cannot become %s of %s", old.Owner, old.Network, next.Owner, next.Network)
	}
	group, comment := next.commented(), ownerComment(next.Owner, ruleset.NetworkKey(next.Network))
	var gone []ruleset.ElementState
	known := make(map[string]bool, len(group))
	for i := range group {
		known[group[i].ID()] = true
	}
	for _, el := range append(old.traces(), next.leftovers()...) {
		if id := el.ID(); !known[id] {
			known[id] = true
			gone = append(gone, ruleset.ElementState{Element: el, Comment: comment})
		}
	}
	return explainMissing(c.replace(ctx, group, gone, refuse))
}

// A port on all addresses and the same port on one address exclude each other, and are entries of two maps. The kernel
// refuses a key that is there, and knows nothing of one that must not be there elsewhere: so that is looked up, or
// listed, and the transaction is of the generation that was looked at.

// publishedPorts has the ports of the host that some elements publish: on all addresses, and on one.
type publishedPorts map[string][2]bool

func publishedBy(elements []ruleset.Element) publishedPorts {
	list := publishedPorts{}
	for _, el := range elements {
		if port, onAll := el.HostPort(); port != "" {
			is := list[port]
			list[port] = [2]bool{is[0] || onAll, is[1] || !onAll}
		}
	}
	return list
}

// exclude reports whether one of the elements excludes this one.
func (list publishedPorts) exclude(el ruleset.Element) bool {
	port, onAll := el.HostPort()
	return onAll && list[port][1] || !onAll && list[port][0]
}

// findExcluding gives what is there and excludes some of several elements.
func (c *Conn) findExcluding(elements []ruleset.Element) ([]*ruleset.ElementState, error) {
	var onAll []ruleset.Element
	var onOne []ruleset.Place // maps of ports, in which any may be
	asked := publishedBy(elements)
	for _, f := range ruleset.Families() {
		one, done := ruleset.InInet(f.HostAddrs), map[string]bool{}
		for _, el := range elements {
			switch el.Set {
			case one:
				all := ruleset.Element{Set: ruleset.InInet(f.HostPorts), Key: el.Key[f.AddrLen:]}
				if !done[string(all.Key)] {
					done[string(all.Key)] = true
					onAll = append(onAll, all)
				}
			case ruleset.InInet(f.HostPorts):
				onOne = append(onOne, one)
			}
		}
	}
	have, err := c.tables.Lookup(onAll)
	if err != nil {
		return nil, err
	}
	excluding := slices.DeleteFunc(have, func(el *ruleset.ElementState) bool { return el == nil })
	all, err := c.tables.ElementsOf(slices.Compact(onOne))
	for i := range all {
		if asked.exclude(all[i].Element) {
			excluding = append(excluding, &all[i])
		}
	}
	return excluding, err
}

// portOf names the port of the endpoint's that an entry is for, or excludes, as it was asked for; "" for elements of
// other sets.
func (ep *Endpoint) portOf(el ruleset.Element) string {
	for _, p := range ep.Ports {
		for _, a := range ep.firstAddrs() {
			for i := range max(p.Count, 1) {
				if pub, ok := p.on(a, i); ok && (el.Equal(pub.element()) || el.Excludes(pub.element())) {
					return p.String()
				}
			}
		}
	}
	return ""
}
