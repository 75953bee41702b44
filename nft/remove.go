package nft

import (
	"context"
	"errors"
	"slices"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// Remove deletes the elements of endpoints. It is no error if an endpoint does not exist. Remove looks up the
// elements by bridge, addresses, MAC and ports, as Add creates them, and deletes only elements whose comment names
// the owner. So an address that now belongs to another endpoint stays. Elements that Add would not create for eps
// stay too: see RemoveOwners.
//
// The kernel frees deleted objects after an RCU grace period. Only Close waits for that.
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

// RemoveOwners deletes all elements of the owners. It lists all elements to find them. Use it after a crash, or if
// only the owner of an endpoint is known.
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

// removeWhere deletes all elements for which match returns true.
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

// removeElements deletes the elements that exist and for which match returns true. The kernel deletes an element by
// key alone, and another owner could take over the key in between. So the transaction is tied to the nf_tables
// generation of the lookup: the kernel refuses it after any other change.
func (c *Conn) removeElements(ctx context.Context, elements []ruleset.Element,
	match func(*ruleset.ElementState) bool) error {
	var errs []error
	for group := range slices.Chunk(elements, ruleset.GroupSize) {
		errs = append(errs, c.change(ctx, c.commitEndpoints, func(t *ruleset.Transaction) error {
			have, err := c.tables.Lookup(group)
			for i, el := range have {
				// Endpoints of one owner may share elements, so delete each only once.
				if el != nil && match(el) && !slices.ContainsFunc(group[:i], group[i].Equal) {
					t.DelElement(el.Element)
				}
			}
			return err
		}))
	}

	return errors.Join(errs...)
}

// RemoveNetwork deletes the chains and sets of a network, and all elements of its endpoints, even if the endpoints
// have not been removed. It is no error if the network does not exist. With the last network, RemoveNetwork deletes
// the tables.
//
// A network without masquerading, bridge and endpoints leaves no trace in the tables. So removing another network may
// delete the tables while such a network still needs them. If networks share a bridge, removing one also deletes the
// set elements that describe the bridge. Afterwards Ready returns false for the other networks until Ensure is
// called.
func (c *Conn) RemoveNetwork(ctx context.Context, name string) error {
	if err := checkName(name); err != nil {
		return err
	}

	key := ruleset.NetworkKey(name)
	err := c.removeWhere(ctx, func(el *ruleset.ElementState) bool {
		return isOf(el, key) || el.IsNetwork(key)
	})
	c.verified.Drop() // sets and chains have changed, not only elements
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

// RemoveShare deletes the rules and sets of a bridge's Share. This disconnects the pods from the LAN. It is no error
// if the bridge has no Share. For networks on the bridge, Ready returns false until Ensure is called again, with a
// Share or without one.
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

// HasNetwork reports whether RemoveNetwork would delete anything: an object of the network, or tables that no network
// uses.
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

// inventories returns the content of all our tables. inUse reports whether a network other than key has an object in
// one of them.
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
