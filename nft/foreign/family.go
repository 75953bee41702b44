package foreign

import (
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Lengths in bytes.
const (
	ifnameLen = unix.IFNAMSIZ // a name and at least one NUL
	addr4Len  = 4
	addr6Len  = 16
)

const policyAccept = uint32(expr.VerdictAccept)

// family is what tables of IPv4 and IPv6 differ in.
type family struct {
	proto   byte   // unix.NFPROTO_*
	addrLen uint32 // bytes
	src     uint32 // offset in the header
}

func families() [2]family {
	return [2]family{{unix.NFPROTO_IPV4, addr4Len, 12}, {unix.NFPROTO_IPV6, addr6Len, 8}}
}

// interfaceName is a link's name as the kernel compares it.
func interfaceName(name string) []byte {
	b := make([]byte, ifnameLen)
	copy(b, name)
	return b
}

func isAlphanumeric(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
}
