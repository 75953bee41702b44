package nft

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io/fs"
	"slices"
	"sort"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// Endpoints lists what the kernel has of a network's endpoints, or with "" of all
// networks', by owner. It tells from the elements what it can: an endpoint that lost
// some of them lacks those addresses or ports, and one may lack its bridge.
//
// A network whose name is too long for a comment goes by a shortened form of it,
// with a hash, unless it was asked for by name.
func (c *Conn) Endpoints(ctx context.Context, network string) ([]Endpoint, error) {
	if err := c.usable(ctx); err != nil {
		return nil, err
	}

	if network != "" {
		if err := checkName(network); err != nil {
			return nil, err
		}
	}
	elements, err := c.elements(ctx)
	if err != nil {
		return nil, err
	}
	return collect(elements, network), nil
}

// HasPorts says whether any endpoint behind a bridge, of whatever network, has ports of
// the host's IPv4 addresses that lead to it. It lists an element for each that has.
func (c *Conn) HasPorts(ctx context.Context, bridge string) (bool, error) {
	if err := c.usable(ctx); err != nil {
		return false, err
	}

	if bridge == "" || len(bridge) >= unix.IFNAMSIZ {
		return false, invalid("%.40q cannot be the name of a bridge", bridge)
	}
	name := interfaceName(bridge)
	found := false
	err := nftnl.Retry(ctx, func() error {
		list, err := c.elementsOf([]place{inInet(selves4Set)})
		found = slices.ContainsFunc(list, func(el elementState) bool { return bytes.HasPrefix(el.key, name) })
		return err
	})
	return found, err
}

// collect makes endpoints of elements.
func collect(elements []elementState, network string) []Endpoint {
	type id struct {
		owner Owner
		key   string
	}
	found := map[id]*Endpoint{}
	for i := range elements {
		el := &elements[i]
		owner, key, ok := el.owner()
		if !ok || network != "" && key != networkKey(network) {
			continue
		}
		ep := found[id{owner, key}]
		if ep == nil {
			ep = &Endpoint{Owner: owner, Network: key}
			if network != "" {
				ep.Network = network
			}
			found[id{owner, key}] = ep
		}
		ep.note(el)
	}
	list := make([]Endpoint, 0, len(found))
	for _, ep := range found {
		sort.Slice(ep.Addrs, func(i, j int) bool { return ep.Addrs[i].Less(ep.Addrs[j]) })
		ep.Ports = mergePorts(ep.Ports, ep.Addrs)
		list = append(list, *ep)
	}
	sort.Slice(list, func(i, j int) bool {
		a, b := &list[i], &list[j]
		return cmp.Or(strings.Compare(a.Network, b.Network), strings.Compare(string(a.Owner), string(b.Owner))) < 0
	})
	return list
}

// note adds what one element tells.
func (ep *Endpoint) note(el *elementState) {
	if ep.noteGuard(el) {
		return
	}
	if p, ok := el.port(); ok {
		ep.Ports = append(ep.Ports, p)
		return
	}
	bridge, addr, mac, ok := el.parse()
	if !ok {
		return
	}
	if bridge != "" {
		ep.Bridge = bridge
	}
	if mac != nil {
		ep.MAC = mac
	}
	if addr.IsValid() && !slices.Contains(ep.Addrs, addr) {
		ep.Addrs = append(ep.Addrs, addr)
	}
	ep.Masquerade = ep.Masquerade || isMasqueradeSet(el.set.name)
}

// elements lists all elements of our sets.
func (c *Conn) elements(ctx context.Context) ([]elementState, error) {
	var all []elementState
	err := nftnl.Retry(ctx, func() error {
		all = nil
		for _, family := range ourFamilies() {
			sets, err := c.setNames(family)
			if err != nil {
				return err
			}
			list, err := c.elementsOf(sets)
			if err != nil {
				return err
			}
			all = append(all, list...)
		}
		return nil
	})
	return all, err
}

// ourFamilies are those of the tables that we may have.
func ourFamilies() [2]uint8 { return [...]uint8{unix.NFPROTO_INET, unix.NFPROTO_BRIDGE} }

// setNames lists the sets of our table of a family, of which there may be none.
func (c *Conn) setNames(family uint8) ([]place, error) {
	var sets []place
	err := c.dumpSets(family, func(data []byte) error {
		name, _, err := decodeSet(data)
		sets = append(sets, place{family, name})
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return sets, err
}

// elementsOf lists the elements of those sets that are ours, but for sentinels; others
// may be anything.
func (c *Conn) elementsOf(sets []place) ([]elementState, error) {
	var all []elementState
	for _, at := range sets {
		if !isOurSet(at) {
			continue
		}
		list, err := c.elementsOfSet(at)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, el := range list {
			if el.comment != sentinelComment {
				all = append(all, el)
			}
		}
	}
	return all, nil
}

// elementsOfSet lists a set's elements by key. While the kernel grows or shrinks a
// set's hash table, which it does in the background, a listing may show elements
// twice and lack as many others, and does not say so. It is nftnl.ErrOvertaken then.
func (c *Conn) elementsOfSet(set place) ([]elementState, error) {
	var list []elementState
	err := c.dumpElements(set, func(data []byte) error {
		part, err := decodeElements(set.family, data)
		list = append(list, part...)
		return err
	})
	if err != nil {
		return nil, err
	}
	sort.Slice(list, func(i, j int) bool { return bytes.Compare(list[i].key, list[j].key) < 0 })
	all := len(list)
	list = slices.CompactFunc(list, func(a, b elementState) bool { return a.equal(b.element) })
	if len(list) < all {
		return nil, nftnl.ErrOvertaken
	}
	return list, nil
}

// isOurSet says whether a set holds elements that carry their owners' names.
func isOurSet(at place) bool {
	if isMasqueradeSet(at.name) {
		return at.family == unix.NFPROTO_INET
	}
	return isGuardSet(at) || slices.ContainsFunc(sharedSets(), func(s set) bool { return s.place == at })
}
