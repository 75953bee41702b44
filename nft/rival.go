package nft

import (
	"slices"

	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// A port on all addresses and the same port on one address exclude each other, and are entries of two maps. The kernel
// refuses a key that is there, and knows nothing of one that must not be there elsewhere: so that is looked up, or
// listed, and the transaction is of the generation that was looked at.

// findRivals gives what is there and excludes some of several elements.
func (c *Conn) findRivals(elements []ruleset.Element) ([]*ruleset.ElementState, error) {
	var onAll []ruleset.Element
	var onOne []ruleset.Place // maps of ports, in which any may be
	for _, f := range ruleset.Families() {
		one := ruleset.InInet(f.HostAddrs)
		for _, el := range elements {
			switch el.Set {
			case one:
				all := ruleset.Element{Set: ruleset.InInet(f.HostPorts), Key: el.Key[f.AddrLen:]}
				if !slices.ContainsFunc(onAll, all.Equal) {
					onAll = append(onAll, all)
				}
			case ruleset.InInet(f.HostPorts):
				onOne = append(onOne, one)
			}
		}
	}
	have, err := c.tables.Lookup(onAll)
	if err != nil {
		return nil, err
	}
	rivals := slices.DeleteFunc(have, func(el *ruleset.ElementState) bool { return el == nil })
	all, err := c.tables.ElementsOf(slices.Compact(onOne))
	for i := range all {
		if slices.ContainsFunc(elements, all[i].Excludes) {
			rivals = append(rivals, &all[i])
		}
	}
	return rivals, err
}

// portOf names the port of the endpoint's that an entry is for, or excludes, as it was asked for; "" for elements of
// other sets.
func (ep *Endpoint) portOf(el ruleset.Element) string {
	for _, p := range ep.Ports {
		for _, a := range ep.firstAddrs() {
			if pub, ok := p.on(a); ok && (el.Equal(pub.element()) || el.Excludes(pub.element())) {
				return p.String()
			}
		}
	}
	return ""
}
