package nft

import (
	"bytes"
	"cmp"
	"context"
	"net/netip"
	"slices"
	"sort"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// Endpoints lists the endpoints of a network in the kernel, or of all networks if network is "". They are sorted by
// network and owner. Endpoints fills in Owner, Network, Bridge, Masquerade, and Addrs or, for pods without addresses,
// MAC. If elements of an endpoint are missing, its Addrs and Bridge may be incomplete.
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

// HasPorts reports whether an endpoint behind the bridge has published ports for IPv4, in any network. It does not
// see ports with SNATNone. It lists one element for each endpoint on the host with published ports for IPv4.
func (c *Conn) HasPorts(ctx context.Context, bridge string) (bool, error) {
	if bridge == "" || len(bridge) >= unix.IFNAMSIZ {
		return false, invalid("%.40q cannot be the name of a bridge"+ident.LinkNameForm, bridge)
	}

	name := nftnl.LinkKey(bridge, nil, 0)
	found := false
	err := c.retry(ctx, func() error {
		list, err := c.tables.ElementsOf([]ruleset.Place{ruleset.InInet(ruleset.Families()[0].Selves)})
		found = slices.ContainsFunc(list, func(el ruleset.ElementState) bool { return bytes.HasPrefix(el.Key, name) })
		return err
	})
	return found, err
}

// collect builds endpoints from their elements. If network is not "", it ignores elements of other networks.
func collect(elements []ruleset.ElementState, network string) []Endpoint {
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
		sort.Slice(ep.Addrs, func(i, j int) bool { return ep.Addrs[i].Less(ep.Addrs[j]) })
		list = append(list, *ep)
	}

	sort.Slice(list, func(i, j int) bool {
		a, b := &list[i], &list[j]
		return cmp.Or(strings.Compare(a.Network, b.Network), strings.Compare(string(a.Owner), string(b.Owner))) < 0
	})
	return list
}

// note adds the facts that one element contains to the endpoint.
func (ep *Endpoint) note(el *ruleset.ElementState) {
	bridge, addr, mac, ok := el.Parse()
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

	ep.Masquerade = ep.Masquerade || ruleset.IsMasqueradeSet(el.Set.Name)
}

// AddressOwner returns the owner of an address behind a bridge, as the *ConflictError that an Add of the address
// would return. It returns nil if the address has no owner, or if the table or the set is missing. If another program
// added the element, the ConflictError has no Owner. AddressOwner sends one request.
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
