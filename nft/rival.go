package nft

import (
	"bytes"
	"slices"

	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// A port on all addresses and the same port on one address exclude each other, and are entries of two maps. The kernel
// refuses a key that is there, and knows nothing of one that must not be there elsewhere: so that is looked up, or
// listed, and the transaction is of the generation that was looked at.

// exclude says that two elements are one port, on all addresses and on one.
func exclude(a, b ruleset.Element) bool {
	for _, f := range ruleset.Families() {
		all, one := ruleset.InInet(f.HostPorts), ruleset.InInet(f.HostAddrs)
		if a.Set == one && b.Set == all {
			a, b = b, a
		}
		if a.Set == all && b.Set == one {
			return bytes.HasSuffix(b.Key, a.Key)
		}
	}
	return false
}

// findRivals gives what is there and excludes some of several elements.
func (c *Conn) findRivals(elements []ruleset.Element) ([]ruleset.ElementState, error) {
	var onAll []ruleset.Element
	var onOne []ruleset.Place // maps of ports, in which any may be
	for _, f := range ruleset.Families() {
		one := ruleset.InInet(f.HostAddrs)
		for _, el := range elements {
			switch el.Set {
			case one:
				onAll = append(onAll, ruleset.Element{Set: ruleset.InInet(f.HostPorts), Key: el.Key[f.AddrLen:]})
			case ruleset.InInet(f.HostPorts):
				onOne = append(onOne, one)
			}
		}
	}
	have, err := c.tables.Lookup(onAll)
	if err != nil {
		return nil, err
	}
	rivals, err := c.tables.ElementsOf(slices.Compact(onOne))
	rivals = slices.DeleteFunc(rivals, func(theirs ruleset.ElementState) bool {
		return !slices.ContainsFunc(elements, func(mine ruleset.Element) bool { return exclude(mine, theirs.Element) })
	})
	for i, el := range have {
		if el != nil && !slices.ContainsFunc(onAll[:i], el.Equal) {
			rivals = append(rivals, *el)
		}
	}
	return rivals, err
}

// portOf names the published port that an entry is for, as it was asked for; "" for
// elements of other sets.
func (ep *Endpoint) portOf(el ruleset.Element) string {
	return ep.portWhere(func(mine ruleset.Element) bool { return mine.Equal(el) })
}

// portAgainst names the port of the endpoint's that another's entry excludes.
func (ep *Endpoint) portAgainst(theirs ruleset.Element) string {
	return ep.portWhere(func(mine ruleset.Element) bool { return exclude(mine, theirs) })
}

func (ep *Endpoint) portWhere(match func(ruleset.Element) bool) string {
	for _, p := range ep.Ports {
		for _, a := range ep.firstAddrs() {
			if pub, ok := p.on(a); ok && match(pub.element()) {
				return p.String()
			}
		}
	}
	return ""
}
