package bridge

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Link is what the kernel says of one link.
type Link struct {
	Index int
	Name  string
	Kind  string // "bridge", "veth", …; empty for hardware and loopback
	MAC   net.HardwareAddr
	MTU   int
	Up    bool // set up by the administrator (IFF_UP); says nothing of the carrier
	// Promiscuous says that the administrator set it so (IFF_PROMISC). It is false for
	// a link that is promiscuous only because a capture is running on it.
	Promiscuous bool
	Master      int // the index of the bridge that it is a port of, 0 if none
	Peer        int // of a veth: the other end's index, in the namespace that it is in
	Alias       string
	Group       uint32 // of links, 0 unless it was given one
	// RouteLocalnet says that the kernel routes 127.0.0.0/8 on it
	// (net.ipv4.conf.<link>.route_localnet).
	RouteLocalnet bool
	// ReversePath is how the kernel checks where IPv4 packets come from that come in by
	// it (net.ipv4.conf.<link>.rp_filter; the larger of this and that of "all" counts).
	ReversePath int
	// UnicastInMulticast says that IPv6 takes what is for a single address in a frame that
	// is not for a single MAC (net.ipv6.conf.<link>.drop_unicast_in_l2_multicast is 0), and
	// AcceptRA whether it takes router advertisements: 0, 1 or 2 (accept_ra). They are
	// false and 0 where the kernel has no IPv6 on the link.
	UnicastInMulticast bool
	AcceptRA           int
	Port               *PortState   // of a bridge's port; nil otherwise
	Bridge             *BridgeState // of a bridge; nil otherwise
}

// BridgeState is what the kernel says of a link as a bridge.
type BridgeState struct {
	// Netfilter says that the kernel was built to show bridged packets to the firewall
	// (CONFIG_BRIDGE_NETFILTER). Where it is false, the two below are too. Whether the
	// module that does it is loaded is another question: see ProbeNetfilter.
	Netfilter bool
	// NFCallIPTables and NFCallIP6Tables have the bridge show its IPv4 and its IPv6
	// packets to the firewall (IFLA_BR_NF_CALL_IPTABLES, IFLA_BR_NF_CALL_IP6TABLES), as
	// do for all bridges the parameters net.bridge.bridge-nf-call-iptables and
	// -ip6tables, of which nothing is said here.
	NFCallIPTables  bool
	NFCallIP6Tables bool
	// MaxLearned is how many MACs the bridge learns at most (IFLA_BR_FDB_MAX_LEARNED);
	// 0 is without limit, and nil where the kernel has none (before Linux 6.7).
	MaxLearned *uint32
}

// PortState is what the kernel says of a link as a bridge's port.
type PortState struct {
	Forwarding     bool // the port's state is forwarding: it is up and has a carrier
	Hairpin        bool
	Isolated       bool
	ForwardGroups  bool // those of STP and LLDP and no others, see Port
	Learning       bool
	Flood          bool // unknown unicast goes out of it
	MulticastFlood bool // unknown multicast goes out of it
}

// Attributes of include/uapi/linux/if_link.h that x/sys/unix does not name.
const (
	brportState      = 1  // IFLA_BRPORT_STATE
	brportMode       = 4  // IFLA_BRPORT_MODE: hairpin
	brportLearning   = 8  // IFLA_BRPORT_LEARNING
	brportFlood      = 9  // IFLA_BRPORT_UNICAST_FLOOD
	brportMcastFlood = 27 // IFLA_BRPORT_MCAST_FLOOD
	brportIsolated   = 33 // IFLA_BRPORT_ISOLATED

	brportGroupForward = 31 // IFLA_BRPORT_GROUP_FWD_MASK

	stateForwarding = 3 // BR_STATE_FORWARDING, include/uapi/linux/if_bridge.h

	extMaskSkipStats = 1 << 3 // RTEXT_FILTER_SKIP_STATS: without the counters a reply is half as long

	aliasMax = 255 // IFALIASZ - 1
)

// Link looks a link up by its name, in one request. The error matches
// fs.ErrNotExist if there is none.
func (c *Conn) Link(ctx context.Context, name string) (*Link, error) {
	if err := c.usable(ctx); err != nil {
		return nil, err
	}

	var b nl.Batch
	var l Link
	getLink(&b, name, &l)
	if err := c.execute(ctx, &b); err != nil {
		return nil, err
	}
	return &l, nil
}

func getLink(b *nl.Batch, name string, into *Link) {
	b.Get("get link", nl.Name(name), unix.RTM_GETLINK, 0, func(e *nl.Encoder) {
		ifInfo(e, 0, 0, 0)
		e.String(unix.IFLA_IFNAME, name)
		e.Uint32(unix.IFLA_EXT_MASK, extMaskSkipStats)
	}, func(m nl.Message) error { return into.decode(m.Data) })
}

// LinkByIndex looks a link up by its index, in one request.
func (c *Conn) LinkByIndex(ctx context.Context, index int) (*Link, error) {
	if err := c.usable(ctx); err != nil {
		return nil, err
	}

	var b nl.Batch
	var l Link
	b.Get("get link", nl.Name(strconv.Itoa(index)), unix.RTM_GETLINK, 0, func(e *nl.Encoder) {
		ifInfo(e, index, 0, 0)
		e.Uint32(unix.IFLA_EXT_MASK, extMaskSkipStats)
	}, func(m nl.Message) error { return l.decode(m.Data) })
	if err := c.execute(ctx, &b); err != nil {
		return nil, err
	}
	return &l, nil
}

// Veths lists the veth ends in the bridges' namespace. It is a dump: keep it off
// a path that has to be fast.
func (c *Conn) Veths(ctx context.Context) ([]Link, error) {
	if err := c.usable(ctx); err != nil {
		return nil, err
	}

	return c.links(ctx, "list veth links", "veth", 0)
}

// Ports lists the ports of a bridge, by its index.
func (c *Conn) Ports(ctx context.Context, bridge int) ([]Link, error) {
	if err := c.usable(ctx); err != nil {
		return nil, err
	}

	return c.links(ctx, "list ports", "", bridge)
}

func (c *Conn) links(ctx context.Context, op, kind string, master int) ([]Link, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	var list []Link
	err := c.nl.Dump(op, unix.RTM_GETLINK, func(e *nl.Encoder) {
		ifInfo(e, 0, 0, 0)
		e.Uint32(unix.IFLA_EXT_MASK, extMaskSkipStats)
		// The kernel filters by kind and by master (Linux 4.6).
		if master != 0 {
			e.Uint32(unix.IFLA_MASTER, uint32(master))
		}
		if kind != "" {
			e.Nest(unix.IFLA_LINKINFO, func(e *nl.Encoder) { e.String(unix.IFLA_INFO_KIND, kind) })
		}
	}, func(m nl.Message) error {
		var l Link
		if err := l.decode(m.Data); err != nil {
			return err
		}
		list = append(list, l)
		return nil
	})
	return list, err
}

// ifInfo appends struct ifinfomsg (include/uapi/linux/rtnetlink.h).
func ifInfo(e *nl.Encoder, index int, flags, change uint32) {
	var b [unix.SizeofIfInfomsg]byte
	binary.NativeEndian.PutUint32(b[4:], uint32(index))
	binary.NativeEndian.PutUint32(b[8:], flags)
	binary.NativeEndian.PutUint32(b[12:], change)
	e.Raw(b[:])
}

// decode reads the body of an RTM_NEWLINK.
func (l *Link) decode(b []byte) error {
	if len(b) < unix.SizeofIfInfomsg {
		return fmt.Errorf("%w: a link of %d bytes", nl.ErrMalformed, len(b))
	}
	flags := binary.NativeEndian.Uint32(b[8:])
	*l = Link{
		Index: int(int32(binary.NativeEndian.Uint32(b[4:]))),
		Up:    flags&unix.IFF_UP != 0,
		// The kernel writes down here what was asked for by flags, and in
		// IFLA_PROMISCUITY how many want it, sockets included.
		Promiscuous: flags&unix.IFF_PROMISC != 0,
	}
	attrs := nl.ParseAttrs(b[unix.SizeofIfInfomsg:])
	for attrs.Next() {
		switch attrs.Type {
		case unix.IFLA_IFNAME:
			l.Name = attrs.String()
		case unix.IFLA_ADDRESS:
			l.MAC = append(net.HardwareAddr(nil), attrs.Data...)
		case unix.IFLA_MTU:
			l.MTU = int(attrs.Uint32())
		case unix.IFLA_MASTER:
			l.Master = int(attrs.Uint32())
		case unix.IFLA_LINK:
			l.Peer = int(attrs.Uint32())
		case unix.IFLA_IFALIAS:
			l.Alias = attrs.String()
		case unix.IFLA_GROUP:
			l.Group = attrs.Uint32()
		case unix.IFLA_LINKINFO:
			if err := l.decodeInfo(attrs.Nested()); err != nil {
				return err
			}
		case unix.IFLA_AF_SPEC:
			if err := l.decodeFamilies(attrs.Nested()); err != nil {
				return err
			}
		}
	}
	return attrs.Err()
}

// decodeFamilies reads what the families have of the link.
func (l *Link) decodeFamilies(attrs *nl.Attrs) error {
	for attrs.Next() {
		if attrs.Type != unix.AF_INET && attrs.Type != unix.AF_INET6 {
			continue
		}
		conf := attrs.Nested()
		for conf.Next() {
			switch {
			case attrs.Type == unix.AF_INET && conf.Type == unix.IFLA_INET_CONF:
				v, _ := parameters(conf.Data).at(ipv4ConfRouteLocalnet - 1)
				l.RouteLocalnet = v != 0
				v, _ = parameters(conf.Data).at(ipv4ConfRPFilter - 1)
				l.ReversePath = int(v)
			case attrs.Type == unix.AF_INET6 && conf.Type == inet6Conf:
				drop, known := parameters(conf.Data).at(dropUnicast().index)
				l.UnicastInMulticast = known && drop == 0
				v, _ := parameters(conf.Data).at(acceptRA().index)
				l.AcceptRA = int(v)
			}
		}
		if err := conf.Err(); err != nil {
			return err
		}
	}
	return attrs.Err()
}

func (l *Link) decodeInfo(attrs *nl.Attrs) error {
	var slaveKind string
	for attrs.Next() {
		switch attrs.Type {
		case unix.IFLA_INFO_KIND:
			l.Kind = attrs.String()
			if l.Kind == "bridge" {
				l.Bridge = new(BridgeState)
			}
		case unix.IFLA_INFO_DATA:
			// The kernel writes the kind first; other kinds number theirs anew.
			if l.Bridge == nil {
				continue
			}
			if err := l.Bridge.decode(attrs.Nested()); err != nil {
				return err
			}
		case unix.IFLA_INFO_SLAVE_KIND:
			slaveKind = attrs.String()
		case unix.IFLA_INFO_SLAVE_DATA:
			// Here too.
			if slaveKind != "bridge" {
				continue
			}
			port, err := decodePort(attrs.Nested())
			if err != nil {
				return err
			}
			l.Port = port
		}
	}
	return attrs.Err()
}

func (s *BridgeState) decode(attrs *nl.Attrs) error {
	for attrs.Next() {
		switch attrs.Type {
		case unix.IFLA_BR_NF_CALL_IPTABLES:
			s.Netfilter = true
			s.NFCallIPTables = attrs.Uint8() != 0
		case unix.IFLA_BR_NF_CALL_IP6TABLES:
			s.NFCallIP6Tables = attrs.Uint8() != 0
		case unix.IFLA_BR_FDB_MAX_LEARNED:
			s.MaxLearned = new(attrs.Uint32())
		}
	}
	return attrs.Err()
}

func decodePort(attrs *nl.Attrs) (*PortState, error) {
	var p PortState
	for attrs.Next() {
		switch attrs.Type {
		case brportState:
			p.Forwarding = attrs.Uint8() == stateForwarding
		case brportMode:
			p.Hairpin = attrs.Uint8() != 0
		case brportLearning:
			p.Learning = attrs.Uint8() != 0
		case brportFlood:
			p.Flood = attrs.Uint8() != 0
		case brportMcastFlood:
			p.MulticastFlood = attrs.Uint8() != 0
		case brportIsolated:
			p.Isolated = attrs.Uint8() != 0
		case brportGroupForward:
			p.ForwardGroups = attrs.Uint16() == (&Port{ForwardGroups: true}).groupMask()
		}
	}
	return &p, attrs.Err()
}
