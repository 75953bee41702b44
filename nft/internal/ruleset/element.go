package ruleset

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

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

// Equal says that two are the same entry, whatever its data.
func (e Element) Equal(other Element) bool {
	return e.Set == other.Set && bytes.Equal(e.Key, other.Key)
}

// Parse takes a key apart; what it does not hold is zero. It is false for keys
// that are none of ours.
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
	if _, addr, _, ok := e.Parse(); ok && IsMasqueradeSet(e.Set.Name) {
		return addr.String()
	}
	// Ready asks for elements of the first ones that are mostly not there, and an
	// error has a text.
	for _, sets := range []func() []Set{BridgeSets, guardSets, sharedSets, portSNATSets} {
		for _, s := range sets() {
			if s.Place == e.Set && len(e.Key) == int(s.KeyLen) {
				return typedText(s.KeyType, e.Key)
			}
		}
	}
	return fmt.Sprintf("0x%x", e.Key)
}

// String gives the key and the set.
func (e Element) String() string { return e.KeyText() + " of set " + e.Set.Name }

// DataText is the same for data.
func (e Element) DataText() string {
	for _, s := range sharedSets() {
		if s.Place == e.Set && s.DataLen > 0 && uint32(len(e.Data)) == s.DataLen {
			return typedText(s.DataType, e.Data)
		}
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
