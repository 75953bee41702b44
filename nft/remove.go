package nft

import (
	"context"
	"errors"
	"slices"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// Remove removes endpoints that may or may not be there. Their elements are looked up by bridge, addresses, MAC and
// ports, as Add had them, and deleted only if their comments name the owner: an address that belongs to another by
// now stays with it. Elements that the caller does not know any more are left; see RemoveOwners.
//
// The kernel frees what was deleted after an RCU grace period. It does not make
// the caller wait for that, until the connection is closed (see Close).
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

// RemoveOwners removes all elements of the owners, by listing all elements: for when only the owner of an endpoint
// is known, and after a crash.
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

// removeElements deletes those elements that are there and match. Deleting goes by
// the key alone, and by then it may be another's: so the kernel is told which
// generation was looked at.
func (c *Conn) removeElements(ctx context.Context, elements []ruleset.Element, match func(*ruleset.ElementState) bool) error {
	var errs []error
	for group := range slices.Chunk(elements, ruleset.GroupSize) {
		errs = append(errs, c.retry(ctx, func() error {
			generation, err := nftnl.SeenGeneration(c.tables.Conn)
			if err != nil {
				return err
			}
			have, err := c.tables.Lookup(group)
			if err != nil {
				return err
			}
			t := c.tables.Begin(&generation)
			for i, el := range have {
				// Endpoints of one owner may share some.
				if el != nil && match(el) && !slices.ContainsFunc(group[:i], group[i].Equal) {
					t.DelElement(el.Element)
				}
			}
			return c.commitEndpoints(t)
		}))
	}
	return errors.Join(errs...)
}

// RemoveNetwork removes a network that may or may not be there: what endpoints left behind, its sets and its chain.
// With the last of them goes the table. It does not wait for endpoints to be removed first: their elements go too.
//
// A network without masquerade, bridge and endpoints leaves no trace in the table, so
// the table may go before such a network does. Of networks that share a bridge, one
// takes along what is known of the bridge. Ready then says so, for what is left.
func (c *Conn) RemoveNetwork(ctx context.Context, name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	key := ruleset.NetworkKey(name)
	err := c.removeWhere(ctx, func(el *ruleset.ElementState) bool {
		_, network, ok := ownerOf(el)
		return ok && network == key || el.IsNetwork(key)
	})
	c.seen.Drop() // what is known of the bridge was more than an endpoint's
	if err != nil {
		return err
	}
	return c.retry(ctx, func() error {
		generation, err := nftnl.SeenGeneration(c.tables.Conn)
		if err != nil {
			return err
		}
		inventories, inUse, err := c.inventories(key)
		if err != nil {
			return err
		}
		t := c.tables.Begin(&generation)
		for _, inv := range inventories {
			inv.RemoveNetwork(t, key, inUse)
		}
		return explainBusy(t.Commit(c.tables.Conn))
	})
}

// RemoveShare removes the rules of the Share of a bridge, with what endpoints have there: the pods are cut off from the
// LAN. It is no error if there are none. Networks on the bridge are not Ready until Ensure is called with another Share
// or without any.
func (c *Conn) RemoveShare(ctx context.Context, bridge string) error {
	if isNoLinkName(bridge) {
		return invalid("%.40q cannot be the name of a bridge"+ident.LinkNameForm, bridge)
	}

	return c.retry(ctx, func() error {
		generation, err := nftnl.SeenGeneration(c.tables.Conn)
		if err != nil {
			return err
		}
		inventories, _, err := c.inventories("")
		if err != nil {
			return err
		}

		t := c.tables.Begin(&generation)
		for _, inv := range inventories {
			inv.RemoveShare(t, bridge)
		}
		return explainBusy(t.Commit(c.tables.Conn))
	})
}

// HasNetwork says whether RemoveNetwork would delete anything: what is this network's, or a table
// in which nothing is any network's. It changes nothing.
func (c *Conn) HasNetwork(ctx context.Context, name string) (bool, error) {
	if err := checkName(name); err != nil {
		return false, err
	}
	key, has := ruleset.NetworkKey(name), false
	err := c.retry(ctx, func() error {
		inventories, inUse, err := c.inventories(key)
		has = slices.ContainsFunc(inventories, func(inv *ruleset.Inventory) bool {
			return inv.Table && !inUse || inv.Has(key) || slices.ContainsFunc(inv.Elements, func(el ruleset.ElementState) bool {
				_, network, ok := ownerOf(&el)
				return ok && network == key
			})
		})
		return err
	})
	return has, err
}

// inventories are those of our tables, and say whether another network than that of a key has anything there.
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
