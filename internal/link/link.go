// Package link reads and writes network interfaces over rtnetlink. All such requests are in this package. A request
// is a rtnetlink.LinkMessage, followed by the attributes that this type does not support:
//
//	link.Request{Index: index, Flags: unix.IFF_UP, Change: unix.IFF_UP}.Set(&b, "set link up", name)
//	link.Get(&b, "br0", 0, &l)
//
// Answers are decoded attribute by attribute into one type, Link. The library's own decoder supports neither
// IFLA_AF_SPEC nor IFLA_LINK_NETNSID, and makes 130 allocations for a link.
package link

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"net/netip"

	"github.com/jsimonetti/rtnetlink/v2/driver"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// ServiceLink is the name of the link that has the addresses of all services if kube-proxy runs in IPVS mode.
const ServiceLink = "kube-ipvs0"

// Link is one link as the kernel describes it.
type Link struct {
	Family uint8 // AF_BRIDGE: the message describes the link as a bridge's port
	Type   uint16
	Index  int
	Flags  uint32 // IFF_*
	Name   string
	Alias  string
	MAC    net.HardwareAddr
	MTU    int
	TxQLen uint32 // in packets
	Group  uint32
	Master int // the bridge or other master that it is a port of; 0 if none
	// Lower is the link below this one; for a veth it is the other end. If Elsewhere is true, it is in another
	// namespace.
	Lower     int
	Elsewhere bool
	elsewhere int32  // the kernel's number for that namespace
	Kind      string // empty for hardware and loopback
	PortOf    string // the kind of its master
	// Bridge and Port are nil if the link is of another kind.
	Bridge *driver.Bridge
	VLAN   uint16 // only of kind vlan
	Port   *driver.BridgePort
	// IPv4 and IPv6 are empty if the family is not enabled on the link.
	IPv4, IPv6  Parameters
	RouterFlags uint32     // IF_RA_*
	Token       netip.Addr // ending of IPv6 addresses; if unspecified, the kernel chooses it
	Counters    Counters   // only set by Count
}

// Counters are the packets and bytes that a link has received and sent since it was created.
type Counters struct {
	RxPackets, TxPackets, RxBytes, TxBytes uint64
}

// Alternative returns the error for an alternative name of a link. own is the link's own name.
func Alternative(own string) error {
	return nl.Invalid("it is an alternative name of link " + own + ", which rules of the firewall do not know: give " +
		own)
}

// Up reports whether the link is administratively up.
func (l *Link) Up() bool { return l.Flags&unix.IFF_UP != 0 }

// Parameters are the kernel's parameters for a link (net.ipv4.conf.<link>, net.ipv6.conf.<link>), four bytes each.
// IPv4 numbers them from 1, IPv6 from 0.
type Parameters []byte

// At returns the parameter at an index, counted from 0.
func (p Parameters) At(i int) (int32, bool) {
	if len(p) < 4*(i+1) {
		return 0, false
	}
	return int32(binary.NativeEndian.Uint32(p[4*i:])), true
}

// Decode parses the data of an RTM_NEWLINK or RTM_DELLINK. If only is given, it reads these attributes, else all that
// Link has fields for. Each attribute costs an allocation or two, and the kernel sends some sixty.
func (l *Link) Decode(data []byte, only ...uint16) error {
	if len(data) < unix.SizeofIfInfomsg {
		return fmt.Errorf("%w: a link of %d bytes", nl.ErrMalformed, len(data))
	}

	*l = Link{
		Family: data[0],
		Type:   binary.NativeEndian.Uint16(data[2:]),
		Index:  int(int32(binary.NativeEndian.Uint32(data[4:]))),
		Flags:  binary.NativeEndian.Uint32(data[8:]),
	}
	if only == nil {
		only = []uint16{unix.IFLA_IFNAME, unix.IFLA_ADDRESS, unix.IFLA_MTU, unix.IFLA_MASTER, unix.IFLA_LINK,
			unix.IFLA_LINK_NETNSID,
			unix.IFLA_IFALIAS, unix.IFLA_GROUP, unix.IFLA_LINKINFO, unix.IFLA_AF_SPEC}
	}

	return nl.Decode(nl.Pick(believable(data[unix.SizeofIfInfomsg:]), only...), l.attribute)
}

// believable cuts off attributes that a pod may have forged. An attribute's length has 16 bits, and a pod can make
// the kernel write more than that about a link's kind (MACs of a macvlan, mappings of a vlan). A reader then finds
// the next attribute in the middle of such data. The kernel never writes that much about a veth.
func believable(b []byte) []byte {
	if len(b) <= math.MaxUint16 {
		return b
	}
	before, info := nl.Cut(b, unix.IFLA_LINKINFO)

	// The kernel writes the kind first.
	if _, kind := nl.Cut(info, unix.IFLA_INFO_KIND); bytes.HasPrefix(kind, []byte("veth\x00")) {
		return b
	}
	return before
}

func (l *Link) attribute(ad *netlink.AttributeDecoder) {
	switch ad.Type() {
	case unix.IFLA_IFNAME:
		l.Name = ad.String()
	case unix.IFLA_ADDRESS:
		l.MAC = ad.Bytes()
	case unix.IFLA_MTU:
		l.MTU = int(ad.Uint32())
	case unix.IFLA_TXQLEN:
		l.TxQLen = ad.Uint32()
	case unix.IFLA_MASTER:
		l.Master = int(ad.Uint32())
	case unix.IFLA_LINK:
		l.Lower = int(ad.Uint32())
	case unix.IFLA_LINK_NETNSID:
		l.Elsewhere, l.elsewhere = true, int32(ad.Uint32())
	case unix.IFLA_IFALIAS:
		l.Alias = ad.String()
	case unix.IFLA_GROUP:
		l.Group = ad.Uint32()
	case unix.IFLA_STATS64:
		ad.Do(func(b []byte) error {
			_, err := binary.Decode(b, binary.NativeEndian, &l.Counters)
			return err
		})
	case unix.IFLA_LINKINFO:
		within(ad, l.info, unix.IFLA_INFO_KIND, unix.IFLA_INFO_DATA, unix.IFLA_INFO_SLAVE_KIND,
			unix.IFLA_INFO_SLAVE_DATA)
	case unix.IFLA_AF_SPEC:
		within(ad, l.family, unix.AF_INET, unix.AF_INET6)
	}
}

// within decodes some of the attributes that are nested in one.
func within(ad *netlink.AttributeDecoder, fn func(*netlink.AttributeDecoder), only ...uint16) {
	ad.Do(func(b []byte) error { return nl.Decode(nl.Pick(b, only...), fn) })
}

// info decodes the attributes of the link's kind. The kernel writes the kind first. Each kind numbers its attributes
// differently.
func (l *Link) info(ad *netlink.AttributeDecoder) {
	switch ad.Type() {
	case unix.IFLA_INFO_KIND:
		l.Kind = ad.String()
	case unix.IFLA_INFO_SLAVE_KIND:
		l.PortOf = ad.String()
	case unix.IFLA_INFO_DATA:
		switch l.Kind {
		case "bridge":
			l.Bridge = new(driver.Bridge)
			drive(ad, l.Bridge.Decode, unix.IFLA_BR_STP_STATE, unix.IFLA_BR_FORWARD_DELAY, unix.IFLA_BR_VLAN_FILTERING,
				unix.IFLA_BR_VLAN_PROTOCOL,
				unix.IFLA_BR_NF_CALL_IPTABLES, unix.IFLA_BR_NF_CALL_IP6TABLES, unix.IFLA_BR_FDB_MAX_LEARNED)
		case "vlan":
			within(ad, func(ad *netlink.AttributeDecoder) { l.VLAN = ad.Uint16() }, unix.IFLA_VLAN_ID)
		case "vxlan":
			within(ad, func(ad *netlink.AttributeDecoder) { l.Lower = int(ad.Uint32()) }, unix.IFLA_VXLAN_LINK)
		}
	case unix.IFLA_INFO_SLAVE_DATA:
		if l.PortOf == "bridge" {
			l.Port = new(driver.BridgePort)
			drive(ad, l.Port.Decode, unix.IFLA_BRPORT_STATE, unix.IFLA_BRPORT_MODE, unix.IFLA_BRPORT_LEARNING,
				unix.IFLA_BRPORT_UNICAST_FLOOD,
				unix.IFLA_BRPORT_MCAST_FLOOD, unix.IFLA_BRPORT_GROUP_FWD_MASK, unix.IFLA_BRPORT_ISOLATED)
		}
	}
}

// drive decodes some of the nested attributes with a driver of the library.
func drive(ad *netlink.AttributeDecoder, decode func(*netlink.AttributeDecoder) error, only ...uint16) {
	ad.Do(func(b []byte) error {
		ad, err := netlink.NewAttributeDecoder(nl.Pick(b, only...))
		if err == nil {
			err = decode(ad)
		}
		if err == nil {
			err = ad.Err()
		}
		return err
	})
}

// Attributes of include/uapi/linux/if_link.h.
const (
	inet6Flags = 1 // IFLA_INET6_FLAGS
	inet6Conf  = 2 // IFLA_INET6_CONF
	inet6Token = 7 // IFLA_INET6_TOKEN
)

// family decodes the attributes of IPv4 or IPv6.
func (l *Link) family(ad *netlink.AttributeDecoder) {
	if ad.Type() == unix.AF_INET {
		within(ad, func(ad *netlink.AttributeDecoder) { l.IPv4 = ad.Bytes() }, unix.IFLA_INET_CONF)
		return
	}

	within(ad, func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case inet6Flags:
			l.RouterFlags = ad.Uint32()
		case inet6Conf:
			l.IPv6 = ad.Bytes()
		case inet6Token:
			ad.Do(nl.Addr(&l.Token))
		}
	}, inet6Flags, inet6Conf, inet6Token)
}
