package ruleset

import (
	"bytes"
	"errors"
	"io/fs"
	"slices"
	"sort"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Tables are ours of one name, over a connection to the namespace that they are in.
type Tables struct {
	Conn *nl.Conn
	Name TableName
}

// OurFamilies are those of the tables that we may have.
func OurFamilies() [3]uint8 {
	return [...]uint8{unix.NFPROTO_INET, unix.NFPROTO_BRIDGE, unix.NFPROTO_NETDEV}
}

// setNames lists the sets of our table of a family, of which there may be none.
func (t Tables) setNames(family uint8) ([]Place, error) {
	var sets []Place
	err := t.dump("sets", family, unix.NFT_MSG_GETSET, func(data []byte) error {
		sets = append(sets, Place{family, nftnl.Text(nftnl.Find(data, unix.NFTA_SET_NAME))})
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return sets, err
}

// ElementsOf lists the elements of those sets that are ours, but for sentinels; others
// may be anything.
func (t Tables) ElementsOf(sets []Place) ([]ElementState, error) {
	var all []ElementState
	for _, at := range sets {
		if _, is := setAt(at); !is {
			continue
		}
		list, err := t.ElementsOfSet(at)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, el := range list {
			if el.Comment != SentinelComment {
				all = append(all, el)
			}
		}
	}
	return all, nil
}

// ElementsOfSet lists a set's elements by key. While the kernel grows or shrinks a
// set's hash table, which it does in the background, a listing may show elements
// twice and lack as many others, and does not say so. It is nftnl.ErrOvertaken then.
func (t Tables) ElementsOfSet(set Place) ([]ElementState, error) {
	var list []ElementState
	err := nftnl.List(t.Conn, "list elements of set "+set.Name, set.Family, unix.NFT_MSG_GETSETELEM, func(data []byte) error {
		list = append(list, DecodeElements(set.Family, data)...)
		return nil
	}, t.Name.named(set, unix.NFTA_SET_ELEM_LIST_SET)...)
	if err != nil {
		return nil, err
	}
	sort.Slice(list, func(i, j int) bool { return bytes.Compare(list[i].Key, list[j].Key) < 0 })
	all := len(list)
	list = slices.CompactFunc(list, func(a, b ElementState) bool { return a.Equal(b.Element) })
	if len(list) < all {
		return nil, nftnl.ErrOvertaken
	}
	return list, nil
}

// dump lists what our table of a family has, but for chains, which the kernel does not narrow down to a table. All
// kinds have the table's name in the same attribute.
func (t Tables) dump(what string, family uint8, msg uint16, each func([]byte) error) error {
	return nftnl.List(t.Conn, "list "+what, family, msg, each, nftnl.String(unix.NFTA_RULE_TABLE, string(t.Name)))
}

// Lookup gets elements by their keys; those that are not there are nil.
func (t Tables) Lookup(elements []Element) ([]*ElementState, error) {
	have := make([]*ElementState, len(elements))
	for start := 0; start < len(elements); start += GroupSize {
		var b nl.Batch
		for i := start; i < min(start+GroupSize, len(elements)); i++ {
			t.Name.getElement(&b, elements[i], func(data []byte) error {
				list := DecodeElements(elements[i].Set.Family, data)
				if len(list) == 1 && list[0].Equal(elements[i]) {
					have[i] = &list[0]
				}
				return nil
			})
		}
		// EINVAL: another program made the set with keys of another length.
		if err := nftnl.Look(t.Conn, &b, unix.EINVAL); err != nil {
			return nil, err
		}
	}
	return have, nil
}

// GroupSize is about how many elements are looked up and changed at once: few
// enough for the answers to fit into the socket's default buffer (212,992 bytes).
const GroupSize = 32

// Elements lists all elements of our sets.
func (t Tables) Elements() (all []ElementState, _ error) {
	for _, family := range OurFamilies() {
		sets, err := t.setNames(family)
		if err != nil {
			return nil, err
		}
		list, err := t.ElementsOf(sets)
		if err != nil {
			return nil, err
		}
		all = append(all, list...)
	}
	return all, nil
}

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
		if ch := nftnl.DecodeChain(data); ch.Table == string(t.Name) {
			inv.chains = append(inv.chains, Place{family, ch.Name})
		}
		return nil
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
	element := func(el ElementState) bool { return el.Comment != HostComment }
	return slices.ContainsFunc(inv.Elements, element) || slices.ContainsFunc(inv.chains, other) || slices.ContainsFunc(inv.sets, other)
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
