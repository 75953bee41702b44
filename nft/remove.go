package nft

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Remove removes endpoints that may or may not be there. Their elements are looked
// up by bridge, addresses and MAC, as Add had them, and deleted only if their
// comments name the owner: an address that belongs to another by now stays with it.
//
// The kernel frees what was deleted after an RCU grace period. It does not make
// the caller wait for that, until the connection is closed (see Close).
func (c *Conn) Remove(ctx context.Context, eps ...Endpoint) error {
	var elements []element
	owners := map[Owner]bool{}
	for i := range eps {
		if err := eps[i].check(); err != nil {
			return err
		}
		ep := eps[i]
		// What a record says about masquerade may be younger than the elements.
		ep.Masquerade = true
		elements = append(elements, ep.elements()...)
		owners[ep.Owner] = true
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
		errs = append(errs, retry(ctx, func() error {
			generation, err := c.settle()
			if err != nil {
				return err
			}
			have, err := c.lookup(group)
			if err != nil {
				return err
			}
			t := begin(&generation)
			for _, el := range have {
				if el != nil && match(el) {
					t.delElement(el.element)
				}
			}
			return c.commit(t)
		}))
	}
	return errors.Join(errs...)
}

// RemoveNetwork removes a network that may or may not be there: what endpoints
// left behind, its sets and its chain. With the last of them goes the table. It does
// not wait for endpoints to be removed first: what they have is gone.
//
// A network without masquerade and without endpoints leaves no trace in the table,
// so the table may go before such a network does; Ready then says so.
func (c *Conn) RemoveNetwork(ctx context.Context, name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	key := networkKey(name)
	err := c.removeWhere(ctx, func(el *elementState) bool {
		_, network, ok := el.owner()
		return ok && network == key
	})
	if err != nil {
		return err
	}
	return retry(ctx, func() error {
		inv, err := c.inventory()
		if err != nil || !inv.table {
			return err
		}
		t := begin(&inv.generation)
		if !inv.inUse(key) {
			t.delTable()
			return c.commit(t)
		}
		for _, name := range inv.chains {
			if name == masqueradePrefix+key {
				t.delChain(name)
			}
		}
		for _, name := range inv.sets {
			if name == masqueradeSet(true, key) || name == masqueradeSet(false, key) {
				t.delSet(name)
			}
		}
		return explainBusy(c.commit(t))
	})
}

// inventory is what our table has in it.
type inventory struct {
	generation uint32
	table      bool
	chains     []string
	sets       []string
	elements   []elementState
}

// inventory looks up all there is, in several listings. A transaction with its
// generation is refused if they do not fit together.
func (c *Conn) inventory() (*inventory, error) {
	generation, err := c.settle()
	if err != nil {
		return nil, err
	}
	inv := &inventory{generation: generation}
	var b nl.Batch
	getTable(&b, func([]byte) error { inv.table = true; return nil })
	if err := c.execute(&b); err != nil || !inv.table {
		return inv, err
	}
	err = c.dumpChains(func(data []byte) error {
		ch, err := decodeChain(data)
		if ch.table == tableName {
			inv.chains = append(inv.chains, ch.name)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if inv.sets, err = c.setNames(); err != nil {
		return nil, err
	}
	inv.elements, err = c.elementsOf(inv.sets)
	return inv, err
}

// inUse says that something of another network than that of a key is there.
func (inv *inventory) inUse(key string) bool {
	other := func(prefix string) func(string) bool {
		return func(name string) bool { return strings.HasPrefix(name, prefix) && name != prefix+key }
	}
	return len(inv.elements) > 0 ||
		slices.ContainsFunc(inv.chains, other(masqueradePrefix)) ||
		slices.ContainsFunc(inv.sets, other(masquerade4Prefix)) ||
		slices.ContainsFunc(inv.sets, other(masquerade6Prefix))
}
