package ruleset

import (
	"bytes"
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

// Lengths in bytes, of parts of keys and of the keys of sets.
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

// Element is one entry of a set, or of a map, which has data to each key.
type Element struct {
	Set  Place
	Key  []byte
	Data []byte
}

// Equal says that two are the same entry, with the same data or others.
func (e Element) Equal(other Element) bool {
	return e.Set == other.Set && bytes.Equal(e.Key, other.Key)
}

// ID returns what Equal compares, as the key of a map.
func (e Element) ID() string { return e.Set.Name + string(rune(e.Set.Family)) + string(e.Key) }

// Parse takes a key apart; results that it does not hold are zero. It is false for keys that are none of ours.
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

// KeyText gives the key as nft prints it, or in hexadecimal.
func (e Element) KeyText() string {
	if s, _ := setAt(e.Set); len(e.Key) == int(s.KeyLen) {
		return typedText(s.KeyType, e.Key)
	}
	return fmt.Sprintf("0x%x", e.Key)
}

// setAt finds one of our sets.
func setAt(at Place) (Set, bool) {
	if IsMasqueradeSet(at.Name) && at.Family == unix.NFPROTO_INET {
		return masqueradeSet(at.Name), true
	}
	if at.Family == unix.NFPROTO_NETDEV && strings.HasPrefix(at.Name, sharePodsPrefix) {
		return shareSet(at.Name), true
	}
	// The first ones are asked for most often where they are not there, and an error has a text: by Ready, and for
	// thousands of host ports that are put back.
	for _, sets := range []func() []Set{BridgeSets, portSets, guardSets, podSets, portSNATSets, internalSets} {
		list := sets()
		if i := slices.IndexFunc(list, func(s Set) bool { return s.Place == at }); i >= 0 {
			return list[i], true
		}
	}
	return Set{}, false
}

// String gives the key and the set.
func (e Element) String() string { return e.KeyText() + " of set " + e.Set.Name }

// DataText is the same for data.
func (e Element) DataText() string {
	if s, _ := setAt(e.Set); s.DataLen > 0 && len(e.Data) == int(s.DataLen) {
		return typedText(s.DataType, e.Data)
	}
	return fmt.Sprintf("0x%x", e.Data)
}

// slot is what the parts of a key or of data are multiples of: bytes.
const Slot = 4

// Key joins the parts of one, each filled up to whole slots.
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

// Number16 is a number as a part of a key.
func Number16(n uint16) []byte { return binary.BigEndian.AppendUint16(nil, n) }

// FamilyOf is that of an address.
func FamilyOf(a netip.Addr) Family {
	all := Families()
	if a.Is4() {
		return all[0]
	}
	return all[1]
}

// ownerPrefix starts the comments of our elements; the number is that of their
// form.
const OwnerPrefix = "tombolo:1:"

// maxOwner is how long the name of an endpoint's owner may be, in bytes.
const MaxOwner = 16

// An element's comment holds the network and the owner, and nft reads back
// comments of up to 128 bytes only.
const (
	MaxComment    = 128
	maxNetworkKey = MaxComment - len(OwnerPrefix) - MaxOwner - len(":")
	keptOfLong    = 80
)

// NetworkKey is the network's name as comments and names of chains and sets have
// it: a name that is too long is cut and gets a hash, behind a character that nft
// takes in names and networks' names never have.
func NetworkKey(name string) string {
	if len(name) <= maxNetworkKey {
		return name
	}
	h := fnv.New64a()
	h.Write([]byte(name))
	return fmt.Sprintf("%s/%016x", name[:keptOfLong], h.Sum64())
}

// networkComment starts the comment of what is a network's own.
func networkComment(networkKey string) string { return OwnerPrefix + ":" + networkKey }

// IsNetwork says that an element is a network's own.
func (e *ElementState) IsNetwork(key string) bool {
	own, _, _ := strings.Cut(e.Comment, ",")
	return own == networkComment(key)
}

// typedText gives bytes of a type, of which a concatenation has several. They are
// as many as the type has.
func typedText(typ uint32, b []byte) string {
	var types []uint32 // the last one first
	for ; typ != 0; typ >>= nftnl.TypeBits {
		types = append(types, typ&(1<<nftnl.TypeBits-1))
	}
	var parts []string
	for i := len(types) - 1; i >= 0; i-- {
		length := (typeLen(types[i]) + Slot - 1) / Slot * Slot
		if i == 0 {
			length = len(b) // a key of one part is not filled up, and numbers are of any length
		}
		if length > len(b) {
			return fmt.Sprintf("0x%x", b)
		}
		parts = append(parts, partText(types[i], b[:length]))
		b = b[length:]
	}
	return strings.Join(parts, " . ")
}

// typeLen is how long values of a type are, in bytes.
func typeLen(typ uint32) int {
	switch typ {
	case nftnl.TypeIPv4:
		return Addr4Len
	case nftnl.TypeIPv6:
		return addr6Len
	case nftnl.TypeEther:
		return EtherLen
	case nftnl.TypeIfname:
		return IfnameLen
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

// ProtocolName gives a number of IANA's as nft prints it.
func ProtocolName(protocol uint8) string {
	switch protocol {
	case unix.IPPROTO_TCP:
		return "tcp"
	case unix.IPPROTO_UDP:
		return "udp"
	case unix.IPPROTO_SCTP:
		return "sctp"
	}
	return strconv.Itoa(int(protocol))
}
