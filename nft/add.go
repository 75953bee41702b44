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
		rivals, err := c.findRivals(elements)
		if err != nil {
			return explainMissing(err)
		}
		err = fs.ErrExist
		if len(rivals) == 0 {
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
	rivals, err := c.findRivals(elements)
	if err != nil {
		return err
	}
	for _, el := range append(have, rivals...) {
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

// Replace adds endpoints, whatever is there: elements that are right are left
// alone, those of other owners are taken over, and so are published ports that exclude
// those of the endpoints. What a guarded endpoint had as one without addresses, or
// without SLAAC, goes in the same transaction; for other addresses that it had, see
// Move. Each endpoint is all there or as it
// was before; of several, those before an error are there.
//
// It is for what the caller knows to be the truth: a stale element that stands in
// a new pod's way, or everything after Ensure had to make a set anew. The error
// matches fs.ErrNotExist where the table or a set is missing.
func (c *Conn) Replace(ctx context.Context, eps ...Endpoint) error {
	if err := c.usable(ctx); err != nil {
		return err
	}

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

// replace adds elements whatever is there, and removes those that are gone, if they
// are there with their comments. None is in both lists. Unless it is nil, refuse says
// what stands against it, by what is there in the places of the group, and its rivals.
func (c *Conn) replace(ctx context.Context, group, gone []ruleset.ElementState, refuse func(is []*ruleset.ElementState) error) error {
	elements := withoutComments(group)
	return c.retry(ctx, func() error {
		for i, el := range elements {
			if other := slices.IndexFunc(group[:i], func(e ruleset.ElementState) bool { return el.Excludes(e.Element) }); other >= 0 {
				return newConflict(c.tables.Name, group[other], "")
			}
		}
		generation, err := nftnl.SeenGeneration(c.tables.Conn)
		if err != nil {
			return err
		}
		have, err := c.tables.Lookup(slices.Concat(elements, withoutComments(gone)))
		if err != nil {
			return err
		}
		rivals, err := c.findRivals(elements)
		if err != nil {
			return err
		}
		if refuse != nil {
			if err := refuse(slices.Concat(have[:len(elements)], rivals)); err != nil {
				return err
			}
		}
		t := c.tables.Begin(&generation)
		for _, el := range rivals {
			t.DelElement(el.Element)
		}
		for i, el := range have[len(elements):] {
			// One that excludes an element of the group is deleted with the rivals.
			if el != nil && el.Comment == gone[i].Comment && !slices.ContainsFunc(rivals, func(r *ruleset.ElementState) bool { return r.Equal(el.Element) }) {
				t.DelElement(el.Element)
			}
		}
		for i, want := range group {
			switch {
			case have[i] == nil:
			case have[i].Comment == want.Comment && bytes.Equal(have[i].Data, want.Data):
				continue
			case slices.ContainsFunc(elements[:i], want.Equal):
				// Two of these contradict each other: the kernel says so.
			default:
				t.DelElement(want.Element)
			}
			t.NewElement(want.Element, want.Comment)
		}
		return c.commitEndpoints(t)
	})
}
