package nft

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Add adds an endpoint: one transaction of a few elements, however many are there.
//
// The error is a *ConflictError, which matches fs.ErrExist, where one of them is
// there already, or what excludes it: a port on all addresses and the same port on
// one of the same family. See Replace. It matches fs.ErrNotExist where the table or a set is
// missing, for which Ensure is the cure. Nothing is added then.
func (c *Conn) Add(ctx context.Context, ep Endpoint) error {
	if err := c.usable(ctx); err != nil {
		return err
	}

	if err := ep.check(); err != nil {
		return err
	}
	elements := ep.elements()
	comment := ownerComment(ep.Owner, networkKey(ep.Network))
	excluded := rivals(elements)
	return nftnl.Retry(ctx, func() error {
		generation, clear, err := c.without(excluded)
		if err != nil {
			return explainMissing(err)
		}
		if !clear {
			return explainMissing(c.addLooking(&ep, elements, comment))
		}
		if generation == nil {
			generation = c.cache.Generation()
		}
		t := c.table.begin(generation)
		t.addEndpoint(elements, comment)
		err = c.commitEndpoints(t)
		if errors.Is(err, fs.ErrExist) {
			err = c.addLooking(&ep, elements, comment)
		}
		return explainMissing(err)
	})
}

// without says whether none of several elements is there, and in which generation
// that is so: in any, nil, where nothing has to be looked for.
func (c *Conn) without(elements []element) (*uint32, bool, error) {
	if len(elements) == 0 {
		return nil, true, nil
	}
	generation, err := c.settle()
	if err != nil {
		return nil, false, err
	}
	have, err := c.lookup(elements)
	for _, el := range have {
		if el != nil {
			return nil, false, err
		}
	}
	return &generation, true, err
}

// addLooking adds elements after one was refused, which nothing but an abandoned
// claim may have been the reason of. Else it says who has what.
func (c *Conn) addLooking(ep *Endpoint, elements []element, comment string) error {
	generation, err := c.settle()
	if err != nil {
		return err
	}
	have, err := c.lookup(elements)
	if err != nil {
		return err
	}
	for i, el := range have {
		if el != nil {
			return c.table.newConflict(*el, ep.portOf(elements[i]))
		}
	}
	rivals, err := c.findRivals(elements)
	switch {
	case err != nil:
		return err
	case len(rivals.held) > 0:
		return c.table.newConflict(rivals.held[0], ep.portAgainst(rivals.held[0].element))
	case len(rivals.abandoned) == 0:
		return nftnl.ErrOvertaken // gone again
	}
	t := c.table.begin(&generation)
	for _, claim := range rivals.abandoned {
		t.delElement(claim.element)
	}
	t.addEndpoint(elements, comment)
	return c.commitEndpoints(t)
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
	var group, gone []commented
	for i := range eps {
		group = append(group, eps[i].commented()...)
		for _, el := range eps[i].leftovers() {
			gone = append(gone, commented{el, group[len(group)-1].comment})
		}
		if len(group) < groupSize && i < len(eps)-1 {
			continue
		}
		if err := c.replace(ctx, group, gone, nil); err != nil {
			return explainMissing(err)
		}
		group, gone = group[:0], gone[:0]
	}
	return nil
}

// groupSize is about how many elements are looked up and changed at once: few
// enough for the answers to fit into the socket's default buffer (212,992 bytes).
const groupSize = 32

type commented struct {
	element
	comment string
}

// commented gives an endpoint's elements with its comment.
func (ep *Endpoint) commented() []commented {
	comment := ownerComment(ep.Owner, networkKey(ep.Network))
	elements := ep.elements()
	list := make([]commented, len(elements))
	for i, el := range elements {
		list[i] = commented{el, comment}
	}
	return list
}

func withoutComments(list []commented) []element {
	elements := make([]element, len(list))
	for i := range list {
		elements[i] = list[i].element
	}
	return elements
}

// replace adds elements whatever is there, and removes those that are gone, if they
// are there with their comments. None is in both lists. Unless it is nil, refuse says
// what stands against it, by what is there in the places of the group, and by its rivals.
func (c *Conn) replace(ctx context.Context, group, gone []commented, refuse func([]*elementState, *found) error) error {
	elements := withoutComments(group)
	return nftnl.Retry(ctx, func() error {
		generation, err := c.settle()
		if err != nil {
			return err
		}
		have, err := c.lookup(slices.Concat(elements, withoutComments(gone)))
		if err != nil {
			return err
		}
		rivals, err := c.findRivals(elements)
		if err != nil {
			return err
		}
		if refuse != nil {
			if err := refuse(have[:len(elements)], rivals); err != nil {
				return err
			}
		}
		unclaimed, err := c.unclaimed(elements)
		if err != nil {
			return err
		}
		t := c.table.begin(&generation)
		t.delRivals(rivals, elements)
		for i, el := range have[len(elements):] {
			// One that excludes an element of the group is deleted with the rivals.
			if el != nil && el.comment == gone[i].comment && !slices.ContainsFunc(rivals.held, el.isSame) {
				t.delElement(el.element)
			}
		}
		for i, want := range group {
			switch {
			case have[i] == nil:
			case have[i].comment == want.comment && bytes.Equal(have[i].data, want.data):
				if claim, ok := want.claim(); ok && slices.ContainsFunc(unclaimed, claim.equal) {
					t.shareElement(claim, claimComment)
				}
				continue
			case slices.ContainsFunc(elements[:i], want.equal):
				// Two of these contradict each other: the kernel says so.
			default:
				t.delElement(want.element)
			}
			t.addOwned(want.element, want.comment)
		}
		for _, want := range group {
			if rival, ok := want.rival(); ok && slices.ContainsFunc(elements, rival.equal) {
				t.refuseRival(want.element, want.comment)
			}
		}
		return c.commitEndpoints(t)
	})
}

// isSame says that two are the same entry, whatever its data and comment.
func (e elementState) isSame(other elementState) bool { return e.equal(other.element) }

// lookup gets elements by their keys; those that are not there are nil.
func (c *Conn) lookup(elements []element) ([]*elementState, error) {
	have := make([]*elementState, len(elements))
	for start := 0; start < len(elements); start += groupSize {
		var b nl.Batch
		for i := start; i < min(start+groupSize, len(elements)); i++ {
			c.table.getElement(&b, elements[i], func(data []byte) error {
				list, err := decodeElements(elements[i].set.family, data)
				if len(list) == 1 && list[0].equal(elements[i]) {
					have[i] = &list[0]
				}
				return err
			})
		}
		// EINVAL: somebody made the set with keys of another length.
		if err := nftnl.Look(c.nl, &b, unix.EINVAL); err != nil {
			return nil, err
		}
	}
	return have, nil
}
