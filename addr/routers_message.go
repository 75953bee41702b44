package addr

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

const sizeofNDUserOptMsg = 16 // struct nduseroptmsg, include/uapi/linux/rtnetlink.h

// decodeUserOptions parses the data of an RTM_NEWNDUSEROPT. It returns the index of the link that received the
// neighbour discovery message, and the message's options that the kernel leaves to user space.
func decodeUserOptions(data []byte) (index int, options []byte, _ error) {
	if len(data) < sizeofNDUserOptMsg {
		return 0, nil, fmt.Errorf("%w: options of neighbour discovery in %d bytes", nl.ErrMalformed, len(data))
	}
	index = int(int32(binary.NativeEndian.Uint32(data[4:])))
	length := int(binary.NativeEndian.Uint16(data[2:]))
	data = data[sizeofNDUserOptMsg:]
	if length > len(data) {
		return 0, nil, fmt.Errorf("%w: %d bytes of options in %d", nl.ErrMalformed, length, len(data))
	}
	return index, data[:length], nil
}

// nameService holds the name servers and search domains from router advertisements.
type nameService struct {
	servers []netip.Addr
	search  []string
}

const (
	optionServers = 25 // RFC 8106, section 5.1
	optionSearch  = 31 // RFC 8106, section 5.2

	optionUnit   = 8 // bytes in one unit of an option's length field
	optionHeader = 8 // bytes before the list: type, length, two reserved bytes, lifetime in seconds
)

// update processes options of one advertisement. Any machine of the LAN may have sent them, so update ignores invalid
// options. A lifetime of 0 withdraws an earlier server or domain.
func (n *nameService) update(options []byte) {
	for len(options) >= optionUnit {
		length := int(options[1]) * optionUnit
		if length == 0 || length > len(options) {
			return
		}

		one := options[:length]
		options = options[length:]
		over := binary.BigEndian.Uint32(one[4:]) == 0
		switch one[0] {
		case optionServers:
			mergeList(&n.servers, servers(one[optionHeader:]), over)
		case optionSearch:
			mergeList(&n.search, domains(one[optionHeader:]), over)
		}
	}
}

// mergeList adds items to *list if they are missing there. If over is set, which means that their lifetime is over, it
// removes them instead.
func mergeList[T comparable](list *[]T, items []T, over bool) {
	for _, item := range items {
		i := slices.Index(*list, item)
		switch {
		case over && i >= 0:
			*list = slices.Delete(*list, i, i+1)
		case !over && i < 0:
			*list = append(*list, item)
		}
	}
}

func servers(b []byte) []netip.Addr {
	var list []netip.Addr
	for ; len(b) >= 16; b = b[16:] {
		a := netip.AddrFrom16([16]byte(b))
		if a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() || a.Is4In6() {
			continue
		}
		list = append(list, a)
	}
	return list
}

// domains parses uncompressed domain names in the format of RFC 1035, section 3.1. It skips invalid names. It stops at
// the zero bytes of the padding, or at a name without an end.
func domains(b []byte) []string {
	var list []string
	for len(b) > 0 && b[0] != 0 {
		name, rest, ok := domain(b)
		if rest == nil {
			return list
		}
		if ok {
			list = append(list, name)
		}
		b = rest
	}

	return list
}

// domain parses one domain name. ok is false if a label contains anything except letters, digits, hyphens and
// underscores, or the name is too long. The name will be written to the pod's resolv.conf, where a space or a line
// break would begin another setting. rest is nil if the name has no end.
func domain(b []byte) (name string, rest []byte, ok bool) {
	const labelMax, domainMax = 63, 253
	var labels []string
	ok = true
	for len(b) > 0 {
		n := int(b[0])
		switch {
		case n == 0:
			name = strings.Join(labels, ".")
			return name, b[1:], ok && len(name) <= domainMax
		case n > labelMax || n >= len(b):
			return "", nil, false
		}

		label := string(b[1 : 1+n])
		ok = ok && isLabel(label)
		labels = append(labels, label)
		b = b[1+n:]
	}

	return "", nil, false
}

func isLabel(s string) bool {
	return !strings.ContainsFunc(s, func(c rune) bool {
		return c != '-' && c != '_' && (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z')
	})
}

const (
	linkRAReceived = 0x20 // IF_RA_RCVD, include/net/if_inet6.h: an advertisement came after a solicitation
	linkRAManaged  = 0x40 // IF_RA_MANAGED: the M flag of the last advertisement
	linkRAOther    = 0x80 // IF_RA_OTHERCONF: the O flag of the last advertisement
)

// routerFlags returns the kernel's flags (IF_RA_*) about router advertisements on a link, or 0 for a link without
// IPv6.
func (c *Conn) routerFlags(index int) (uint32, error) {
	l, err := link.Find(context.Background(), c.nl, "", index, unix.IFLA_AF_SPEC)
	return l.RouterFlags, err
}
