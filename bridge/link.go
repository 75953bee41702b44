package bridge

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/jsimonetti/rtnetlink/v2/driver"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
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
	Master      int // index of the bridge that has the link as a port, 0 if none
	Peer        int // for a veth, the index of the other end in that end's namespace
	Alias       string
	Group       uint32 // link group; 0 unless set
	// RouteLocalnet is set if the kernel routes packets to 127.0.0.0/8 on the link
	// (net.ipv4.conf.LINK.route_localnet).
	RouteLocalnet bool
	// AcceptRA is the setting of IPv6 for accepting router advertisements: 0, 1 or 2 (accept_ra). Without IPv6 on the
	// link it is 0.
	AcceptRA int
	// Port has the settings of a bridge's port that Conn.Enslave changes. It is nil if the link is not a port.
	// Forwarding is set if the port forwards: it is up, has a carrier, and the bridge does not make it wait (spanning
	// tree protocol).
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

// bridgeNamed returns the bridge with the given name. It returns an error if name is only an alternative name of the
// link, since firewall rules and other programs do not know such names.
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
	var b nl.Batch
	var l link.Info
	link.Get(&b, name, index, &l, only...)
	if err := c.nl.Do(ctx, &b); err != nil {
		return nil, err
	}
	return linkOf(&l), nil
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
