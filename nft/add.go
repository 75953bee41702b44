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

// Add adds an endpoint, in one transaction with a few elements. Its time does not grow with the number of endpoints.
//
// If one of the elements exists, or one that excludes it, the error is a *ConflictError, which matches fs.ErrExist. A
// port on all addresses and the same port on one address of the family exclude each other. See Replace. If the table
// or a set is missing, the error matches fs.ErrNotExist, and Ensure can repair it. After an error, nothing was added.
func (c *Conn) Add(ctx context.Context, ep Endpoint) error {
	if err := ep.check(); err != nil {
		return err
	}

	elements, comment := ep.elements(), ep.comment()
	return c.retry(ctx, func() error {
		// Reuse the last known generation. If it is outdated, the kernel refuses the transaction, and c.retry tries
		// again with a new one.
		generation := c.seen.Generation()
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

// findConflict returns the error for the element that makes the kernel refuse an endpoint's elements, and for its
// owner.
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

	return nftnl.ErrOvertaken // it is gone again
}

// explainMissing adds an explanation to the error about a missing set.
func explainMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the network's firewall is not (or no longer) set up: %w", err)
	}
	return err
}

// Replace adds endpoints even if others' elements are in the way. It leaves correct elements alone. It takes over the
// elements of other owners, and published ports that exclude those of the endpoints. In the same transaction it
// removes the elements that a guarded endpoint needed before it had an address or without SLAAC. For other former
// addresses see Move. Each endpoint is added completely, or stays as it was. After an error, the endpoints before the
// failed one have been added.
//
// Replace is for a caller that knows the endpoint to be right: if a stale element is in a new pod's way, or after
// Ensure created a set again. The error matches fs.ErrNotExist if the table or a set is missing.
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
			gone = append(gone, ruleset.ElementState{Element: el, Comment: eps[i].comment()})
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

// commented returns an endpoint's elements with its comment.
func (ep *Endpoint) commented() []ruleset.ElementState {
	comment := ep.comment()
	var list []ruleset.ElementState
	for _, el := range ep.elements() {
		list = append(list, ruleset.ElementState{Element: el, Comment: comment})
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

// replace adds the elements of group in place of elements with the same keys and of those that exclude them. It
// removes the elements in gone, if they exist with their comments. No element is in both lists. refuse, unless nil,
// is called with the elements to be replaced, and its error ends the call.
func (c *Conn) replace(ctx context.Context, group, gone []ruleset.ElementState,
	refuse func(is []*ruleset.ElementState) error) error {
	elements := withoutComments(group)
	if i := slices.IndexFunc(elements, publishedBy(elements).exclude); i >= 0 {
		return newConflict(c.tables.Name, group[i], "")
	}

	return c.change(ctx, c.commitEndpoints, func(t *ruleset.Transaction) error {
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

		// An element that excludes one of the group may be in gone too. If two elements of the group contradict each
		// other, the kernel refuses them.
		settled := map[string]bool{}
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

		return nil
	})
}

// Move changes an endpoint from old to next in one transaction, for example when its lease gave it another address or
// its first one. A reader sees either the old elements or the new ones, and so do packets, except for a packet that a
// rule on another processor is handling at that moment. So a guarded port is never open and never shut, and a
// published port always leads to one of the addresses.
//
// old and next have the same Owner and Network. Move adds the elements of next like Replace. It removes the elements
// that only old has like Remove, if they exist and belong to the owner. So it may be called again, and surplus
// elements in old do no harm. Existing connections keep their address.
//
// The error matches fs.ErrNotExist if the table or a set is missing. Ensure can repair this, and nothing has changed
// then.
func (c *Conn) Move(ctx context.Context, old, next Endpoint) error {
	return c.move(ctx, old, next, nil)
}

// Update is Move for an endpoint that takes nothing from others. As with Add, the error is a *ConflictError if
// another owner has an element of the new endpoint or one that excludes it, and nothing has changed then. The owner's
// own elements are no conflict. Thus an endpoint that Add guarded before its port existed gets its host ports, and is
// guarded throughout.
func (c *Conn) Update(ctx context.Context, old, next Endpoint) error {
	comment := next.comment()
	return c.move(ctx, old, next, func(is []*ruleset.ElementState) error {
		for _, el := range is {
			if el != nil && el.Comment != comment {
				return newConflict(c.tables.Name, *el, next.portOf(el.Element))
			}
		}
		return nil
	})
}

// move implements Move and Update. refuse is nil if everything is taken over.
func (c *Conn) move(ctx context.Context, old, next Endpoint, refuse func(is []*ruleset.ElementState) error) error {
	for _, ep := range []*Endpoint{&old, &next} {
		if err := ep.check(); err != nil {
			return err
		}
	}

	if old.Owner != next.Owner || old.Network != next.Network {
		return invalid("endpoint %s of network %s cannot become %s of %s", old.Owner, old.Network, next.Owner,
			next.Network)
	}

	group, comment := next.commented(), next.comment()
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

// A port on all addresses and the same port on one address exclude each other. They are entries of two maps. The
// kernel refuses an existing key, but does not know that a key in another map must not exist. So this package looks
// that key up, or lists the map, and ties the transaction to the generation that it has seen.

// publishedPorts holds the host ports that some elements publish: on all addresses, and on one address.
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

// exclude reports whether one of the elements excludes el.
func (list publishedPorts) exclude(el ruleset.Element) bool {
	port, onAll := el.HostPort()
	return onAll && list[port][1] || !onAll && list[port][0]
}

// findExcluding returns the existing elements that exclude some of the given elements.
func (c *Conn) findExcluding(elements []ruleset.Element) ([]*ruleset.ElementState, error) {
	var onAll []ruleset.Element
	var onOne []ruleset.Place // maps of ports; each entry may be an excluding one
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

// portOf returns the requested name of the endpoint's port that an element publishes or excludes, or "" for elements
// of other sets.
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
