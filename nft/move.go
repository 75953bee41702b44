package nft

import (
	"context"
	"slices"
)

// Move makes of an endpoint as it was one as it is by now, in one transaction: when
// its lease gave it another address, or its first one. Whoever looks sees all of the
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
func (c *Conn) Move(ctx context.Context, old, new Endpoint) error {
	for _, ep := range []*Endpoint{&old, &new} {
		if err := ep.check(); err != nil {
			return err
		}
	}
	if old.Owner != new.Owner || old.Network != new.Network {
		return invalid("endpoint %s of network %s cannot become %s of %s", old.Owner, old.Network, new.Owner, new.Network)
	}
	group := new.commented()
	var gone []commented
	for _, el := range append(old.traces(), new.leftovers()...) {
		isNew := func(c commented) bool { return c.equal(el) }
		if !slices.ContainsFunc(group, isNew) && !slices.ContainsFunc(gone, isNew) {
			gone = append(gone, commented{el, group[0].comment})
		}
	}
	if err := c.replace(ctx, group, gone); err != nil {
		return explainMissing(err)
	}
	if hasClaims(withoutComments(gone)) {
		return c.sweepClaims(ctx)
	}
	return nil
}
