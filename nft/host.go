package nft

import (
	"context"
	"maps"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// SetHost stores facts about the host that the rules of all networks use. It replaces the facts of the previous
// SetHost. If Ensure was never called, the error matches fs.ErrNotExist.
//
// uplinks are the bridges and veth links that are the host's uplinks (bridge.Conn.Uplinks). Other bridges and veth
// links lead to containers or virtual machines of other programs, unless they belong to a Network. So the firewall
// does not mark new connections from pods to them.
//
// services are addresses of the host that ports without a HostAddr are not published on. A port whose HostAddr is
// such an address is still published there.
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

	gone, missing := map[string]ruleset.ElementState{}, []ruleset.ElementState{}
	for _, el := range known {
		gone[el.ID()] = el
	}

	add := func(set string, key []byte) {
		el := ruleset.Element{Set: ruleset.InInet(set), Key: key}
		if _, is := gone[el.ID()]; !is {
			missing = append(missing, ruleset.ElementState{Element: el, Comment: ruleset.HostComment})
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
func (c *Conn) hostElements(ctx context.Context) (list []ruleset.ElementState, _ error) {
	err := c.retry(ctx, func() error {
		list = nil
		for _, set := range ruleset.HostSets() {
			elements, err := c.tables.ElementsOfSet(ruleset.InInet(set))
			if err != nil {
				return err
			}
			list = append(list, elements...)
		}
		return nil
	})

	return slices.DeleteFunc(list, func(el ruleset.ElementState) bool { return el.Comment != ruleset.HostComment }), err
}
