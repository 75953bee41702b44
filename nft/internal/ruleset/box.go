package ruleset

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// interval is a closed range of values. Numbers and link names are converted to addresses, so that they can be
// compared.
type interval struct{ from, to netip.Addr }

// box is a set of keys with several parts: one interval for each part. The kernel refuses elements that overlap.
type box []interval

// number32 converts a number to an IPv4 address, for use in an interval.
func number32(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, n)))
}

// numbers returns the interval of numbers between from and to, both included.
func numbers(from, to uint32) interval { return interval{number32(from), number32(to)} }

// linkValue converts a link's name to an IPv6 address, for use in an interval.
func linkValue(name string) netip.Addr {
	return netip.AddrFrom16([16]byte(nftnl.LinkKey(name, nil, 0)))
}

// single returns an interval with one value.
func single(a netip.Addr) interval { return interval{a, a} }

// addresses returns the interval of all addresses in a prefix.
func addresses(p netip.Prefix) interval {
	last := p.Masked().Addr().AsSlice()
	for i, b := range netmask(p.Bits(), len(last)) {
		last[i] |= ^b
	}
	to, _ := netip.AddrFromSlice(last)
	return interval{p.Masked().Addr(), to}
}

// intersect returns the values that are in both intervals. It returns false if there are none.
func (a interval) intersect(b interval) (interval, bool) {
	if a.from.Less(b.from) {
		a.from = b.from
	}
	if b.to.Less(a.to) {
		a.to = b.to
	}
	return a, !a.to.Less(a.from)
}

// intersect returns the keys that are in both boxes. It returns nil if there are none.
func (b box) intersect(other box) box {
	common := box(nil)
	for i := range b {
		c, ok := b[i].intersect(other[i])
		if !ok {
			return nil
		}
		common = append(common, c)
	}
	return common
}

// without returns the keys of b that are not in other, as boxes that do not overlap.
func (b box) without(other box) (rest []box) {
	common := b.intersect(other)
	if common == nil {
		return []box{b}
	}

	b = slices.Clone(b)
	for i, c := range common {
		if b[i].from.Less(c.from) {
			below := slices.Clone(b)
			below[i].to = c.from.Prev()
			rest = append(rest, below)
		}

		if c.to.Less(b[i].to) {
			above := slices.Clone(b)
			above[i].from = c.to.Next()
			rest = append(rest, above)
		}
		b[i] = c
	}

	return rest
}

// subtract returns the keys of the boxes in list that are not in hole.
func subtract(list []box, hole box) (rest []box) {
	for _, b := range list {
		rest = append(rest, b.without(hole)...)
	}
	return rest
}

// disjoint returns the keys of all boxes in list, as boxes that do not overlap.
func disjoint(list []box) (all []box) {
	for _, b := range list {
		rest := []box{b}
		for _, have := range all {
			rest = subtract(rest, have)
		}
		all = append(all, rest...)
	}
	return all
}

// fields returns the length in bytes of each part of the set's keys.
func (s *Set) fields() (list []int) {
	for typ := s.KeyType; typ != 0; typ >>= nftnl.TypeBits {
		list = append(list, typeLen(typ&(1<<nftnl.TypeBits-1)))
	}
	slices.Reverse(list)
	return list
}

// boxElement returns the element of the set that contains all keys of the box b. The set must have the flag intervals.
func (s *Set) boxElement(b box) Element {
	var from, to [][]byte
	for i, length := range s.fields() {
		first, last := b[i].from.AsSlice(), b[i].to.AsSlice()
		from, to = append(from, first[len(first)-length:]), append(to, last[len(last)-length:])
	}
	return Element{Set: s.Place, Key: Key(from...), End: Key(to...)}
}
