package ruleset

import (
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Inventory is what our table of a family has in it.
type Inventory struct {
	family   uint8
	Table    bool
	Elements []ElementState
	chains   []Place
	sets     []Place
}

// Inventory looks up all there is, in several listings. A transaction with a
// generation from before them is refused if they do not fit together.
func (t Tables) Inventory(family uint8) (*Inventory, error) {
	inv := &Inventory{family: family}
	var b nl.Batch
	t.Name.getTable(&b, family, func([]byte) error { inv.Table = true; return nil })
	if err := nftnl.Look(t.Conn, &b); err != nil || !inv.Table {
		return inv, err
	}
	err := t.dump("chains", family, unix.NFT_MSG_GETCHAIN, func(data []byte) error {
		ch, err := nftnl.DecodeChain(data)
		if ch.Table == string(t.Name) {
			inv.chains = append(inv.chains, Place{family, ch.Name})
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if inv.sets, err = t.setNames(family); err != nil {
		return nil, err
	}
	inv.Elements, err = t.ElementsOf(inv.sets)
	return inv, err
}

// RemoveNetwork deletes what a network has in the table, and with the last one the
// table itself: the last in any of the tables, since in each there are chains that are
// for all networks and name none.
func (inv *Inventory) RemoveNetwork(t *Transaction, key string, inUse bool) {
	switch {
	case !inv.Table:
		return
	case !inUse:
		t.delTable(inv.family)
		return
	}
	for _, at := range inv.chains {
		if networkOf(at.Name) == key {
			t.delChain(at)
		}
	}
	for _, at := range inv.sets {
		if networkOf(at.Name) == key {
			t.delSet(at)
		}
	}
}

// InUse says that something of another network than that of a key is there.
func (inv *Inventory) InUse(key string) bool {
	other := func(at Place) bool {
		owner := networkOf(at.Name)
		return owner != "" && owner != key
	}
	return len(inv.Elements) > 0 || slices.ContainsFunc(inv.chains, other) || slices.ContainsFunc(inv.sets, other)
}

// Has says that a chain, a set or an element is a network's own.
func (inv *Inventory) Has(key string) bool {
	own := func(at Place) bool { return networkOf(at.Name) == key }
	return slices.ContainsFunc(inv.chains, own) || slices.ContainsFunc(inv.sets, own) ||
		slices.ContainsFunc(inv.Elements, func(el ElementState) bool { return el.IsNetwork(key) })
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
