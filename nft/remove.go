package nft

import (
	"context"
	"errors"
	"slices"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// Remove removes endpoints, which need not exist. It looks up their elements by bridge, addresses, MAC and ports, as
// for Add, and deletes only those whose comments name the owner. An address that now belongs to another endpoint
// stays. Elements that are not in eps stay too: see RemoveOwners.
//
// The kernel frees deleted objects after an RCU grace period. It makes the caller wait for that only when the
// connection is closed (see Close).
func (c *Conn) Remove(ctx context.Context, eps ...Endpoint) error {
	var elements []ruleset.Element
	owners := map[Owner]bool{}
	for i := range eps {
		if err := eps[i].check(); err != nil {
			return err
		}
		elements = append(elements, eps[i].traces()...)
		owners[eps[i].Owner] = true
	}

	return c.removeElements(ctx, elements, func(el *ruleset.ElementState) bool {
		owner, _, ok := ownerOf(el)
		return ok && owners[owner]
	})
}

// RemoveOwners removes all elements of the owners, by listing all elements. It is for callers that only know the
// owner of an endpoint, and for use after a crash.
func (c *Conn) RemoveOwners(ctx context.Context, owners ...Owner) error {
	doomed := make(map[Owner]bool, len(owners))
	for _, o := range owners {
		if err := o.check(); err != nil {
			return err
		}
		doomed[o] = true
	}
	return c.removeWhere(ctx, func(el *ruleset.ElementState) bool {
		owner, _, ok := ownerOf(el)
		return ok && doomed[owner]
	})
}

// removeWhere deletes all elements that match.
func (c *Conn) removeWhere(ctx context.Context, match func(*ruleset.ElementState) bool) error {
	all, err := c.elements(ctx)
	if err != nil {
		return err
	}

	var elements []ruleset.Element
	for i := range all {
		if match(&all[i]) {
			elements = append(elements, all[i].Element)
		}
	}
	return c.removeElements(ctx, elements, match)
}

// removeElements deletes the elements that exist and match. The kernel deletes by the key alone, and by then the key
// may belong to another owner. So the transaction is tied to the generation that was examined.
func (c *Conn) removeElements(ctx context.Context, elements []ruleset.Element,
	match func(*ruleset.ElementState) bool) error {
	var errs []error
	for group := range slices.Chunk(elements, ruleset.GroupSize) {
		errs = append(errs, c.change(ctx, c.commitEndpoints, func(t *ruleset.Transaction) error {
			have, err := c.tables.Lookup(group)
			for i, el := range have {
				// Endpoints of one owner may share some.
				if el != nil && match(el) && !slices.ContainsFunc(group[:i], group[i].Equal) {
					t.DelElement(el.Element)
				}
			}
			return err
		}))
	}

	return errors.Join(errs...)
}

// RemoveNetwork removes a network, which need not exist: elements left by endpoints, its sets and its chain. With the
// last network the table is deleted. It does not wait for endpoints to be removed first: their elements are deleted
// too.
//
// A network without masquerade, bridge and endpoints has nothing in the table, so the table may be deleted before
// such a network. If networks share a bridge, removing one of them also removes the facts about the bridge. Then
// Ready is false for the others.
func (c *Conn) RemoveNetwork(ctx context.Context, name string) error {
	if err := checkName(name); err != nil {
		return err
	}

	key := ruleset.NetworkKey(name)
	err := c.removeWhere(ctx, func(el *ruleset.ElementState) bool {
		return isOf(el, key) || el.IsNetwork(key)
	})
	c.seen.Drop() // more than elements of endpoints has changed
	if err != nil {
		return err
	}

	return c.change(ctx, c.commit, func(t *ruleset.Transaction) error {
		inventories, inUse, err := c.inventories(key)
		for _, inv := range inventories {
			inv.RemoveNetwork(t, key, inUse)
		}
		return err
	})
}

// RemoveShare removes the rules of a bridge's Share, and the endpoints' elements in their sets. This cuts the pods off
// from the LAN. It is no error if the bridge has no Share. Networks on the bridge are not Ready until Ensure is called
// with another Share or with none.
func (c *Conn) RemoveShare(ctx context.Context, bridge string) error {
	if isNoLinkName(bridge) {
		return invalid("%.40q cannot be the name of a bridge"+ident.LinkNameForm, bridge)
	}

	return c.change(ctx, c.commit, func(t *ruleset.Transaction) error {
		inventories, _, err := c.inventories("")
		for _, inv := range inventories {
			inv.RemoveShare(t, bridge)
		}
		return err
	})
}

// HasNetwork reports whether RemoveNetwork would delete anything: an object of this network, or a table without any
// network. It changes nothing.
func (c *Conn) HasNetwork(ctx context.Context, name string) (bool, error) {
	if err := checkName(name); err != nil {
		return false, err
	}

	key, has := ruleset.NetworkKey(name), false
	err := c.retry(ctx, func() error {
		inventories, inUse, err := c.inventories(key)
		has = slices.ContainsFunc(inventories, func(inv *ruleset.Inventory) bool {
			return inv.Table && !inUse || inv.Has(key) ||
				slices.ContainsFunc(inv.Elements, func(el ruleset.ElementState) bool { return isOf(&el, key) })
		})
		return err
	})

	return has, err
}

// inventories returns the inventories of our tables, and reports whether a network with another key has anything
// there.
func (c *Conn) inventories(key string) (list []*ruleset.Inventory, inUse bool, _ error) {
	for _, family := range ruleset.OurFamilies() {
		inv, err := c.tables.Inventory(family)
		if err != nil {
			return nil, false, err
		}
		list = append(list, inv)
		inUse = inUse || inv.InUse(key)
	}
	return list, inUse, nil
}
