package ruleset

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// An egress policy lists the destinations that pods may open connections to. Answers always pass. The chain egress
// applies the policies of networks, selected by the incoming bridge. The chain pod-egress applies the policies of
// single pods, selected by the incoming link and the source address. A packet must pass both chains. Each chain is
// shared by all networks, and is created with the first network that needs it.
//
// The chains run after destination NAT and before routing. So they see each packet once, with its final destination,
// which may be the host, a pod or another machine. A policy also applies to connections that a pod opened before the
// policy existed. A packet counts as an answer only if the other end opened the connection.
const (
	egressChain    = "egress"
	podEgressChain = "pod-egress"
	egressSet      = "egress" // bridges with an egress policy

	priorityEgress = priorityDestinationNAT + 2
)

// Egress is a parsed egress policy. A nil Egress permits everything, and the zero Egress permits nothing.
type Egress struct{ allowed [2][]box } // by family: sets of address type, address, protocol and port

// maxEntries is the maximum number of entries in a policy. anyType is the end of the interval that contains all types
// of addresses (unix.RTN_*).
const (
	maxEntries = 32
	anyType    = 1<<32 - 1
)

// reserved lists the prefixes that the entry "public" of a policy leaves out.
func reserved() []string {
	return []string{
		"0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
		"192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/3",
		"::/3", "4000::/2", "8000::/1", "2001::/32", "2002::/16", // Teredo and 6to4 lead to IPv4
	}
}

// ParseEgress parses a policy: "all", "replies", or a comma-separated list of entries. An entry is "public", or a
// prefix or address. A protocol, or a protocol and ports, may follow. For "all" and "" it returns nil. For "replies" it
// returns an Egress that permits nothing.
func ParseEgress(text string) (*Egress, error) {
	switch text {
	case "", "all":
		return nil, nil
	case "replies":
		return &Egress{}, nil
	}

	e := &Egress{}
	if err := parseEntries(text, e.add); err != nil {
		return nil, err
	}

	for i := range e.allowed {
		e.allowed[i] = disjoint(e.allowed[i])
	}

	return e, nil
}

// parseEntries splits a comma-separated list into entries, and calls add with the words of each entry. It returns an
// error for an empty entry, for more than maxEntries entries, or from add.
func parseEntries(text string, add func(words []string) error) error {
	entries := strings.Split(text, ",")
	if len(entries) > maxEntries {
		return fmt.Errorf("it has %d entries, and may have %d", len(entries), maxEntries)
	}

	for _, entry := range entries {
		words, err := strings.Fields(entry), errors.New("an entry is empty")
		if len(words) > 0 {
			err = add(words)
		}
		if err != nil {
			return fmt.Errorf("%q: %w", strings.TrimSpace(entry), err)
		}
	}

	return nil
}

// add adds one entry, split into words, to the policy.
func (e *Egress) add(words []string) error {
	if len(words) == 1 && words[0] == "public" {
		e.addPublic()
		return nil
	}

	prefix, err := parsePrefix(words[0])
	if err != nil {
		return err
	}

	icmp := uint32(unix.IPPROTO_ICMP)
	if prefix.Addr().Is6() {
		icmp = unix.IPPROTO_ICMPV6
	}

	flow, err := parseFlow(words[1:], icmp)
	at := &e.allowed[familyIndex(prefix.Addr())]
	*at = append(*at, append(box{numbers(0, anyType), addresses(prefix)}, flow...))
	return err
}

// parseFlow reads the protocol and the ports of an entry, and returns a box of both parts. A missing part permits all
// values. icmp is the number of the protocol "icmp", or 0 if an entry cannot name it.
func parseFlow(words []string, icmp uint32) (box, error) {
	b := box{numbers(0, 255), numbers(0, 65535)}
	if len(words) > 2 {
		return nil, errors.New(`behind a protocol and ports comes a comma, as in "192.0.2.0/24 tcp 80-90, 192.0.2.7"`)
	}

	if len(words) > 0 {
		number := map[string]uint32{
			"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "sctp": unix.IPPROTO_SCTP, "icmp": icmp,
		}[words[0]]
		if number == 0 || words[0] == "icmp" && len(words) > 1 {
			return nil, fmt.Errorf("protocol %q: want tcp, udp or sctp, or, of pods' own calls, icmp without ports",
				words[0])
		}
		b[0] = numbers(number, number)
	}

	if len(words) > 1 {
		first, last, isRange := strings.Cut(words[1], "-")
		if !isRange {
			last = first
		}
		from, err := strconv.ParseUint(first, 10, 16)
		to, lastErr := strconv.ParseUint(last, 10, 16)
		if err != nil || lastErr != nil || from > to || from == 0 {
			return nil, fmt.Errorf("ports %q: want one of 1 to 65535, or two with '-' between", words[1])
		}
		b[1] = numbers(uint32(from), uint32(to))
	}

	return b, nil
}

// addPublic permits all public addresses, except addresses of the host.
func (e *Egress) addPublic() {
	for i, f := range Families() {
		unicast := numbers(unix.RTN_UNICAST, unix.RTN_UNICAST)
		public := []box{{unicast, addresses(f.All), numbers(0, 255), numbers(0, 65535)}}
		for _, text := range reserved() {
			public = subtract(public, box{unicast, addresses(netip.MustParsePrefix(text)), numbers(0, 255),
				numbers(0, 65535)})
		}

		e.allowed[i] = append(e.allowed[i], public...)
	}
}

// parsePrefix reads a prefix or a single address.
func parsePrefix(text string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(text); err == nil && a.Zone() == "" && !a.Is4In6() {
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(text)
	if err != nil || p.Addr().Is4In6() {
		return p, fmt.Errorf("%q is no prefix and no address", text)
	}
	return p, nil
}

func familyIndex(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

// elements returns the elements that permit the policy's destinations to a sender. set returns the set for a family.
// sender is the first part of the keys: the pod's address, or a bridge's name converted by linkValue.
func (e *Egress) elements(sender netip.Addr, set func(Family) Set, families ...Family) (list []Element) {
	for _, f := range families {
		s := set(f)
		for _, b := range e.allowed[familyIndex(f.All.Addr())] {
			list = append(list, s.boxElement(append(box{single(sender)}, b...)))
		}
	}
	return list
}

// PodElements returns the elements that apply the policy to a pod behind a link. addrs are the pod's addresses.
func (e *Egress) PodElements(link string, addrs []netip.Addr) (list []Element) {
	for _, a := range addrs {
		f := FamilyOf(a)
		list = append(list, Element{Set: InInet(f.limited), Key: nftnl.LinkKey(link, a.AsSlice(), 0)})
		list = append(list, e.elements(a, Family.podEgressSet, f)...)
	}
	return list
}

// bridgeElements returns the elements that apply the policy to all pods on a bridge.
func (e *Egress) bridgeElements(bridge string) []Element {
	families := Families()
	list := []Element{{Set: InInet(egressSet), Key: nftnl.LinkKey(bridge, nil, 0)}}
	return append(list, e.elements(linkValue(bridge), Family.egressSet, families[:]...)...)
}

// egressSet returns the set of the destinations that pods of a bridge may call. Its key is the bridge, the type of the
// destination, the destination, the protocol and the port.
func (f Family) egressSet() Set { return f.destinations(f.egress, nftnl.TypeIfname) }

// podEgressSet returns the set of the destinations that single pods may call. Its key begins with the pod's address.
func (f Family) podEgressSet() Set { return f.destinations(f.podEgress, f.addrType) }

func (f Family) destinations(name string, sender uint32) Set {
	return intervalSet(name, sender, nftnl.TypeFibAddr, f.addrType, nftnl.TypeProtocol, nftnl.TypePort)
}

// egressSets returns the sets for egress policies of networks.
func egressSets() []Set {
	return append([]Set{keySet(egressSet, nftnl.TypeIfname)}, setsOfBoth(Family.egressSet)...)
}

// podEgressSets returns the sets for egress policies of pods. For each family there is one with the pods that have a
// policy, and one with their permitted destinations.
func podEgressSets() []Set {
	limited := func(f Family) Set { return keySet(f.limited, nftnl.TypeIfname, f.addrType) }
	return setsOfBoth(limited, Family.podEgressSet)
}

func (list *rules) addEgress() {
	list.begin("bridges without a policy").linkNotIn(expr.MetaKeyIIFNAME, egressSet).Return()
	list.addAllowed(Family.egressSet, func(x expressions, _ Family) uint32 {
		x.loadMeta(expr.MetaKeyIIFNAME)
		return IfnameLen
	})
}

func (list *rules) addPodEgress() {
	list.addFamilies("pods without a policy", func(x expressions, f Family) {
		x.is(f).loadLinkAddress(expr.MetaKeyIIFNAME, f.src, f).isNotIn(f.limited).Return()
	})
	list.addAllowed(Family.podEgressSet, func(x expressions, f Family) uint32 {
		x.loadAddress(f.src, f)
		return f.AddrLen
	})
}

// addAllowed appends rules that accept the packets that a policy permits, and a last rule that drops all others. set
// returns the set of permitted destinations. sender loads the first part of its key and returns the length of this part
// in bytes. A packet that lacks a part of the key does not match the rule that looks up the destination.
func (list *rules) addAllowed(set func(Family) Set, sender func(expressions, Family) uint32) {
	answers := list.begin("answers").hasConntrackBit(expr.CtKeySTATE, expr.CmpOpNeq, established)
	answers.Add(&expr.Ct{Key: expr.CtKeyDIRECTION, Register: uint32(nftnl.First)})
	answers.compare(expr.CmpOpEq, []byte{1}).Return() // IP_CT_DIR_REPLY

	// Always accept multicast listener reports and neighbour discovery, because without them no machine could reach the
	// pod by IPv6. Unless the host is a multicast router, it forwards no packets that the next two rules accept. The
	// third rule accepts only packets that stay on their link.
	ip6 := Families()[1]
	list.addSpans([]span{
		{"multicast listeners and neighbour discovery, with the host and groups", listenerReport, neighbourAdvert},
		{"multicast listeners of version 2, with the host and groups", listenerReportTwo, listenerReportTwo},
	}, func(x expressions, types span) {
		x.is(ip6).isICMPv6(byte(types.from), byte(types.to)).loadDestinationType().
			compare(expr.CmpOpNeq, binary.NativeEndian.AppendUint32(nil, unix.RTN_UNICAST)).Return()
	})
	list.begin("neighbour discovery on the link").
		is(ip6).isICMPv6(neighbourSolicit, neighbourAdvert).hasRoute(expr.Fib{FlagDADDR: true, FlagIIF: true}, true).
		Return()

	list.addFamilies("allowed", func(x expressions, f Family) {
		length := sender(x.is(f), f)
		kind := uint32(nftnl.Behind(length))
		x.Add(&expr.Fib{Register: kind, ResultADDRTYPE: true, FlagDADDR: true})
		x.Add(&expr.Byteorder{SourceRegister: kind, DestRegister: kind, Op: expr.ByteorderHton, Len: Slot, Size: Slot})
		x.Payload(expr.PayloadBaseNetworkHeader, f.dst, f.AddrLen, nftnl.Behind(length+Slot))
		x.loadHostPort(length + Slot + f.AddrLen).isIn(set(f).Name).Return()
	})

	list.begin("all else").Drop()
}

// interval is a closed range of values. Numbers and link names are converted to addresses, so that they can be
// compared.
type interval struct{ from, to netip.Addr }

// box is a set of keys with several parts: one interval for each part. Boxes in one set of the kernel must not overlap.
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

// disjoint returns boxes that do not overlap, and that together contain the same keys as the boxes in list.
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

// boxElement returns the element of the set that contains all keys of the box b. The set must have the flag interval.
func (s *Set) boxElement(b box) Element {
	var from, to [][]byte
	for i, length := range s.fields() {
		first, last := b[i].from.AsSlice(), b[i].to.AsSlice()
		from, to = append(from, first[len(first)-length:]), append(to, last[len(last)-length:])
	}
	return Element{Set: s.Place, Key: Key(from...), End: Key(to...)}
}
