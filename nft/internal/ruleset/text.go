package ruleset

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
