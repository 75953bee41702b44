// Package link is the one place where network interfaces are read from and written to
// rtnetlink. Requests are rtnetlink.LinkMessage, with what it cannot say behind it:
//
//	link.Request{Index: index, Flags: unix.IFF_UP, Change: unix.IFF_UP}.Set(&b, "set link up", name)
//	link.Get(&b, "br0", 0, &l)
//
// Answers are read attribute by attribute into one type, Link. The library's own decoding
// knows neither IFLA_AF_SPEC nor IFLA_LINK_NETNSID, and makes 130 allocations of a link.
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

// ServiceLink is the name of the link on which kube-proxy in IPVS mode keeps the addresses of all services.
const ServiceLink = "kube-ipvs0"

// Link is what the kernel says of one link.
type Link struct {
	Family uint8 // AF_BRIDGE: the message is about a bridge's port, and not about the link
	Type   uint16
	Index  int
	Flags  uint32 // IFF_*
	Name   string
	Alias  string
	MAC    net.HardwareAddr
	MTU    int
	TxQLen uint32 // in packets
	Group  uint32
	Master int // of which it is a port; 0 if of none
	// Lower is the link that it rests on, of a veth its other end. It is one of another
	// namespace where Elsewhere is true.
	Lower     int
	Elsewhere bool
	elsewhere int32  // the kernel's number for that namespace
	Kind      string // empty for hardware and loopback
	PortOf    string // the kind of its master
	// Each is nil where the link is of another kind.
	Bridge *driver.Bridge
	VLAN   uint16 // of a link of kind vlan; 0 for others
	Port   *driver.BridgePort
	// IPv4 and IPv6 are empty where the kernel has nothing of the family on the link.
	IPv4, IPv6  Parameters
	RouterFlags uint32     // IF_RA_*
	Token       netip.Addr // how IPv6 addresses are to end; unspecified: it is left to the kernel
	Counters    Counters   // only of Count
}

// Counters are what a link has received and transmitted, since it was made.
type Counters struct {
	RxPackets, TxPackets, RxBytes, TxBytes uint64
}

// Up says that the administrator set it up.
func (l *Link) Up() bool { return l.Flags&unix.IFF_UP != 0 }

// Parameters are those of the kernel for a link (net.ipv4.conf.<link>, net.ipv6.conf.<link>),
// four bytes each. IPv4 numbers them from 1, IPv6 from 0.
type Parameters []byte

// At gives the one at an index, from 0.
func (p Parameters) At(i int) (int32, bool) {
	if len(p) < 4*(i+1) {
		return 0, false
	}
	return int32(binary.NativeEndian.Uint32(p[4*i:])), true
}

// Decode reads the data of an RTM_NEWLINK or RTM_DELLINK. Of its attributes it reads those
// in only, or all of Link: each costs an allocation or two, and the kernel sends some sixty.
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
		only = []uint16{unix.IFLA_IFNAME, unix.IFLA_ADDRESS, unix.IFLA_MTU, unix.IFLA_MASTER, unix.IFLA_LINK, unix.IFLA_LINK_NETNSID,
			unix.IFLA_IFALIAS, unix.IFLA_GROUP, unix.IFLA_LINKINFO, unix.IFLA_AF_SPEC}
	}
	return nl.Decode(nl.Pick(believable(data[unix.SizeofIfInfomsg:]), only...), l.attribute)
}

// believable leaves out attributes that a pod may have forged. The kernel has 16 bits for an attribute's length,
// and a pod can have it write more about a link's kind (MACs of a macvlan, mappings of a vlan): the rest is then
// read from the middle of that. Of a veth it writes no such attribute.
func believable(b []byte) []byte {
	if len(b) <= math.MaxUint16 {
		return b
	}
	before, info := nl.Cut(b, unix.IFLA_LINKINFO)
	if _, kind := nl.Cut(info, unix.IFLA_INFO_KIND); bytes.HasPrefix(kind, []byte("veth\x00")) { // the kernel writes it first
		return b
	}
	return before
}

func (l *Link) attribute(ad *netlink.AttributeDecoder) error {
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
		within(ad, l.info, unix.IFLA_INFO_KIND, unix.IFLA_INFO_DATA, unix.IFLA_INFO_SLAVE_KIND, unix.IFLA_INFO_SLAVE_DATA)
	case unix.IFLA_AF_SPEC:
		within(ad, l.family, unix.AF_INET, unix.AF_INET6)
	}
	return nil
}

// within reads some of the attributes that are in one.
func within(ad *netlink.AttributeDecoder, fn func(*netlink.AttributeDecoder) error, only ...uint16) {
	ad.Do(func(b []byte) error { return nl.Decode(nl.Pick(b, only...), fn) })
}

// info reads what is of the link's kind. The kernel writes the kind first; each numbers
// its attributes anew.
func (l *Link) info(ad *netlink.AttributeDecoder) error {
	switch ad.Type() {
	case unix.IFLA_INFO_KIND:
		l.Kind = ad.String()
	case unix.IFLA_INFO_SLAVE_KIND:
		l.PortOf = ad.String()
	case unix.IFLA_INFO_DATA:
		switch l.Kind {
		case "bridge":
			l.Bridge = new(driver.Bridge)
			drive(ad, l.Bridge.Decode, unix.IFLA_BR_STP_STATE, unix.IFLA_BR_FORWARD_DELAY, unix.IFLA_BR_VLAN_FILTERING, unix.IFLA_BR_VLAN_PROTOCOL,
				unix.IFLA_BR_NF_CALL_IPTABLES, unix.IFLA_BR_NF_CALL_IP6TABLES, unix.IFLA_BR_FDB_MAX_LEARNED)
		case "vlan":
			within(ad, func(ad *netlink.AttributeDecoder) error {
				l.VLAN = ad.Uint16()
				return nil
			}, unix.IFLA_VLAN_ID)
		case "vxlan":
			within(ad, func(ad *netlink.AttributeDecoder) error {
				l.Lower = int(ad.Uint32())
				return nil
			}, unix.IFLA_VXLAN_LINK)
		}
	case unix.IFLA_INFO_SLAVE_DATA:
		if l.PortOf == "bridge" {
			l.Port = new(driver.BridgePort)
			drive(ad, l.Port.Decode, unix.IFLA_BRPORT_STATE, unix.IFLA_BRPORT_MODE, unix.IFLA_BRPORT_LEARNING, unix.IFLA_BRPORT_UNICAST_FLOOD,
				unix.IFLA_BRPORT_MCAST_FLOOD, unix.IFLA_BRPORT_GROUP_FWD_MASK, unix.IFLA_BRPORT_ISOLATED)
		}
	}
	return nil
}

// drive has a driver of the library's read some of the attributes that are in one.
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

// Of include/uapi/linux/if_link.h.
const (
	inet6Flags = 1 // IFLA_INET6_FLAGS
	inet6Conf  = 2 // IFLA_INET6_CONF
	inet6Token = 7 // IFLA_INET6_TOKEN
)

func (l *Link) family(ad *netlink.AttributeDecoder) error {
	if ad.Type() == unix.AF_INET {
		within(ad, func(ad *netlink.AttributeDecoder) error {
			l.IPv4 = ad.Bytes()
			return nil
		}, unix.IFLA_INET_CONF)
		return nil
	}
	within(ad, func(ad *netlink.AttributeDecoder) error {
		switch ad.Type() {
		case inet6Flags:
			l.RouterFlags = ad.Uint32()
		case inet6Conf:
			l.IPv6 = ad.Bytes()
		case inet6Token:
			ad.Do(nl.Addr(&l.Token))
		}
		return nil
	}, inet6Flags, inet6Conf, inet6Token)
	return nil
}
