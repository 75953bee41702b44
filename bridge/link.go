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
	// Netfilter says that the kernel was built to show bridged packets to the firewall (CONFIG_BRIDGE_NETFILTER).
	Netfilter bool
	// NFCallIPTables and NFCallIP6Tables have the bridge show its IPv4 and its IPv6 packets to the firewall, also
	// where the parameters net.bridge.bridge-nf-call-iptables and -ip6tables, which hold for all bridges, are 0.
	NFCallIPTables  bool
	NFCallIP6Tables bool
	// VLANFiltering says that it keeps VLANs apart (IFLA_BR_VLAN_FILTERING), by tags of IEEE
	// 802.1Q (IFLA_BR_VLAN_PROTOCOL).
	VLANFiltering bool
	// MaxLearned is how many MACs the bridge learns at most (IFLA_BR_FDB_MAX_LEARNED);
	// 0 is without limit, and nil where the kernel has none (before Linux 6.7).
	MaxLearned *uint32
	// PortDelay is how long a new port forwards nothing, because the bridge runs the spanning tree protocol: twice
	// the forwarding delay (IFLA_BR_FORWARD_DELAY). It is 0 if the protocol is off.
	PortDelay time.Duration
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

const aliasMax = 255 // IFALIASZ - 1

// Link looks a link up by its name, in one request. The error matches
// fs.ErrNotExist if there is none.
func (c *Conn) Link(ctx context.Context, name string) (*Link, error) {
	return c.link(ctx, name, 0)
}

// bridgeNamed looks a bridge up by its own name. It refuses an alternative name, which the firewall's rules and other
// programs do not know.
func (c *Conn) bridgeNamed(ctx context.Context, name string) (*Link, error) {
	l, err := c.Link(ctx, name)
	if err == nil && l.Name != name {
		err = &tombolo.OpError{Op: "get bridge", Object: name, Err: link.Alternative(l.Name)}
	}
	return l, err
}

// LinkByIndex looks a link up by its index, in one request.
func (c *Conn) LinkByIndex(ctx context.Context, index int) (*Link, error) {
	return c.link(ctx, "", index)
}

func (c *Conn) link(ctx context.Context, name string, index int, only ...uint16) (*Link, error) {
	var b nl.Batch
	var l link.Link
	link.Get(&b, name, index, &l, only...)
	if err := c.execute(ctx, &b); err != nil {
		return nil, err
	}
	return linkOf(&l), nil
}

// Veths lists the veth ends in the bridges' namespace. It is a dump: keep it off
// a path that has to be fast.
func (c *Conn) Veths(ctx context.Context) ([]Link, error) {
	return c.links(ctx, "list veth links", "veth", 0)
}

// Ports lists the ports of a bridge, by its index.
func (c *Conn) Ports(ctx context.Context, bridge int) ([]Link, error) {
	if bridge <= 0 {
		return nil, &tombolo.OpError{Op: "list ports", Err: fmt.Errorf("%w: no bridge has the index %d", tombolo.ErrInvalid, bridge)}
	}
	return c.links(ctx, "list ports", "", bridge)
}

func (c *Conn) links(ctx context.Context, op, kind string, master int) ([]Link, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	var list []Link
	err := link.List(c.nl, op, kind, master, func(l *link.Link) { list = append(list, *linkOf(l)) })
	return list, err
}

// linkOf takes out what is of use to others.
func linkOf(l *link.Link) *Link {
	to := &Link{
		Index: l.Index, Name: l.Name, Kind: l.Kind, MAC: l.MAC, MTU: l.MTU, Master: l.Master, Peer: l.Lower, Alias: l.Alias, Group: l.Group,
		Up: l.Up(),
		// The kernel writes down here what was asked for by flags, and in
		// IFLA_PROMISCUITY how many want it, sockets included.
		Promiscuous: l.Flags&unix.IFF_PROMISC != 0,
	}
	v, _ := l.IPv4.At(ipv4ConfRouteLocalnet - 1)
	to.RouteLocalnet = v != 0
	v, _ = l.IPv4.At(ipv4ConfRPFilter - 1)
	to.ReversePath = int(v)
	drop, known := l.IPv6.At(dropUnicast().index)
	to.UnicastInMulticast = known && drop == 0
	v, _ = l.IPv6.At(acceptRA().index)
	to.AcceptRA = int(v)
	if b := l.Bridge; b != nil {
		to.Bridge = &BridgeState{
			Netfilter: b.NfCallIptables != nil, NFCallIPTables: isOn(b.NfCallIptables), NFCallIP6Tables: isOn(b.NfCallIp6tables),
			VLANFiltering: isOn(b.VlanFiltering) && (b.VlanProtocol == nil || *b.VlanProtocol == driver.VlanProtocol8021Q), MaxLearned: b.FdbMaxLearned,
		}
		if b.StpState != nil && *b.StpState != driver.BridgeStpStateDisabled && b.ForwardDelay != nil {
			const clockTick = 10 * time.Millisecond // the unit of the kernel's timers of a bridge

			to.Bridge.PortDelay = 2 * time.Duration(*b.ForwardDelay) * clockTick
		}
	}
	if p := l.Port; p != nil {
		to.Port = &PortState{
			Forwarding: p.State != nil && *p.State == driver.BridgePortStateForwarding,
			Hairpin:    isOn(p.Mode), Isolated: isOn(p.Isolated), Learning: isOn(p.Learning), Flood: isOn(p.UnicastFlood), MulticastFlood: isOn(p.McastFlood),
			ForwardGroups: p.GroupFwdMask != nil && *p.GroupFwdMask == (&Port{ForwardGroups: true}).groupMask(),
		}
	}
	return to
}

func isOn(e *driver.BridgeEnable) bool { return e != nil && *e != driver.BridgeEnableDisabled }

// enable is isOn's inverse.
func enable(on bool) *driver.BridgeEnable {
	if on {
		return new(driver.BridgeEnableEnabled)
	}
	return new(driver.BridgeEnableDisabled)
}
