package nft

import (
	"context"
	"slices"

	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// Move makes of an endpoint as it was one as it is by now, in one transaction: when
// its lease gave it another address, or its first one. A look sees all of the
// old or all of the new, and so do packets, but for one that a rule on another processor
// is just at: so a guarded port is open at no time, and shut at none, and a published
// port leads to one of the addresses or to the other.
//
// Both have the same Owner and Network. Of the new one, everything is added as Replace
// does it, whatever is there; what only the old one had is removed as Remove does it,
// if it is there and the owner's. So it is safe to call again, and an old one that says
// too much does no harm. Connections that exist keep the address they were led to.
//
// The error matches fs.ErrNotExist where the table or a set is missing, for which
// Ensure is the cure; nothing has changed then.
func (c *Conn) Move(ctx context.Context, old, next Endpoint) error {
	return c.move(ctx, old, next, nil)
}

// Update is Move for an endpoint that takes nothing from others: as with Add, the error
// is a *ConflictError where another owner has an element of the new one, or what excludes
// it, and nothing has changed then. What the owner itself has already is no conflict. So
// an endpoint that was guarded by Add before its port was there gets its host ports by
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
	for _, el := range append(old.traces(), next.leftovers()...) {
		isNew := func(c ruleset.ElementState) bool { return c.Equal(el) }
		if !slices.ContainsFunc(group, isNew) && !slices.ContainsFunc(gone, isNew) {
			gone = append(gone, ruleset.ElementState{Element: el, Comment: comment})
		}
	}
	return explainMissing(c.replace(ctx, group, gone, refuse))
}
