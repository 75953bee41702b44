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

// Tables identifies our tables by their name, and holds a connection to their network namespace.
type Tables struct {
	Conn *nl.Conn
	Name TableName
}

// OurFamilies returns the families in which we may have a table.
func OurFamilies() [3]uint8 {
	return [...]uint8{unix.NFPROTO_INET, unix.NFPROTO_BRIDGE, unix.NFPROTO_NETDEV}
}

// setNames lists all sets in our table of a family. If the table does not exist, the result is empty.
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

// ElementsOf lists the elements of the given sets, without sentinels. It skips sets that are not ours or do not
// exist.
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

// ElementsOfSet lists the elements of a set, sorted by key. The kernel resizes the hash table of a set in the
// background. During that time, a listing may contain some elements twice and lack as many others. In that case, the
// error is nftnl.ErrOvertaken.
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

// dump lists the objects of a kind in our table of a family, and calls the callback each with every message. It
// cannot list chains, since the kernel lists the chains of all tables. The table's name has the same attribute in all
// kinds of messages.
func (t Tables) dump(what string, family uint8, msg uint16, each func([]byte) error) error {
	return nftnl.List(t.Conn, "list "+what, family, msg, each, nftnl.String(unix.NFTA_RULE_TABLE, string(t.Name)))
}

// Lookup looks up elements by their keys. The result has the same order. An entry is nil if the element does not
// exist.
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

		// Ignore EINVAL. The kernel returns it if another program created the set with keys of another length, so the
		// set cannot have our elements.
		if err := nftnl.ExecuteGets(t.Conn, &b, unix.EINVAL); err != nil {
			return nil, err
		}
	}

	return have, nil
}

// GroupSize is the approximate number of elements that one batch looks up or changes. With this number, the answers
// fit into the default buffer of a socket (212,992 bytes).
const GroupSize = 32

// Elements lists the elements of all our sets in all families, without sentinels.
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

// Inventory lists the content of our table of one family.
type Inventory struct {
	family   uint8
	Table    bool
	Elements []ElementState
	chains   []Place
	sets     []Place
}

// Inventory reads the content of the table with several requests. If something changes in between, the result may be
// inconsistent. A transaction with a generation from before the call then fails.
func (t Tables) Inventory(family uint8) (*Inventory, error) {
	inv := &Inventory{family: family}
	var b nl.Batch
	t.Name.getTable(&b, family, func([]byte) error { inv.Table = true; return nil })
	if err := nftnl.ExecuteGets(t.Conn, &b); err != nil || !inv.Table {
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

// RemoveNetwork deletes the chains and sets of a network from the table. If inUse is false, no other network exists,
// and it deletes the whole table, including the chains that all networks share.
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

// InUse reports whether the table contains a chain or set of a network other than key, or any element except the
// host's.
func (inv *Inventory) InUse(key string) bool {
	other := func(at Place) bool {
		owner := networkOf(at.Name)
		return owner != "" && owner != key
	}
	element := func(el ElementState) bool { return el.Comment != HostComment }
	return slices.ContainsFunc(inv.Elements, element) || slices.ContainsFunc(inv.chains, other) ||
		slices.ContainsFunc(inv.sets, other)
}

// Has reports whether the table contains a chain, set or element of the network itself.
func (inv *Inventory) Has(key string) bool {
	own := func(at Place) bool { return networkOf(at.Name) == key }
	return slices.ContainsFunc(inv.chains, own) || slices.ContainsFunc(inv.sets, own) ||
		slices.ContainsFunc(inv.Elements, func(el ElementState) bool { return el.IsNetwork(key) })
}

// networkOf returns the key of the network that a chain or set belongs to. For objects that all networks share, it
// returns "".
func networkOf(name string) string {
	for _, prefix := range []string{masqueradePrefix, masquerade4Prefix, masquerade6Prefix, dedupPrefix, quietPrefix} {
		if key, ok := strings.CutPrefix(name, prefix); ok {
			return key
		}
	}
	return ""
}
