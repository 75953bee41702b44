package ruleset

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/google/nftables/expr"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// Callers describes the calls from elsewhere that reach host ports: for each family, a list of boxes, whose parts are
// incoming link, source, destination, protocol and host port. The host's own calls always reach them. A nil Callers
// admits every call.
type Callers [][]box

// ParseCallers reads lists of callers, and returns the calls that every list contains. "" and "all" contain all
// calls. Any other list consists of entries with commas between. An entry is a prefix, an address or the name of a
// link. A protocol, or a protocol and host ports, may follow.
func ParseCallers(lists ...string) (Callers, error) {
	var all Callers
	for _, text := range lists {
		if text == "" || text == "all" {
			continue
		}

		list := make(Callers, len(Families()))
		if err := parseEntries(text, list.add); err != nil {
			return nil, err
		}

		for i := range all {
			var common []box
			for _, b := range all[i] {
				for _, other := range list[i] {
					if both := b.intersect(other); both != nil {
						common = append(common, both)
					}
				}
			}
			list[i] = common
		}
		all = list
	}

	return all, nil
}

// add parses the words of one entry, and adds its boxes to c.
func (c Callers) add(words []string) error {
	flow, err := parseFlow(words[1:], 0)
	if err != nil {
		return err
	}

	prefix, err := parsePrefix(words[0])
	isLink := err != nil && words[0] != "all" && ident.IsLinkName(words[0]) && !strings.ContainsAny(words[0], "*+") &&
		strings.Trim(words[0], "0123456789.") != ""
	if err != nil && !isLink {
		return fmt.Errorf("%w, and cannot name a link", err)
	}

	for i, f := range Families() {
		at, source := anyLink(), addresses(f.All)
		switch {
		case isLink:
			at = single(linkValue(words[0]))
		case i != familyIndex(prefix.Addr()):
			continue
		default:
			source = addresses(prefix)
		}
		c[i] = append(c[i], append(box{at, source, addresses(f.All)}, flow...))
	}

	return nil
}

// anyLink returns the interval of all names of links.
func anyLink() interval {
	last := [IfnameLen]byte{}
	for i := range last {
		last[i] = 0xff
	}
	return interval{netip.IPv6Unspecified(), netip.AddrFrom16(last)}
}

// HostPorts is a range of ports at one address of the host. If Addr is not valid, the range applies to all addresses.
type HostPorts struct {
	Addr        netip.Addr
	Protocol    uint8
	First, Last uint16
}

// Elements returns the elements that close host ports of a family to callers that c does not contain. They are in two
// sets: one of refused sources, and one of links through which a refused source may call nevertheless. A single set
// would need intervals of names, which nft could not read.
func (c Callers) Elements(f Family, ports []HostPorts) (list []Element) {
	if c == nil {
		return nil
	}

	var targets []box
	for _, p := range ports {
		at, protocol := addresses(f.All), numbers(uint32(p.Protocol), uint32(p.Protocol))
		if p.Addr.IsValid() {
			at = single(p.Addr)
		}
		targets = append(targets, box{at, protocol, numbers(uint32(p.First), uint32(p.Last))})
	}

	refused, excepted := f.refusedSet(), f.exceptedSet()
	for _, target := range disjoint(targets) {
		target = append(box{anyLink(), addresses(f.All)}, target...)
		rest, except := []box{target[1:]}, []box(nil)
		for _, b := range c[familyIndex(f.All.Addr())] {
			if b[0] == anyLink() {
				rest = subtract(rest, b[1:])
			} else if b = b.intersect(target); b != nil {
				except = append(except, b)
			}
		}

		for _, b := range rest {
			list = append(list, refused.boxElement(b))
		}
		for _, b := range disjoint(except) {
			list = append(list, excepted.boxElement(b))
		}
	}

	return list
}

// refusedSet returns the set that closes host ports to sources. Its key is source, destination, protocol and port.
func (f Family) refusedSet() Set {
	s := keySet(f.refused, f.addrType, f.addrType, nftnl.TypeProtocol, nftnl.TypePort)
	s.intervals = true
	return s
}

// exceptedSet returns the set of exceptions from refusedSet. Its key is the incoming link and the key of refusedSet.
func (f Family) exceptedSet() Set {
	s := keySet(f.excepted, nftnl.TypeIfname, f.addrType, f.addrType, nftnl.TypeProtocol, nftnl.TypePort)
	s.intervals = true
	return s
}

// addCallers appends rules that end the chain if the host port is closed to the packet's sender. The packet then goes
// to the host itself.
func (list *rules) addCallers() {
	list.addFamilies("ports that are closed to the caller", func(x expressions, f Family) {
		const ip = expr.PayloadBaseNetworkHeader
		flow := func(length uint32) {
			x.Payload(ip, f.src, f.AddrLen, nftnl.Behind(length))
			x.Payload(ip, f.dst, f.AddrLen, nftnl.Behind(length+f.AddrLen))
			x.loadHostPort(length + 2*f.AddrLen)
		}
		x.is(f)
		flow(0)
		x.Lookup(f.refused)
		x.Meta(expr.MetaKeyIIFNAME, nftnl.First)
		flow(IfnameLen)
		x.LookupNone(f.excepted)
		x.Return()
	})
}
