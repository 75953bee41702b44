package bandwidth

import (
	"encoding/binary"
	"fmt"
	"net"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

const addrGenModeNone = 1 // IN6_ADDR_GEN_MODE_NONE, include/uapi/linux/if_link.h

// ifInfo is struct ifinfomsg (include/uapi/linux/rtnetlink.h).
func ifInfo(index int, flags, change uint32) []byte {
	b := make([]byte, unix.SizeofIfInfomsg)
	binary.NativeEndian.PutUint32(b[4:], uint32(index))
	binary.NativeEndian.PutUint32(b[8:], flags)
	binary.NativeEndian.PutUint32(b[12:], change)
	return b
}

// add appends a request about a link.
func add(b *nl.Batch, op, name string, typ netlink.HeaderType, flags netlink.HeaderFlags, head []byte, attrs func(*netlink.AttributeEncoder)) {
	m, err := nl.Encode(typ, flags, head, attrs)
	b.Add(op, nl.Name(name), m, err)
}

// ofKind writes the kind of a link.
func ofKind(ae *netlink.AttributeEncoder, kind string) {
	ae.Nested(unix.IFLA_LINKINFO, func(ae *netlink.AttributeEncoder) error {
		ae.String(unix.IFLA_INFO_KIND, kind)
		return nil
	})
}

// addIFB appends a request for an ifb, still down. Its MAC is given, so that udev
// does not change it later.
func addIFB(b *nl.Batch, name string, mac net.HardwareAddr, mtu int) {
	add(b, "add link", name, unix.RTM_NEWLINK, netlink.Create|netlink.Excl, ifInfo(0, 0, 0), func(ae *netlink.AttributeEncoder) {
		ae.String(unix.IFLA_IFNAME, name)
		ae.Bytes(unix.IFLA_ADDRESS, mac)
		ae.Uint32(unix.IFLA_MTU, uint32(mtu))
		ofKind(ae, "ifb")
	})
}

// setIFB appends what the kernel passes over in a request that creates: the alias,
// and that no link-local address is to be made.
func setIFB(b *nl.Batch, name, alias string, mtu int) {
	add(b, "set link", name, unix.RTM_NEWLINK, 0, ifInfo(0, 0, 0), func(ae *netlink.AttributeEncoder) {
		ae.String(unix.IFLA_IFNAME, name)
		if alias != "" {
			ae.String(unix.IFLA_IFALIAS, alias)
		}
		// Below the least MTU of IPv6 (RFC 8200, section 5) a link has no IPv6 to set.
		if mtu < 1280 {
			return
		}
		ae.Nested(unix.IFLA_AF_SPEC, func(ae *netlink.AttributeEncoder) error {
			ae.Nested(unix.AF_INET6, func(ae *netlink.AttributeEncoder) error {
				ae.Uint8(unix.IFLA_INET6_ADDR_GEN_MODE, addrGenModeNone)
				return nil
			})
			return nil
		})
	})
}

// setUp appends a request by index: whatever has the name by now, it is meant for
// the link that the qdisc was given to.
func setUp(b *nl.Batch, name string, index int) {
	add(b, "set link up", name, unix.RTM_NEWLINK, 0, ifInfo(index, unix.IFF_UP, unix.IFF_UP), nil)
}

// delLink appends the deletion of a link by its index; by its name if that is 0.
func delLink(b *nl.Batch, name string, index int) {
	add(b, "delete link", name, unix.RTM_DELLINK, 0, ifInfo(index, 0, 0), func(ae *netlink.AttributeEncoder) {
		if index == 0 {
			ae.String(unix.IFLA_IFNAME, name)
		}
	})
}

// skipStats is RTEXT_FILTER_SKIP_STATS: a reply without the counters is half as long.
const skipStats = 1 << 3

func getLink(b *nl.Batch, name string, into *link) {
	m, err := nl.Encode(unix.RTM_GETLINK, 0, ifInfo(0, 0, 0), func(ae *netlink.AttributeEncoder) {
		ae.String(unix.IFLA_IFNAME, name)
		ae.Uint32(unix.IFLA_EXT_MASK, skipStats)
	})
	b.AddGet("get link", nl.Name(name), m, err, func(m netlink.Message) error { return into.decode(m.Data) })
}

// link is what the kernel says of a link, as far as it matters here.
type link struct {
	index, mtu  int
	name        string
	kind, alias string
	up          bool
}

// decode reads the body of an RTM_NEWLINK.
func (l *link) decode(b []byte) error {
	if len(b) < unix.SizeofIfInfomsg {
		return fmt.Errorf("%w: a link of %d bytes", nl.ErrMalformed, len(b))
	}
	*l = link{
		index: int(int32(binary.NativeEndian.Uint32(b[4:]))),
		up:    binary.NativeEndian.Uint32(b[8:])&unix.IFF_UP != 0,
	}
	return nl.Decode(b[unix.SizeofIfInfomsg:], func(ad *netlink.AttributeDecoder) error {
		switch ad.Type() {
		case unix.IFLA_IFNAME:
			l.name = ad.String()
		case unix.IFLA_MTU:
			l.mtu = int(ad.Uint32())
		case unix.IFLA_IFALIAS:
			l.alias = ad.String()
		case unix.IFLA_LINKINFO:
			ad.Nested(func(ad *netlink.AttributeDecoder) error {
				for ad.Next() {
					if ad.Type() == unix.IFLA_INFO_KIND {
						l.kind = ad.String()
					}
				}
				return nil
			})
		}
		return nil
	})
}
