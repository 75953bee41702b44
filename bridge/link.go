package bridge

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"strconv"
	"time"

	"github.com/jsimonetti/rtnetlink/v2"
	"github.com/jsimonetti/rtnetlink/v2/driver"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/diff"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Link holds the properties of a network link.
type Link struct {
	Index int
	Name  string
	Kind  string // "bridge", "veth", …; empty for hardware and loopback
	MAC   net.HardwareAddr
	MTU   int
	Up    bool // administratively up (IFF_UP), with or without carrier
	// Promiscuous is set if a program set the flag IFF_PROMISC, as `ip link` does. It is not set if the link is
	// promiscuous only because a packet capture is running.
	Promiscuous bool
	Master      int // index of the bridge, bond or other master of the link, 0 if none
	Peer        int // for a veth, the index of the other end in that end's namespace
	Alias       string
	Group       uint32 // link group; 0 unless set
	// RouteLocalnet is the link's sysctl net.ipv4.conf.LINK.route_localnet. If it is on, the kernel routes packets to
	// 127.0.0.0/8 on the link.
	RouteLocalnet bool
	// AcceptRA is the link's sysctl net.ipv6.conf.LINK.accept_ra: 0, 1 or 2. Without IPv6 on the link it is 0.
	AcceptRA int
	// Port describes the link as a port of a bridge: its name, MAC, MTU, alias and group, and its port flags, such as
	// Hairpin. It is nil if the link is not a port of a bridge. Forwarding is set if the port forwards: it is up, has a
	// carrier, and does not wait for the spanning tree protocol.
	Port       *Port
	Forwarding bool
	Bridge     *BridgeState // nil unless it is a bridge

	reversePath        int  // net.ipv4.conf.<link>.rp_filter; the larger of this and the value of "all" applies
	unicastInMulticast bool // net.ipv6.conf.<link>.drop_unicast_in_l2_multicast is 0
}

// BridgeState holds the properties of a bridge.
type BridgeState struct {
	netfilter bool // the kernel was built to pass bridged packets through the firewall (CONFIG_BRIDGE_NETFILTER)

	// NFCallIPTables and NFCallIP6Tables are set if the bridge passes its IPv4 and IPv6 packets through the firewall.
	// They apply to this bridge even if the sysctls net.bridge.bridge-nf-call-iptables and -ip6tables, for all
	// bridges, are 0.
	NFCallIPTables  bool
	NFCallIP6Tables bool
	// VLANFiltering is set if the bridge separates VLANs (IFLA_BR_VLAN_FILTERING) by IEEE 802.1Q tags
	// (IFLA_BR_VLAN_PROTOCOL).
	VLANFiltering bool
	// MaxLearned is the maximum number of MACs that the bridge learns (IFLA_BR_FDB_MAX_LEARNED). 0 means no limit. It
	// is nil if the kernel does not support a limit (before Linux 6.7).
	MaxLearned *uint32
	// PortDelay is the time until a new port forwards if the bridge runs the spanning tree protocol. It is twice the
	// forwarding delay (IFLA_BR_FORWARD_DELAY). Without the protocol, it is 0.
	PortDelay time.Duration
}

const aliasMax = 255 // IFALIASZ - 1

// Link returns the link with the given name. It sends one request. If the link does not exist, the error matches
// fs.ErrNotExist.
func (c *Conn) Link(ctx context.Context, name string) (*Link, error) {
	return c.link(ctx, name, 0)
}

// bridgeNamed returns the link with the given name; the caller must check that it is a bridge. bridgeNamed returns an
// error if name is only an alternative name of the link, since firewall rules and other programs do not know such
// names.
func (c *Conn) bridgeNamed(ctx context.Context, name string) (*Link, error) {
	l, err := c.Link(ctx, name)
	if err == nil && l.Name != name {
		err = &tombolo.OpError{Op: "get bridge", Object: name, Err: link.Alternative(l.Name)}
	}
	return l, err
}

// LinkByIndex returns the link with the given index. It sends one request. If the link does not exist, the error
// matches fs.ErrNotExist.
func (c *Conn) LinkByIndex(ctx context.Context, index int) (*Link, error) {
	return c.link(ctx, "", index)
}

func (c *Conn) link(ctx context.Context, name string, index int, only ...uint16) (*Link, error) {
	l, err := link.Find(ctx, c.nl, name, index, only...)
	if err != nil {
		return nil, err
	}

	return linkOf(l), nil
}

// Veths returns all veth ends in the bridges' network namespace. It lists them, so it takes longer with more pods.
func (c *Conn) Veths(ctx context.Context) ([]Link, error) {
	return c.links(ctx, "list veth links", "veth", 0)
}

// Ports returns the ports of the bridge with the given index.
func (c *Conn) Ports(ctx context.Context, bridge int) ([]Link, error) {
	if bridge <= 0 {
		return nil, &tombolo.OpError{Op: "list ports",
			Err: fmt.Errorf("%w: no bridge has the index %d", tombolo.ErrInvalid, bridge)}
	}
	return c.links(ctx, "list ports", "", bridge)
}

func (c *Conn) links(ctx context.Context, op, kind string, master int) ([]Link, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	var list []Link
	err := link.List(c.nl, op, kind, master, func(l *link.Info) { list = append(list, *linkOf(l)) })
	return list, err
}

// linkOf converts a link.Info to a Link.
func linkOf(l *link.Info) *Link {
	to := &Link{
		Index: l.Index, Name: l.Name, Kind: l.Kind, MAC: l.MAC, MTU: l.MTU, Master: l.Master, Peer: l.Lower,
		Alias: l.Alias, Group: l.Group,
		Up: l.Up(),
		// IFF_PROMISC is set only if a program requested it, as `ip link` does. IFLA_PROMISCUITY would also count
		// packet sockets.
		Promiscuous: l.Flags&unix.IFF_PROMISC != 0,
	}

	v, _ := l.IPv4.At(ipv4ConfRouteLocalnet - 1)
	to.RouteLocalnet = v != 0
	v, _ = l.IPv4.At(ipv4ConfRPFilter - 1)
	to.reversePath = int(v)
	drop, known := l.IPv6.At(dropUnicast().index)
	to.unicastInMulticast = known && drop == 0
	v, _ = l.IPv6.At(acceptRA().index)
	to.AcceptRA = int(v)
	if b := l.Bridge; b != nil {
		to.Bridge = &BridgeState{
			netfilter:       b.NfCallIptables != nil,
			NFCallIPTables:  isOn(b.NfCallIptables),
			NFCallIP6Tables: isOn(b.NfCallIp6tables),
			VLANFiltering: isOn(b.VlanFiltering) &&
				(b.VlanProtocol == nil || *b.VlanProtocol == driver.VlanProtocol8021Q),
			MaxLearned: b.FdbMaxLearned,
		}
		if b.StpState != nil && *b.StpState != driver.BridgeStpStateDisabled && b.ForwardDelay != nil {
			const clockTick = 10 * time.Millisecond // the unit of the kernel's timers of a bridge

			to.Bridge.PortDelay = 2 * time.Duration(*b.ForwardDelay) * clockTick
		}
	}

	if p := l.Port; p != nil {
		to.Forwarding = p.State != nil && *p.State == driver.BridgePortStateForwarding
		to.Port = &Port{
			Name: l.Name, BridgeIndex: l.Master, MAC: l.MAC, MTU: l.MTU, Alias: l.Alias, Group: l.Group,
			Hairpin: isOn(p.Mode), Isolated: isOn(p.Isolated), NoLearning: !isOn(p.Learning),
			NoFlood: !isOn(p.UnicastFlood), NoMulticastFlood: !isOn(p.McastFlood),
			ForwardGroups: p.GroupFwdMask != nil && *p.GroupFwdMask == (&Port{ForwardGroups: true}).groupMask(),
		}
	}

	return to
}

func isOn(e *driver.BridgeEnable) bool { return e != nil && *e != driver.BridgeEnableDisabled }

// optionalBool converts a bool to the type of package driver.
func optionalBool(on bool) *driver.BridgeEnable {
	if on {
		return new(driver.BridgeEnableEnabled)
	}
	return new(driver.BridgeEnableDisabled)
}

// ntfSticky is the flag of an entry that frames from elsewhere do not move (NTF_STICKY of
// include/uapi/linux/neighbour.h).
const ntfSticky = 0x40

// fdbMessage returns a request about the entry for the pod's MAC in the bridge's forwarding database (NTF_MASTER). It
// encodes the attributes itself, since package rtnetlink would add the attributes of an address and a link.
func (p *Port) fdbMessage(typ netlink.HeaderType, header netlink.HeaderFlags, index int, state uint16,
	flags uint8) (netlink.Message, error) {
	body := &rtnetlink.NeighMessage{Family: unix.AF_BRIDGE, Index: uint32(index), State: state,
		Flags: unix.NTF_MASTER | flags}
	return nl.Marshal(typ, header, body.MarshalBinary, func(ae *netlink.AttributeEncoder) {
		ae.Bytes(unix.NDA_LLADDR, p.PeerMAC)

		// Limit the entry to the pod's VLAN if the port has only one, since pods in different VLANs may have the same
		// MAC. Without NDA_VLAN the entry applies to all VLANs of the port.
		if p.VLAN.ID != 0 && len(p.VLAN.Trunk) == 0 {
			ae.Uint16(unix.NDA_VLAN, p.VLAN.ID)
		}
	})
}

// addStaticFDB adds a static entry for the pod's MAC. It replaces an entry that the bridge has learnt. If the MAC is
// the bridge's own or has a static entry for another port, it keeps the existing entry. A new entry would
// direct the frames of the bridge or of another pod to this pod.
func (c *Conn) addStaticFDB(ctx context.Context, p *Port, index int) error {
	err := c.sendStaticFDB(ctx, p, index, netlink.Excl)
	if !errors.Is(err, fs.ErrExist) {
		return err
	}

	_, isStatic, err := c.fdbEntry(ctx, p, index)
	switch {
	case errors.Is(err, fs.ErrNotExist): // the entry has just expired; add it below
	case err != nil:
		return err
	case isStatic:
		return nil
	}

	return c.sendStaticFDB(ctx, p, index, netlink.Replace)
}

func (c *Conn) sendStaticFDB(ctx context.Context, p *Port, index int, flag netlink.HeaderFlags) error {
	m, err := p.fdbMessage(unix.RTM_NEWNEIGH, netlink.Create|flag, index, unix.NUD_NOARP, ntfSticky)
	return c.nl.Change(ctx, "add FDB entry", p.fdbName(), m, err)
}

func (p *Port) fdbName() nl.Name { return nl.Name(p.PeerMAC.String() + " of " + p.Name) }

// fdbEntry looks up the pod's MAC in the forwarding database of the port's bridge. at is the index of a port, or of the
// bridge itself. isStatic reports whether the entry never expires. If there is no entry, the error matches
// fs.ErrNotExist.
func (c *Conn) fdbEntry(ctx context.Context, p *Port, index int) (at int, isStatic bool, _ error) {
	ask, err := p.fdbMessage(unix.RTM_GETNEIGH, 0, index, 0, 0)
	err = c.nl.Get(ctx, "get FDB entry", p.fdbName(), ask, err, func(m netlink.Message) error {
		if len(m.Data) < unix.SizeofNdMsg {
			return fmt.Errorf("%w: an FDB entry of %d bytes", nl.ErrMalformed, len(m.Data))
		}
		at = int(binary.NativeEndian.Uint32(m.Data[4:]))
		// NUD_NOARP is a static entry, and NUD_PERMANENT the MAC of the bridge or a port.
		isStatic = binary.NativeEndian.Uint16(m.Data[8:])&(unix.NUD_NOARP|unix.NUD_PERMANENT) != 0
		return nil
	})

	return at, isStatic, err
}

// lacksStaticFDB reports whether p.StaticFDB is set but the bridge has no static entry for the pod's MAC at the port.
// Without p.PeerMAC it returns false. index is the index of the port.
func (c *Conn) lacksStaticFDB(ctx context.Context, p *Port, index int) (bool, error) {
	if !p.StaticFDB || len(p.PeerMAC) != 6 {
		return false, nil
	}
	at, isStatic, err := c.fdbEntry(ctx, p, index)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	return err == nil && (!isStatic || at != index), err
}

// Check compares the host's end of a pod's veth pair with port, and returns the differences. The MAC, MTU, alias, VLANs
// and static FDB entry are compared only if port sets them. Check does not look at the pod's end, which belongs to the
// pod after Attach has returned.
func (c *Conn) Check(ctx context.Context, port Port) ([]tombolo.Difference, error) {
	l, err := c.Link(ctx, port.Name)
	if errors.Is(err, fs.ErrNotExist) {
		return []tombolo.Difference{{Object: "port " + port.Name, What: "link", Want: port.Name}}, nil
	}

	if err != nil {
		return nil, err
	}

	br, err := c.bridgeNamed(ctx, port.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return port.Differences(*l, Link{}), nil
	}

	if err != nil {
		return nil, err
	}

	found := diff.List(port.Differences(*l, *br))
	if br.Index != l.Master {
		return found, nil
	}

	found.Up("bridge "+port.Bridge, br.Up)
	if !port.VLAN.IsZero() {
		diffs, err := c.VLANs().Check(ctx, l.Index, port.Name, port.VLAN)
		if err != nil {
			return nil, err
		}
		found = append(found, diffs...)
	}

	lacks, err := c.lacksStaticFDB(ctx, &port, l.Index)
	if lacks {
		found.Add("port "+port.Name, "static FDB entry", port.PeerMAC.String(), "")
	}

	return found, err
}

// Differences compares the link l with the port p on the bridge br. If the bridge does not exist, br is the zero
// Link. VLANs and the static FDB entry are not compared, since they are not properties of a link.
func (p *Port) Differences(l, br Link) []tombolo.Difference {
	var list diff.List
	object := "port " + p.Name
	list.Up(object, l.Up)
	list.Number(object, "MTU", cmp.Or(p.MTU, l.MTU), l.MTU)
	list.Add(object, "MAC", cmp.Or(p.MAC.String(), l.MAC.String()), l.MAC.String())
	list.Add(object, "alias", strconv.Quote(cmp.Or(p.Alias, l.Alias)), strconv.Quote(l.Alias))
	switch have := l.Port; {
	case br.Index == 0:
		list.Add(object, "bridge", p.Bridge, "")
	case br.Index != l.Master:
		list.Add(object, "membership in bridge", p.Bridge, "")
	case have != nil:
		list.Flag(object, "hairpin", p.Hairpin, have.Hairpin)
		list.Flag(object, "isolation", p.Isolated, have.Isolated)
		list.Flag(object, "forwarding of link-local groups", p.ForwardGroups, have.ForwardGroups)
		list.Flag(object, "learning", !p.NoLearning, !have.NoLearning)
		list.Flag(object, "flood", !p.NoFlood, !have.NoFlood)
		list.Flag(object, "multicast flood", !p.NoMulticastFlood, !have.NoMulticastFlood)
	}

	// Report an rp_filter only if it is 0 (off). Some systems set it to 2 (loose) on each new link, which protects as
	// well as 1 (strict).
	list.Number(object, "IPv4 rp_filter", max(1, l.reversePath), l.reversePath)
	list.Flag(object, "IPv6 drop_unicast_in_l2_multicast", true, !l.unicastInMulticast)
	list.Number(object, "IPv6 accept_ra", 0, l.AcceptRA)
	return list
}

// Differences compares the link l with the bridge br. l is nil if the bridge does not exist. Fields that are not set in
// br are not compared. Alias and NoIPv6 are not compared either, since they apply only to a new bridge. Nor is
// MaxLearned if the kernel does not support it.
func (br *Bridge) Differences(l *Link) []tombolo.Difference {
	var list diff.List
	object := "bridge " + br.Name
	switch {
	case l == nil:
		list.Add(object, "link", br.Name, "")
		return list
	case l.Bridge == nil:
		list.Add(object, "link", "of kind bridge", describeKind(l))
		return list
	}

	list.Up(object, l.Up)
	list.Number(object, "MTU", cmp.Or(br.MTU, l.MTU), l.MTU)
	list.Add(object, "MAC", cmp.Or(br.MAC.String(), l.MAC.String()), l.MAC.String())
	if br.Promiscuous != nil {
		list.Flag(object, "promiscuous mode", *br.Promiscuous, l.Promiscuous)
	}

	if br.NFCall != nil {
		list.Flag(object, "nf_call_iptables", *br.NFCall, l.Bridge.NFCallIPTables)
		list.Flag(object, "nf_call_ip6tables", *br.NFCall, l.Bridge.NFCallIP6Tables)
	}

	list.Flag(object, "vlan_filtering", br.VLANFiltering || l.Bridge.VLANFiltering, l.Bridge.VLANFiltering)
	if br.setsMaxLearned(l) {
		list.Number(object, "fdb_max_learned", int(br.MaxLearned), int(*l.Bridge.MaxLearned))
	}

	return list
}
