package nft

import (
	"context"
	"maps"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// SetHost gives the rules of all networks the facts about the host that they need. The error matches fs.ErrNotExist
// before the first Ensure.
//
// uplinks are the bridges and veth links that are the host's uplinks (bridge.Conn.Uplinks). New connections from a
// pod to any other bridge or veth link that is not a Network's are not marked: it leads to containers or virtual
// machines of other programs.
//
// services are addresses of the host that ports without a HostAddr leave to others. A port takes one of them if its
// HostAddr names it.
//
// trusted are links of Networks that a firewall lets send anywhere, as firewalld's zone trusted does. New connections
// from them to a link that is not marked are dropped, unless their destination was changed.
func (c *Conn) SetHost(ctx context.Context, uplinks, trusted []string, services []netip.Addr) error {
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

// Host returns the uplinks and services of the last SetHost. The error matches fs.ErrNotExist before the first
// Ensure.
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

// hostElements lists the elements that SetHost added.
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
