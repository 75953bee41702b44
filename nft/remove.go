package nft

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Remove removes endpoints that may or may not be there. Their elements are looked
// up by bridge, addresses, MAC and ports, as Add had them, and deleted only if their
// comments name the owner: an address that belongs to another by now stays with it.
// What is not known any more is left; see RemoveOwners.
//
// The kernel frees what was deleted after an RCU grace period. It does not make
// the caller wait for that, until the connection is closed (see Close).
func (c *Conn) Remove(ctx context.Context, eps ...Endpoint) error {
	if err := c.usable(ctx); err != nil {
		return err
	}

	var elements []element
	owners := map[Owner]bool{}
	for i := range eps {
		if err := eps[i].check(); err != nil {
			return err
		}
		elements = append(elements, eps[i].traces()...)
		owners[eps[i].Owner] = true
	}
	return c.removeElements(ctx, elements, func(el *elementState) bool {
		owner, _, ok := el.owner()
		return ok && owners[owner]
	})
}

// RemoveOwners removes whatever carries one of the owners' names, by listing all
// elements: for when nothing is known of an endpoint but its owner, and for what a
// crash left behind.
func (c *Conn) RemoveOwners(ctx context.Context, owners ...Owner) error {
	if err := c.usable(ctx); err != nil {
		return err
	}

	doomed := make(map[Owner]bool, len(owners))
	for _, o := range owners {
		if err := o.check(); err != nil {
			return err
		}
		doomed[o] = true
	}
	return c.removeWhere(ctx, func(el *elementState) bool {
		owner, _, ok := el.owner()
		return ok && doomed[owner]
	})
}

// removeWhere deletes all elements that match.
func (c *Conn) removeWhere(ctx context.Context, match func(*elementState) bool) error {
	all, err := c.elements(ctx)
	if err != nil {
		return err
	}
	var elements []element
	for i := range all {
		if match(&all[i]) {
			elements = append(elements, all[i].element)
		}
	}
	return c.removeElements(ctx, elements, match)
}

// removeElements deletes those elements that are there and match. Deleting goes by
// the key alone, and by then it may be another's: so the kernel is told which
// generation was looked at.
func (c *Conn) removeElements(ctx context.Context, elements []element, match func(*elementState) bool) error {
	var errs []error
	for group := range slices.Chunk(elements, groupSize) {
		errs = append(errs, nftnl.Retry(ctx, func() error {
			generation, err := c.settle()
			if err != nil {
				return err
			}
			have, err := c.lookup(group)
			if err != nil {
				return err
			}
			t := c.table.begin(&generation)
			for i, el := range have {
				// Endpoints of one owner may share some.
				if el != nil && match(el) && !slices.ContainsFunc(group[:i], group[i].equal) {
					t.delElement(el.element)
				}
			}
			return c.commitEndpoints(t)
		}))
	}
	if hasClaims(elements) {
		errs = append(errs, c.sweepClaims(ctx))
	}
	return errors.Join(errs...)
}

// RemoveNetwork removes a network that may or may not be there: what endpoints
// left behind, its sets and its chain. With the last of them goes the table. It does
// not wait for endpoints to be removed first: what they have is gone.
//
// A network without masquerade, bridge and endpoints leaves no trace in the table, so
// the table may go before such a network does. Of networks that share a bridge, one
// takes along what is known of the bridge. Ready then says so, for what is left.
func (c *Conn) RemoveNetwork(ctx context.Context, name string) error {
	if err := c.usable(ctx); err != nil {
		return err
	}

	if err := checkName(name); err != nil {
		return err
	}
	key := networkKey(name)
	err := c.removeWhere(ctx, func(el *elementState) bool {
		_, network, ok := el.owner()
		return ok && network == key || el.isNetwork(key)
	})
	c.cache.Drop() // what is known of the bridge was more than an endpoint's
	if err != nil {
		return err
	}
	return nftnl.Retry(ctx, func() error {
		generation, err := c.settle()
		if err != nil {
			return err
		}
		var inventories []*inventory
		inUse := false
		for _, family := range ourFamilies() {
			inv, err := c.inventory(family)
			if err != nil {
				return err
			}
			inventories = append(inventories, inv)
			inUse = inUse || inv.inUse(key)
		}
		t := c.table.begin(&generation)
		for _, inv := range inventories {
			inv.removeNetwork(t, key, inUse)
		}
		return explainBusy(t.Commit(c.nl))
	})
}

// inventory is what our table of a family has in it.
type inventory struct {
	family   uint8
	table    bool
	chains   []place
	sets     []place
	elements []elementState
}

// inventory looks up all there is, in several listings. A transaction with a
// generation from before them is refused if they do not fit together.
func (c *Conn) inventory(family uint8) (*inventory, error) {
	inv := &inventory{family: family}
	var b nl.Batch
	c.table.getTable(&b, family, func([]byte) error { inv.table = true; return nil })
	if err := nftnl.Look(c.nl, &b); err != nil || !inv.table {
		return inv, err
	}
	err := c.dumpChains(family, func(data []byte) error {
		ch, err := nftnl.DecodeChain(data)
		if ch.Table == string(c.table) {
			inv.chains = append(inv.chains, place{family, ch.Name})
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if inv.sets, err = c.setNames(family); err != nil {
		return nil, err
	}
	inv.elements, err = c.elementsOf(inv.sets)
	return inv, err
}

// removeNetwork deletes what a network has in the table, and with the last one the
// table itself: the last in any of the tables, since in each there are chains that are
// for all networks and name none.
func (inv *inventory) removeNetwork(t *transaction, key string, inUse bool) {
	switch {
	case !inv.table:
		return
	case !inUse:
		t.delTable(inv.family)
		return
	}
	for _, at := range inv.chains {
		if networkOf(at.name) == key {
			t.delChain(at)
		}
	}
	for _, at := range inv.sets {
		if networkOf(at.name) == key {
			t.delSet(at)
		}
	}
}

// inUse says that something of another network than that of a key is there.
func (inv *inventory) inUse(key string) bool {
	other := func(at place) bool {
		owner := networkOf(at.name)
		return owner != "" && owner != key
	}
	// A claim is nobody's.
	inUse := func(el elementState) bool { return el.comment != claimComment }
	return slices.ContainsFunc(inv.elements, inUse) || slices.ContainsFunc(inv.chains, other) || slices.ContainsFunc(inv.sets, other)
}

// networkOf gives the key of the network that a chain or a set belongs to, "" if
// all share it.
func networkOf(name string) string {
	for _, prefix := range []string{masqueradePrefix, masquerade4Prefix, masquerade6Prefix, dedupPrefix, quietPrefix} {
		if key, ok := strings.CutPrefix(name, prefix); ok {
			return key
		}
	}
	return ""
}
