package nft

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// typedKeyText gives a key of a set that all networks share as nft prints it, and
// any other in hexadecimal.
func (e element) typedKeyText() string {
	// Ready asks for elements of the first ones that are mostly not there, and an
	// error has a text.
	for _, sets := range []func() []set{bridgeSets, guardSets, sharedSets} {
		for _, s := range sets() {
			if s.place == e.set && uint32(len(e.key)) == s.keyLen {
				return typedText(s.keyType, e.key)
			}
		}
	}
	return fmt.Sprintf("0x%x", e.key)
}

// typedDataText is the same for data.
func (e element) typedDataText() string {
	for _, s := range sharedSets() {
		if s.place == e.set && s.dataLen > 0 && uint32(len(e.data)) == s.dataLen {
			return typedText(s.dataType, e.data)
		}
	}
	return fmt.Sprintf("0x%x", e.data)
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
		length := (typeLen(types[i]) + slot - 1) / slot * slot
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
		return addr4Len
	case nftnl.TypeIPv6:
		return addr6Len
	case nftnl.TypeEther:
		return etherLen
	case nftnl.TypeIfname:
		return ifnameLen
	}
	return slot
}

func partText(typ uint32, b []byte) string {
	switch typ {
	case nftnl.TypeIPv4, nftnl.TypeIPv6:
		a, _ := netip.AddrFromSlice(b)
		return a.String()
	case nftnl.TypeEther:
		return net.HardwareAddr(b[:etherLen]).String()
	case nftnl.TypeIfname:
		name, _, _ := strings.Cut(string(b), "\x00")
		return name
	case nftnl.TypeProtocol:
		return protocolName(b[0])
	case nftnl.TypePort:
		return strconv.Itoa(int(binary.BigEndian.Uint16(b)))
	case nftnl.TypeFamily:
		switch b[0] {
		case unix.NFPROTO_IPV4:
			return "ipv4"
		case unix.NFPROTO_IPV6:
			return "ipv6"
		}
	}
	return fmt.Sprintf("0x%x", b)
}
