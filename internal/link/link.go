// Package link reads and changes network interfaces over rtnetlink. All such requests of Tombolo are in this package. A
// request is an rtnetlink.LinkMessage, followed by attributes that LinkMessage does not support.
//
//	link.Request{Index: index, Flags: unix.IFF_UP, Change: unix.IFF_UP}.Set(&b, "set link up", name)
//	link.Get(&b, "br0", 0, &l)
//
// The package decodes answers itself, into the type Info. The decoder of package rtnetlink supports neither
// IFLA_AF_SPEC nor IFLA_LINK_NETNSID, and makes 130 allocations for a link.
package link

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"

	"github.com/jsimonetti/rtnetlink/v2/driver"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// ServiceLink is the name of the link that has the addresses of all Kubernetes services if kube-proxy runs in IPVS
// mode.
const ServiceLink = "kube-ipvs0"

// Info describes a network interface in the kernel.
type Info struct {
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
	Master int // index of the bridge or other master; 0 if none
	// Lower is the index of the link below this one. For a veth, it is the index of the other end. If Elsewhere is
	// true, that link is in another network namespace.
	Lower     int
	Elsewhere bool
	elsewhere int32  // the nsid of that namespace
	Kind      string // of the link, such as veth; empty for hardware and loopback
	PortOf    string // the kind of its master; empty if none
	// Bridge is nil unless the link is a bridge. Port is nil unless the link is a port of a bridge.
	Bridge *driver.Bridge
	VLAN   uint16 // the VLAN ID; only of kind vlan
	Port   *driver.BridgePort
	// IPv4 and IPv6 are empty if the family is not enabled on the link.
	IPv4, IPv6  Parameters
	RouterFlags uint32     // IF_RA_*
	Token       netip.Addr // interface identifier; if unspecified, the kernel chooses it
	Counters    Counters   // set if the message has IFLA_STATS64, as for Count
}

// Counters holds the numbers of packets and bytes that a link has received and sent since it was created.
type Counters struct {
	RxPackets, TxPackets, RxBytes, TxBytes uint64
}

// Alternative returns an error about a name that is only an alternative name of a link. own is the link's own name.
func Alternative(own string) error {
	return nl.Invalid("it is an alternative name of link " + own + ", which rules of the firewall do not know: give " +
		own)
}

// Up reports whether the link is administratively up (IFF_UP).
func (l *Info) Up() bool { return l.Flags&unix.IFF_UP != 0 }

// Parameters holds the sysctls of a link for one family (net.ipv4.conf.LINK or net.ipv6.conf.LINK), with four bytes
// for each. The kernel numbers those of IPv4 from 1, and those of IPv6 from 0.
type Parameters []byte

// At returns the parameter with the index i, counted from 0. It returns false if the kernel does not have this
// parameter.
func (p Parameters) At(i int) (int32, bool) {
	if len(p) < 4*(i+1) {
		return 0, false
	}
	return int32(binary.NativeEndian.Uint32(p[4*i:])), true
}

// Decode parses the data of an RTM_NEWLINK or RTM_DELLINK. If only is given, it reads only these attributes, else all
// attributes that Info has fields for. The kernel sends some sixty.
func (l *Info) Decode(data []byte, only ...uint16) error {
	if len(data) < unix.SizeofIfInfomsg {
		return fmt.Errorf("%w: a link of %d bytes", nl.ErrMalformed, len(data))
	}

	*l = Info{
		Family: data[0],
		Type:   binary.NativeEndian.Uint16(data[2:]),
		Index:  int(int32(binary.NativeEndian.Uint32(data[4:]))),
		Flags:  binary.NativeEndian.Uint32(data[8:]),
	}
	r := &reader{attrs: believable(data[unix.SizeofIfInfomsg:]), only: only}
	l.Name, l.Alias = nl.Text(r.find(unix.IFLA_IFNAME)), nl.Text(r.find(unix.IFLA_IFALIAS))
	l.MAC, l.MTU = bytes.Clone(r.find(unix.IFLA_ADDRESS)), int(r.number(unix.IFLA_MTU))
	l.TxQLen, l.Group = r.number(unix.IFLA_TXQLEN), r.number(unix.IFLA_GROUP)
	l.Master, l.Lower = int(r.number(unix.IFLA_MASTER)), int(r.number(unix.IFLA_LINK))
	l.Elsewhere, l.elsewhere = r.find(unix.IFLA_LINK_NETNSID) != nil, int32(r.number(unix.IFLA_LINK_NETNSID))
	if b := r.find(unix.IFLA_STATS64); b != nil {
		_, err := binary.Decode(b, binary.NativeEndian, &l.Counters)
		r.fail(err)
	}

	l.info(r)
	l.IPv4 = bytes.Clone(r.find(unix.IFLA_AF_SPEC, unix.AF_INET, unix.IFLA_INET_CONF))
	l.IPv6 = bytes.Clone(r.find(unix.IFLA_AF_SPEC, unix.AF_INET6, inet6Conf))
	l.RouterFlags = r.number(unix.IFLA_AF_SPEC, unix.AF_INET6, inet6Flags)
	l.Token, _ = netip.AddrFromSlice(r.find(unix.IFLA_AF_SPEC, unix.AF_INET6, inet6Token))
	r.fail(nl.Decode(nl.Pick(r.attrs), func(*netlink.AttributeDecoder) {})) // refuse bytes after the last attribute
	return r.err
}

// info decodes the settings that belong to the link's kind, and to its master's kind (IFLA_LINKINFO). Each kind numbers
// its attributes differently.
func (l *Info) info(r *reader) {
	l.Kind = nl.Text(r.find(unix.IFLA_LINKINFO, unix.IFLA_INFO_KIND))
	l.PortOf = nl.Text(r.find(unix.IFLA_LINKINFO, unix.IFLA_INFO_SLAVE_KIND))
	switch data := r.find(unix.IFLA_LINKINFO, unix.IFLA_INFO_DATA); {
	case l.Kind == "bridge" && data != nil:
		l.Bridge = new(driver.Bridge)
		r.drive(data, l.Bridge.Decode, unix.IFLA_BR_STP_STATE, unix.IFLA_BR_FORWARD_DELAY, unix.IFLA_BR_VLAN_FILTERING,
			unix.IFLA_BR_VLAN_PROTOCOL, unix.IFLA_BR_NF_CALL_IPTABLES, unix.IFLA_BR_NF_CALL_IP6TABLES,
			unix.IFLA_BR_FDB_MAX_LEARNED)
	case l.Kind == "vlan":
		if id := nl.Find(data, unix.IFLA_VLAN_ID); len(id) == 2 {
			l.VLAN = binary.NativeEndian.Uint16(id)
		}
	case l.Kind == "vxlan":
		l.Lower = int(r.number(unix.IFLA_LINKINFO, unix.IFLA_INFO_DATA, unix.IFLA_VXLAN_LINK))
	}

	if port := r.find(unix.IFLA_LINKINFO, unix.IFLA_INFO_SLAVE_DATA); l.PortOf == "bridge" && port != nil {
		l.Port = new(driver.BridgePort)
		r.drive(port, l.Port.Decode, unix.IFLA_BRPORT_STATE, unix.IFLA_BRPORT_MODE, unix.IFLA_BRPORT_LEARNING,
			unix.IFLA_BRPORT_UNICAST_FLOOD, unix.IFLA_BRPORT_MCAST_FLOOD, unix.IFLA_BRPORT_GROUP_FWD_MASK,
			unix.IFLA_BRPORT_ISOLATED)
	}
}

// Attributes of include/uapi/linux/if_link.h.
const (
	inet6Flags = 1 // IFLA_INET6_FLAGS
	inet6Conf  = 2 // IFLA_INET6_CONF
	inet6Token = 7 // IFLA_INET6_TOKEN
)

// reader reads attributes, and stores the last error about a malformed one in err.
type reader struct {
	attrs []byte
	only  []uint16 // the attributes to read; nil means all
	err   error
}

// find returns the content of an attribute as nl.Find does, or nil if r.only excludes the attribute.
func (r *reader) find(path ...uint16) []byte {
	if r.only != nil && !slices.Contains(r.only, path[0]) {
		return nil
	}
	return nl.Find(r.attrs, path...)
}

// number returns the content of an attribute as a number of four bytes, or 0 if the attribute is missing. If the
// attribute has another length, it returns 0 and stores an error in r.err.
func (r *reader) number(path ...uint16) uint32 {
	b := r.find(path...)
	if len(b) == 4 {
		return binary.NativeEndian.Uint32(b)
	}
	if b != nil {
		r.fail(fmt.Errorf("attribute %d of a link has %d bytes", int(path[len(path)-1]), len(b)))
	}
	return 0
}

// drive calls decode, a method of rtnetlink, with the attributes in b whose types are in only. It stores an error in
// r.err.
func (r *reader) drive(b []byte, decode func(*netlink.AttributeDecoder) error, only ...uint16) {
	ad, err := netlink.NewAttributeDecoder(nl.Pick(b, only...))
	if err == nil {
		err = cmp.Or(decode(ad), ad.Err())
	}
	r.fail(err)
}

func (r *reader) fail(err error) {
	if err != nil {
		r.err = fmt.Errorf("%w: %w", nl.ErrMalformed, err)
	}
}

// believable returns the attributes in b that a pod cannot have forged. An attribute's length has only 16 bits. It
// overflows if a pod makes the kernel write more data about a link's kind, such as the MACs of a macvlan. A reader
// would then take some of these data for further attributes. So if b is longer than 65,535 bytes, believable cuts it
// off at IFLA_LINKINFO. It keeps all attributes of a veth, whose data are short.
func believable(b []byte) []byte {
	if len(b) <= math.MaxUint16 {
		return b
	}
	before, info := nl.Cut(b, unix.IFLA_LINKINFO)

	// Trust the kind, since the kernel writes it before the attributes that a pod may have chosen.
	if _, kind := nl.Cut(info, unix.IFLA_INFO_KIND); bytes.HasPrefix(kind, []byte("veth\x00")) {
		return b
	}
	return before
}
