package nft

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// Endpoints lists the endpoints of a network in the kernel, or of all networks if network is "". They are sorted by
// network and owner. Endpoints fills in Owner, Network, Bridge, Masquerade, and Addrs or, for pods without addresses,
// MAC. For an endpoint with a NIC, Bridge is the NIC. If elements of an endpoint are missing, its Addrs and Bridge may
// be incomplete.
//
// If the name of a network is too long for a comment, Network is a shortened name with a hash. Network is the full
// name if the caller passed it.
func (c *Conn) Endpoints(ctx context.Context, network string) ([]Endpoint, error) {
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

// HasPorts reports whether an endpoint behind the bridge has published ports for IPv4, in any network. It does not see
// ports of endpoints with SNATNone or with a NIC. It lists all endpoints of the host with such ports, so its cost grows
// with their number.
func (c *Conn) HasPorts(ctx context.Context, bridge string) (bool, error) {
	if bridge == "" || len(bridge) >= unix.IFNAMSIZ {
		return false, invalid("%.40q cannot be the name of a bridge"+ident.LinkNameForm, bridge)
	}

	name := nftnl.LinkKey(bridge, nil, 0)
	return retried(ctx, c, func() (bool, error) {
		list, err := c.tables.ElementsOf([]ruleset.Place{ruleset.InInet(ruleset.Families()[0].Selves)})
		return slices.ContainsFunc(list, func(el ruleset.Element) bool { return bytes.HasPrefix(el.Key, name) }), err
	})
}

// collect builds endpoints from their elements. If network is not "", it ignores elements of other networks.
func collect(elements []ruleset.Element, network string) []Endpoint {
	type id struct {
		owner Owner
		key   string
	}
	found := map[id]*Endpoint{}
	for i := range elements {
		el := &elements[i]
		owner, key, ok := ownerOf(el)
		if !ok || network != "" && key != ruleset.NetworkKey(network) {
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
		slices.SortFunc(ep.Addrs, netip.Addr.Compare)
		list = append(list, *ep)
	}

	slices.SortFunc(list, func(a, b Endpoint) int {
		return cmp.Or(cmp.Compare(a.Network, b.Network), cmp.Compare(a.Owner, b.Owner))
	})

	return list
}

// note sets the fields of ep that can be read from el, an element of this endpoint. It ignores elements that
// Element.Parse cannot parse.
func (ep *Endpoint) note(el *ruleset.Element) {
	bridge, addr, mac, ok := el.Parse()
	if !ok {
		return
	}

	ep.Bridge = cmp.Or(bridge, ep.Bridge)
	if mac != nil {
		ep.MAC = mac
	}

	if addr.IsValid() && !slices.Contains(ep.Addrs, addr) {
		ep.Addrs = append(ep.Addrs, addr)
	}

	ep.Masquerade = ep.Masquerade || ruleset.IsMasqueradeSet(el.Set.Name)
}

// AddressOwner returns the owner of an address behind a bridge, as the *ConflictError that an Add of the address would
// return. For an endpoint with a NIC, pass the NIC as bridge. AddressOwner returns nil if the address has no owner, or
// if the table or the set is missing. If another program added the element, the ConflictError has no Owner.
// AddressOwner sends one request.
func (c *Conn) AddressOwner(ctx context.Context, bridge string, a netip.Addr) (*ConflictError, error) {
	if !ident.IsLinkName(bridge) || !a.IsValid() {
		return nil, invalid("address %s behind bridge %q", a, bridge)
	}
	have, err := c.lookup(ctx, podElement(bridge, a.Unmap().WithZone("")))
	if err != nil || have[0] == nil {
		return nil, err
	}
	return newConflict(c.tables.Name, *have[0], ""), nil
}

// SetHost stores facts about the host that the rules of all networks use. It replaces the facts of the previous
// SetHost. If Ensure was never called, the error matches fs.ErrNotExist.
//
// uplinks are bridges and veth links through which the host itself reaches other machines (bridge.Conn.Uplinks). Other
// bridges and veth links lead to containers or virtual machines of other programs, unless they belong to a Network. So
// the firewall does not mark new connections from pods to them.
//
// services are addresses of the host. A port that is published on all addresses is not published there. A port whose
// HostAddr is such an address is published there.
//
// trusted are links of Networks whose packets another firewall accepts to any destination, as firewalld does for its
// zone trusted. The firewall drops new connections from them to bridges and veth links of other programs, unless a
// rule changed the destination.
func (c *Conn) SetHost(ctx context.Context, uplinks, trusted []string, services []netip.Addr) error {
	for _, name := range slices.Concat(uplinks, trusted) {
		if !ident.IsLinkName(name) {
			return invalid("set host: %q is no name of a link"+ident.LinkNameForm, name)
		}
	}

	known, err := c.hostElements(ctx)
	if err != nil {
		return explainMissing(err)
	}

	gone, missing := map[string]ruleset.Element{}, []ruleset.Element{}
	for _, el := range known {
		gone[el.ID()] = el
	}

	add := func(set string, key []byte) {
		el := ruleset.Element{Set: ruleset.InInet(set), Key: key, Comment: ruleset.HostComment}
		if _, is := gone[el.ID()]; !is {
			missing = append(missing, el)
		}
		delete(gone, el.ID())
	}

	for _, name := range uplinks {
		add(ruleset.UplinksSet, nftnl.LinkKey(name, nil, 0))
	}

	for _, name := range trusted {
		add(ruleset.TrustedSet, nftnl.LinkKey(name, nil, 0))
	}

	for _, a := range services {
		add(ruleset.FamilyOf(a).Services, a.AsSlice())
	}

	return explainMissing(c.replace(ctx, missing, slices.Collect(maps.Values(gone)), nil))
}

// Host returns the uplinks and services that the last SetHost stored. If Ensure was never called, the error matches
// fs.ErrNotExist.
func (c *Conn) Host(ctx context.Context) (uplinks []string, services []netip.Addr, _ error) {
	elements, err := c.hostElements(ctx)
	for _, el := range elements {
		a, isAddress := netip.AddrFromSlice(el.Key)
		if el.Set.Name == ruleset.UplinksSet {
			uplinks = append(uplinks, el.KeyText())
		} else if el.Set.Name != ruleset.TrustedSet && isAddress {
			services = append(services, a)
		}
	}

	return uplinks, services, err
}

// hostElements lists the elements that SetHost has added.
func (c *Conn) hostElements(ctx context.Context) ([]ruleset.Element, error) {
	list, err := retried(ctx, c, func() (list []ruleset.Element, _ error) {
		for _, set := range ruleset.HostSets() {
			elements, err := c.tables.ElementsOfSet(ruleset.InInet(set))
			if err != nil {
				return nil, err
			}
			list = append(list, elements...)
		}
		return list, nil
	})

	return slices.DeleteFunc(list, func(el ruleset.Element) bool { return el.Comment != ruleset.HostComment }), err
}

// Remove deletes the elements of endpoints. It is no error if an endpoint does not exist. Remove looks up the elements
// by bridge, addresses, MAC and ports, and deletes only elements whose comment names the owner of one of the endpoints.
// So an address that now belongs to another owner stays. Elements with other keys stay too, whoever their owner is: see
// RemoveOwners.
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

	return c.removeElements(ctx, elements, func(el *ruleset.Element) bool {
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
	return c.removeWhere(ctx, func(el *ruleset.Element) bool {
		owner, _, ok := ownerOf(el)
		return ok && doomed[owner]
	})
}

// removeWhere deletes all elements for which match returns true.
func (c *Conn) removeWhere(ctx context.Context, match func(*ruleset.Element) bool) error {
	all, err := c.elements(ctx)
	if err != nil {
		return err
	}

	var elements []ruleset.Element
	for i := range all {
		if match(&all[i]) {
			elements = append(elements, all[i])
		}
	}
	return c.removeElements(ctx, elements, match)
}

// removeElements deletes the elements that exist and for which match returns true. The kernel deletes an element by
// key alone, and another owner could take over the key in between. So the transaction is tied to the nf_tables
// generation of the lookup: the kernel refuses it after any other change.
func (c *Conn) removeElements(ctx context.Context, elements []ruleset.Element,
	match func(*ruleset.Element) bool) error {
	var errs []error
	for group := range slices.Chunk(elements, ruleset.GroupSize) {
		errs = append(errs, c.change(ctx, c.commitEndpoints, func(t *ruleset.Transaction) error {
			have, err := c.tables.Lookup(group)
			for i, el := range have {
				// Endpoints of one owner may share elements, so delete each only once.
				if el != nil && match(el) && !slices.ContainsFunc(group[:i], group[i].Equal) {
					t.DelElement(*el)
				}
			}
			return err
		}))
	}

	return errors.Join(errs...)
}

// RemoveNetwork deletes the chains and sets of a network, and all elements of its endpoints, even if the endpoints
// have not been removed. It is no error if the network does not exist. With the last network, RemoveNetwork deletes
// the tables. Otherwise it leaves the chains and sets of the network's Share: see RemoveShare.
//
// A network without Masquerade, Bridge, Dedup, DropReports and endpoints leaves no trace in the tables. So removing
// another network may delete the tables while such a network still needs them. If networks share a bridge, removing one
// may also delete the set elements that describe the bridge. Ready then returns false for the other networks until
// Ensure is called.
func (c *Conn) RemoveNetwork(ctx context.Context, name string) error {
	if err := checkName(name); err != nil {
		return err
	}

	key := ruleset.NetworkKey(name)
	err := c.removeWhere(ctx, func(el *ruleset.Element) bool {
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

// RemoveShare deletes the rules and sets of a bridge's Share. This disconnects the pods from the LAN. It is no error if
// the bridge has no Share. For a Network with this Share, Ready returns false until Ensure is called again.
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

	key := ruleset.NetworkKey(name)
	return retried(ctx, c, func() (bool, error) {
		inventories, inUse, err := c.inventories(key)
		return slices.ContainsFunc(inventories, func(inv *ruleset.Inventory) bool {
			return inv.Table && !inUse || inv.Has(key) ||
				slices.ContainsFunc(inv.Elements, func(el ruleset.Element) bool { return isOf(&el, key) })
		}), err
	})
}

// inventories returns the content of all our tables. inUse reports whether one of them contains a chain or set of a
// network other than key, or an element that SetHost did not add.
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
