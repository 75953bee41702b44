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

// Tables are our tables with one name, over a connection to their namespace.
type Tables struct {
	Conn *nl.Conn
	Name TableName
}

// OurFamilies returns the families of the tables that we may have.
func OurFamilies() [3]uint8 {
	return [...]uint8{unix.NFPROTO_INET, unix.NFPROTO_BRIDGE, unix.NFPROTO_NETDEV}
}

// setNames lists the sets of our table of a family. The table need not exist.
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

// ElementsOf lists the elements of our sets, without sentinels. It skips sets that are not ours.
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

// ElementsOfSet lists a set's elements by key. While the kernel grows or shrinks a set's hash table, in the
// background, a listing may contain elements twice and lack as many others, without any notice. Then the error is
// nftnl.ErrOvertaken.
func (t Tables) ElementsOfSet(set Place) ([]ElementState, error) {
	var list []ElementState
	err := nftnl.List(t.Conn, "list elements of set "+set.Name, set.Family, unix.NFT_MSG_GETSETELEM,
		func(data []byte) error {
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

// dump lists objects in our table of a family. It is not for chains, since the kernel does not limit their listing to
// a table. All kinds have the table's name in the same attribute.
func (t Tables) dump(what string, family uint8, msg uint16, each func([]byte) error) error {
	return nftnl.List(t.Conn, "list "+what, family, msg, each, nftnl.String(unix.NFTA_RULE_TABLE, string(t.Name)))
}

// Lookup returns elements by their keys. Those that do not exist are nil.
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

		// EINVAL: another program created the set with keys of another length.
		if err := nftnl.Look(t.Conn, &b, unix.EINVAL); err != nil {
			return nil, err
		}
	}

	return have, nil
}

// GroupSize is the approximate number of elements that are looked up or changed at once. It is small enough for the
// answers to fit into the socket's default buffer (212,992 bytes).
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

// Inventory is the content of our table of a family.
type Inventory struct {
	family   uint8
	Table    bool
	Elements []ElementState
	chains   []Place
	sets     []Place
}

// Inventory looks up the content of the table, in several listings. If they do not fit together, a transaction with a
// generation from before them is refused.
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

// RemoveNetwork deletes a network's objects in the table. With the last network in any of the tables it deletes the
// table too, since each contains chains that are for all networks and name none.
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

// InUse reports whether an object of another network exists.
func (inv *Inventory) InUse(key string) bool {
	other := func(at Place) bool {
		owner := networkOf(at.Name)
		return owner != "" && owner != key
	}
	element := func(el ElementState) bool { return el.Comment != HostComment }
	return slices.ContainsFunc(inv.Elements, element) || slices.ContainsFunc(inv.chains, other) ||
		slices.ContainsFunc(inv.sets, other)
}

// Has reports whether a chain, a set or an element belongs to a network.
func (inv *Inventory) Has(key string) bool {
	own := func(at Place) bool { return networkOf(at.Name) == key }
	return slices.ContainsFunc(inv.chains, own) || slices.ContainsFunc(inv.sets, own) ||
		slices.ContainsFunc(inv.Elements, func(el ElementState) bool { return el.IsNetwork(key) })
}

// networkOf returns the key of the network that a chain or a set belongs to, or "" if all share it.
func networkOf(name string) string {
	for _, prefix := range []string{masqueradePrefix, masquerade4Prefix, masquerade6Prefix, dedupPrefix, quietPrefix} {
		if key, ok := strings.CutPrefix(name, prefix); ok {
			return key
		}
	}
	return ""
}
