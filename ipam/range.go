package ipam

import (
	"cmp"
	"fmt"
	"iter"
	"math"
	"math/big"
	"net/netip"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo"
)

// The terms are the reference plugin's: a network has range sets, and a set has ranges.

// A RangeSet is a list of ranges. Each attachment gets one address from the set. All ranges of a set belong to one
// family, and no two ranges of a network overlap.
type RangeSet struct {
	Ranges []Range `json:"ranges"`
	// Name is the set's name in errors, such as its place in a configuration. If empty, it is "ranges[0]" for the first
	// set. The second range of this set is then named "ranges[0][1]".
	Name string `json:"name,omitempty"`
}

// A Range is a run of addresses within a subnet. Only Subnet is required.
type Range struct {
	Subnet netip.Prefix `json:"subnet"`
	// RangeStart and RangeEnd are the first and the last address. By default the range covers the subnet without its
	// network address and, in IPv4, its broadcast address.
	RangeStart netip.Addr `json:"rangeStart,omitzero"`
	RangeEnd   netip.Addr `json:"rangeEnd,omitzero"`
	// Gateway is returned with each address, and never assigned. By default it is the address after the subnet's
	// network address. It may lie outside of the subnet.
	Gateway netip.Addr `json:"gateway,omitzero"`
	// Name is the range's name in errors. If empty, it is derived from the name of the set.
	Name string `json:"name,omitempty"`
}

// A pool holds all sets of a network, checked and with their defaults. The index of a set is part of the on-disk
// format (last_reserved_ip.<index>).
type pool []RangeSet

// newPool checks the ranges and fills in their defaults.
func newPool(sets []RangeSet) (pool, error) {
	var p pool
	for i, conf := range sets {
		conf.Name = cmp.Or(conf.Name, fmt.Sprintf("ranges[%d]", i))
		set, err := newRangeSet(conf)
		if err != nil {
			return nil, err
		}

		for _, earlier := range p {
			if err := earlier.checkOverlaps(set); err != nil {
				return nil, err
			}
		}
		p = append(p, set)
	}

	for i := range p {
		p[i].Name = "" // it is only for errors of this function
	}
	return p, nil
}

// newRangeSet checks one set and fills in its defaults.
func newRangeSet(conf RangeSet) (RangeSet, error) {
	set := RangeSet{Name: conf.Name}
	if len(conf.Ranges) == 0 {
		return set, newError(tombolo.ErrInvalid, "%s is an empty list of ranges", set.Name)
	}

	for i, one := range conf.Ranges {
		one.Name = cmp.Or(one.Name, fmt.Sprintf("%s[%d]", set.Name, i))
		r, err := newRange(one)
		if err != nil {
			return set, err
		}

		for _, other := range set.Ranges {
			if other.RangeStart.Is4() != r.RangeStart.Is4() {
				return set, newError(tombolo.ErrInvalid, "%s mixes IPv4 and IPv6: put %s and %s into sets of their own",
					set.Name, other.Subnet, r.Subnet)
			}
			if other.overlaps(r) {
				return set, newError(tombolo.ErrInvalid, "%s: ranges %s and %s overlap", set.Name,
					other.text(), r.text())
			}
		}

		set.Ranges = append(set.Ranges, r)
	}

	return set, nil
}

// newRange checks one range and fills in its defaults. By default the gateway is the address after the network
// address. The default range covers all addresses except the network address and, in IPv4, the broadcast address.
func newRange(conf Range) (Range, error) {
	fail := func(format string, args ...any) (Range, error) {
		return Range{}, newError(tombolo.ErrInvalid, "%s: %s", conf.Name, fmt.Sprintf(format, args...))
	}
	subnet := conf.Subnet
	switch {
	case !subnet.IsValid():
		return fail(`"subnet" is required`)
	case subnet.Addr().Is4In6():
		return fail("subnet %s is an IPv4 network in IPv6 notation", subnet)
	case subnet != subnet.Masked():
		return fail("subnet %s has host bits set: the network is %s", subnet, subnet.Masked())
	case subnet.Bits() > subnet.Addr().BitLen()-2:
		return fail("subnet %s is too small to allocate from", subnet)
	}

	first, last := subnet.Addr().Next(), lastHost(subnet)
	r := Range{Subnet: subnet, RangeStart: first, RangeEnd: last, Gateway: first}
	for _, bound := range []struct {
		name string
		from netip.Addr
		to   *netip.Addr
		free bool // the address may lie outside of the subnet
	}{
		{"rangeStart", conf.RangeStart, &r.RangeStart, false},
		{"rangeEnd", conf.RangeEnd, &r.RangeEnd, false},
		{"gateway", conf.Gateway, &r.Gateway, true},
	} {
		if !bound.from.IsValid() {
			continue
		}

		addr := bound.from.Unmap()
		switch {
		case addr.Zone() != "":
			return fail("%s %s has a zone", bound.name, addr)
		case addr.Is4() != subnet.Addr().Is4():
			return fail("%s %s is not of the family of subnet %s", bound.name, addr, subnet)
		case !bound.free && !subnet.Contains(addr):
			return fail("%s %s is not in subnet %s", bound.name, addr, subnet)
		}

		*bound.to = addr
	}

	if r.RangeEnd.Less(r.RangeStart) {
		return fail("rangeEnd %s is before rangeStart %s", r.RangeEnd, r.RangeStart)
	}

	return r, nil
}

// lastHost returns the last address of a subnet's default range. In IPv4 that is the last address before the
// broadcast address.
func lastHost(subnet netip.Prefix) netip.Addr {
	bytes := subnet.Addr().AsSlice()
	for bit := subnet.Bits(); bit < len(bytes)*8; bit++ {
		bytes[bit/8] |= 0x80 >> (bit % 8)
	}
	last, _ := netip.AddrFromSlice(bytes)
	if last.Is4() {
		return last.Prev()
	}
	return last
}

// checkOverlaps returns an error if the sets have a common address.
func (s RangeSet) checkOverlaps(other RangeSet) error {
	for _, a := range s.Ranges {
		for _, b := range other.Ranges {
			if a.overlaps(b) {
				return newError(tombolo.ErrInvalid, "range %s in %s overlaps range %s in %s", a.text(), s.Name,
					b.text(), other.Name)
			}
		}
	}

	return nil
}

// isGateway reports whether addr is the gateway of any range of the network. Such an address is never assigned, not
// even out of another range.
func (p pool) isGateway(addr netip.Addr) bool {
	return slices.ContainsFunc(p, func(s RangeSet) bool {
		return slices.ContainsFunc(s.Ranges, func(r Range) bool { return r.Gateway == addr })
	})
}

// indexOf returns the index of the set with addr, or -1.
func (p pool) indexOf(addr netip.Addr) int {
	return slices.IndexFunc(p, func(s RangeSet) bool { return s.rangeOf(addr) != nil })
}

// rangeOf returns the range with addr, or nil.
func (s RangeSet) rangeOf(addr netip.Addr) *Range {
	for i := range s.Ranges {
		if s.Ranges[i].contains(addr) {
			return &s.Ranges[i]
		}
	}
	return nil
}

// size returns the number of addresses that the set can assign, without gateways. See Pool.Size for more than
// math.MaxUint64 addresses.
func (s RangeSet) size(p pool) uint64 {
	var total uint64
	for _, r := range s.Ranges {
		n := r.size()
		for _, gateway := range p.gateways() {
			if r.contains(gateway) && n > 0 {
				n--
			}
		}
		if total+n < total {
			return math.MaxUint64
		}
		total += n
	}

	return total
}

// gateways returns the gateways of all ranges, each once.
func (p pool) gateways() []netip.Addr {
	var gateways []netip.Addr
	for _, set := range p {
		for _, r := range set.Ranges {
			if !slices.Contains(gateways, r.Gateway) {
				gateways = append(gateways, r.Gateway)
			}
		}
	}
	return gateways
}

// text returns the ranges of the set, separated by commas.
func (s RangeSet) text() string {
	texts := make([]string, len(s.Ranges))
	for i, r := range s.Ranges {
		texts[i] = r.text()
	}
	return strings.Join(texts, ", ")
}

// describe returns the set's name for an operator: "range 10.1.0.0/24", or a list of all ranges.
func (s RangeSet) describe() string {
	if len(s.Ranges) == 1 {
		return "range " + s.text()
	}
	return "range set " + s.text()
}

// contains reports whether addr belongs to the range, which includes RangeStart and RangeEnd.
func (r Range) contains(addr netip.Addr) bool {
	return addr.BitLen() == r.RangeStart.BitLen() && !addr.Less(r.RangeStart) && !r.RangeEnd.Less(addr)
}

// overlaps reports whether the ranges share an address. If they do, one of them starts inside the other.
func (r Range) overlaps(other Range) bool {
	return r.contains(other.RangeStart) || other.contains(r.RangeStart)
}

// size returns the number of addresses from start to end. It saturates at math.MaxUint64.
func (r Range) size() uint64 {
	n := new(big.Int).SetBytes(r.RangeEnd.AsSlice())
	n.Sub(n, new(big.Int).SetBytes(r.RangeStart.AsSlice())).Add(n, big.NewInt(1))
	if !n.IsUint64() {
		return math.MaxUint64
	}
	return n.Uint64()
}

// text returns the subnet if the range is the subnet's default range, else the ends and the subnet.
func (r Range) text() string {
	if r.RangeStart == r.Subnet.Addr().Next() && r.RangeEnd == lastHost(r.Subnet) {
		return r.Subnet.String()
	}
	return fmt.Sprintf("%s-%s of %s", r.RangeStart, r.RangeEnd, r.Subnet)
}

// after returns the addresses of the set that can be assigned, each once. It starts after last and wraps around, so
// that a released address is assigned again as late as possible. If last is not valid or not in the set, it starts at
// the beginning.
func (s RangeSet) after(last netip.Addr, p pool) iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		first := s.next(last)
		for addr := first; p.isGateway(addr) || yield(addr); {
			if addr = s.next(addr); addr == first {
				return
			}
		}
	}
}

// next returns the address after addr. After the end of a range this is the start of the next range. If addr is not in
// the set, it is the start of the first range.
func (s RangeSet) next(addr netip.Addr) netip.Addr {
	i := slices.IndexFunc(s.Ranges, func(r Range) bool { return r.contains(addr) })
	if i >= 0 && addr != s.Ranges[i].RangeEnd {
		return addr.Next()
	}
	return s.Ranges[(i+1)%len(s.Ranges)].RangeStart
}
