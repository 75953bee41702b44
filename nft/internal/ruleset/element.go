package ruleset

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// Lengths in bytes of the parts of keys, and of whole keys.
const (
	IfnameLen = nftnl.IfnameLen
	EtherLen  = nftnl.EtherLen
	EtherSlot = nftnl.EtherSlot
	Addr4Len  = nftnl.IPv4Len
	addr6Len  = nftnl.IPv6Len
	pods4Len  = IfnameLen + Addr4Len
	pods6Len  = IfnameLen + addr6Len
	portsLen  = IfnameLen + EtherSlot
)

// Element is one entry of a set, or of a map, which has data for each key.
type Element struct {
	Set  Place
	Key  []byte
	End  []byte // the last key of an interval that begins with Key; empty if the element is a single key
	Data []byte
	// Comment names the owner. Other programs may add elements to our sets, with any comment or without one.
	Comment string
}

// Equal reports whether two elements have the same set, key and end. It ignores data and comment.
func (e Element) Equal(other Element) bool {
	return e.Set == other.Set && bytes.Equal(e.Key, other.Key) && bytes.Equal(e.End, other.End)
}

// ID returns a string for use as the key of a Go map. Two elements have the same ID if Equal returns true for them.
func (e Element) ID() string {
	return e.Set.Name + string(rune(e.Set.Family)) + string(e.Key) + string(e.End)
}

// Parse returns the parts of the key of an element that describes a pod: one in pods4, pods6, ports or a set from
// MasqueradeSet. Parts that the key does not contain are zero. For elements of other sets, ok is false.
func (e Element) Parse() (bridge string, addr netip.Addr, mac net.HardwareAddr, ok bool) {
	rest := e.Key
	switch {
	case e.Set.Name == Pods4Set && len(rest) == pods4Len,
		e.Set.Name == Pods6Set && len(rest) == pods6Len,
		e.Set.Name == PortsSet && len(rest) == portsLen:
		name, _, _ := bytes.Cut(rest[:IfnameLen], []byte{0})
		bridge, rest = string(name), rest[IfnameLen:]
	case IsMasqueradeSet(e.Set.Name):
	default:
		return "", netip.Addr{}, nil, false
	}

	if e.Set.Name == PortsSet {
		return bridge, netip.Addr{}, net.HardwareAddr(rest[:EtherLen]), true
	}

	addr, ok = netip.AddrFromSlice(rest)
	return bridge, addr, nil, ok
}

// WithComment sets the comment of all elements in list, and returns the list.
func WithComment(list []Element, comment string) []Element {
	for i := range list {
		list[i].Comment = comment
	}

	return list
}

// KeyText returns the key as nft prints it, without quotes, or "FIRST to LAST" for an interval. If the set is not ours,
// or the key has a wrong length, it returns the key in hexadecimal.
func (e Element) KeyText() string {
	if s, _ := setAt(e.Set); len(e.Key) == int(s.KeyLen) {
		text := typedText(s.KeyType, e.Key)
		if len(e.End) == len(e.Key) && !bytes.Equal(e.End, e.Key) {
			text += " to " + typedText(s.KeyType, e.End)
		}
		return text
	}
	return fmt.Sprintf("0x%x", e.Key)
}

// setAt returns the definition of our set with the given name. It returns false for any other set.
func setAt(at Place) (Set, bool) {
	if IsMasqueradeSet(at.Name) && at.Family == unix.NFPROTO_INET {
		return masqueradeSet(at.Name), true
	}

	if at.Family == unix.NFPROTO_NETDEV && strings.HasPrefix(at.Name, sharePodsPrefix) {
		return shareSet(at.Name), true
	}

	// Search the most needed sets first. Ready and the restoring of thousands of host ports look up elements of these
	// sets. Such elements often do not exist, and the text of each such error comes from setAt.
	for _, sets := range []func() []Set{
		BridgeSets, portSets, guardSets, podSets, portSNATSets, internalSets, egressSets, podEgressSets,
	} {
		list := sets()
		if i := slices.IndexFunc(list, func(s Set) bool { return s.Place == at }); i >= 0 {
			return list[i], true
		}
	}

	return Set{}, false
}

// String returns the key and the name of the set.
func (e Element) String() string { return e.KeyText() + " of set " + e.Set.Name }

// DataText returns the data as nft prints it. If the set is no map of ours, or the data have a wrong length, it returns
// the data in hexadecimal.
func (e Element) DataText() string {
	if s, _ := setAt(e.Set); s.DataLen > 0 && len(e.Data) == int(s.DataLen) {
		return typedText(s.DataType, e.Data)
	}
	return fmt.Sprintf("0x%x", e.Data)
}

// Slot is the size in bytes to which nf_tables aligns the parts of keys and data.
const Slot = 4

// Key joins the parts of a key. It pads each part with zeros to a multiple of Slot.
func Key(parts ...[]byte) []byte {
	var b []byte
	for _, part := range parts {
		b = append(b, part...)
		for len(b)%Slot != 0 {
			b = append(b, 0)
		}
	}
	return b
}

// Number16 returns a number in network byte order, as a part of a key.
func Number16(n uint16) []byte { return binary.BigEndian.AppendUint16(nil, n) }

// FamilyOf returns the Family of an address.
func FamilyOf(a netip.Addr) Family {
	return Families()[familyIndex(a)]
}

// OwnerPrefix is the beginning of the comments of our elements. The 1 is the version of the comments' format.
const OwnerPrefix = "tombolo:1:"

// MaxOwner is the maximum length of an owner in bytes.
const MaxOwner = 16

// MaxComment is the maximum length in bytes of a comment that nft reads. maxNetworkKey is the maximum length of a
// network's key, which leaves room in the comment for the owner. keptOfLong is the number of bytes that NetworkKey
// keeps of a longer name.
const (
	MaxComment    = 128
	maxNetworkKey = MaxComment - len(OwnerPrefix) - MaxOwner - len(":")
	keptOfLong    = 80
)

// NetworkKey returns the name of a network for use in comments and in names of chains and sets. It shortens a name that
// is too long and appends "/" and a hash. Names of networks never contain "/", and nft permits "/" in names.
func NetworkKey(name string) string {
	if len(name) <= maxNetworkKey {
		return name
	}
	h := fnv.New64a()
	h.Write([]byte(name))
	return fmt.Sprintf("%s/%016x", name[:keptOfLong], h.Sum64())
}

// networkComment returns the beginning of the comments of elements that describe the network and not an endpoint.
func networkComment(networkKey string) string { return OwnerPrefix + ":" + networkKey }

// IsNetwork reports whether the element describes the network with this key itself, and not an endpoint.
func (e *Element) IsNetwork(key string) bool {
	own, _, _ := strings.Cut(e.Comment, ",")
	return own == networkComment(key)
}

// typedText returns a value of a type as nft prints it, without quotes. typ may be a concatenation of types. If b is
// too short, the result is in hexadecimal.
func typedText(typ uint32, b []byte) string {
	var types []uint32 // in reverse order
	for ; typ != 0; typ >>= nftnl.TypeBits {
		types = append(types, typ&(1<<nftnl.TypeBits-1))
	}

	var parts []string
	for i := len(types) - 1; i >= 0; i-- {
		length := (typeLen(types[i]) + Slot - 1) / Slot * Slot
		if i == 0 {
			length = len(b) // a key of one part has no padding, and numbers have any length
		}
		if length > len(b) {
			return fmt.Sprintf("0x%x", b)
		}
		parts = append(parts, partText(types[i], b[:length]))
		b = b[length:]
	}

	return strings.Join(parts, " . ")
}

// typeLen returns the length in bytes of values of a type.
func typeLen(typ uint32) int {
	lengths := [...]uint8{
		nftnl.TypeIPv4: Addr4Len, nftnl.TypeIPv6: addr6Len, nftnl.TypeEther: EtherLen, nftnl.TypeIfname: IfnameLen,
		nftnl.TypeProtocol: 1, nftnl.TypePort: 2,
	}
	if int(typ) < len(lengths) {
		return int(cmp.Or(lengths[typ], Slot))
	}
	return Slot
}

func partText(typ uint32, b []byte) string {
	switch typ {
	case nftnl.TypeIPv4, nftnl.TypeIPv6:
		a, _ := netip.AddrFromSlice(b)
		return a.String()
	case nftnl.TypeEther:
		return net.HardwareAddr(b[:EtherLen]).String()
	case nftnl.TypeIfname:
		name, _, _ := strings.Cut(string(b), "\x00")
		return name
	case nftnl.TypeProtocol:
		return ProtocolName(b[0])
	case nftnl.TypePort:
		return strconv.Itoa(int(binary.BigEndian.Uint16(b)))
	}

	return fmt.Sprintf("0x%x", b)
}

// ProtocolName returns "tcp", "udp" or "sctp", or the number of any other IP protocol.
func ProtocolName(protocol uint8) string {
	names := map[uint8]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_SCTP: "sctp"}
	return cmp.Or(names[protocol], strconv.Itoa(int(protocol)))
}
