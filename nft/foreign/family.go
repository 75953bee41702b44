package foreign

import (
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

const ifnameLen = unix.IFNAMSIZ // a name and at least one NUL

const policyAccept = uint32(expr.VerdictAccept)

// families are those that iptables has tables of.
func families() [2]uint8 { return [2]uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} }

func isAlphanumeric(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
}
