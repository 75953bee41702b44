package bridge

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/jsimonetti/rtnetlink/v2/driver"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/route"
)

// Port describes the connection of one pod to a bridge by a veth pair: one end is a port of the bridge, and the
// other, the peer, is the pod's interface. A zero field requests nothing, unless its comment says otherwise.
type Port struct {
	// Bridge is the bridge's name. BridgeIndex is its index (Link.Index), if the caller knows it, which saves a
	// request.
	Bridge      string
	BridgeIndex int
	// Name is the name of the veth end in the bridge's namespace, 1 to 15 bytes. See HostName.
	Name string
	// Peer is the name of the interface in the pod, such as "eth0".
	Peer string
	// Alias is stored by the kernel with the port, in at most 255 bytes. It marks the owner.
	Alias string
	// Group is the link group of the new port (IFLA_GROUP), which identifies it to firewall rules (nft.PodGroup). 0
	// is the group of most links. An operator may change it later.
	Group uint32

	// MAC and PeerMAC are set at creation, and random if nil. The kernel never chooses them, since udev might change
	// its choice after it was reported.
	MAC, PeerMAC net.HardwareAddr
	// MTU is the MTU of both ends, in bytes. 0 means the bridge's MTU.
	MTU int

	// Announce makes the pod's interface send a gratuitous ARP when it comes up, and again when its port forwards. It
	// is for neighbours that know one of its addresses with another MAC. The ARP is flooded to every port of the
	// bridge.
	Announce bool

	Hairpin  bool // frames may leave by the port they came in by
	Isolated bool // no frames to and from other isolated ports
	// ForwardGroups makes the bridge forward frames to the groups of STP (01:80:c2:00:00:00) and LLDP (:0e) like all
	// others (IFLA_BRPORT_GROUP_FWD_MASK, Linux 4.15). So the firewall of the bridge sees them and can drop them
	// (nft.Network's Groups). Without it they reach the host past all rules.
	ForwardGroups bool
	// StaticFDB adds a static entry for PeerMAC to the bridge's forwarding database. So the port works with NoFlood
	// and NoLearning, and another port that sends from that MAC does not get its frames. It has no effect for the
	// bridge's own MAC, and for a MAC with a static entry for another port.
	StaticFDB  bool
	NoLearning bool // the bridge does not learn MACs from the port
	NoFlood    bool // unknown unicast does not leave by the port
	// NoMulticastFlood keeps unknown multicast away from the port. For pods to resolve each other over IPv6, the
	// bridge then needs a multicast querier.
	NoMulticastFlood bool

	// VLAN lists the port's VLANs; the zero Membership means the default one. It requires a bridge that filters
	// VLANs.
	VLAN vlan.Membership

	// Addresses are the pod's addresses with their prefix lengths.
	Addresses []netip.Prefix
	// Routes are the pod's routes, in an order in which they can be added. A Link of 0 means the pod's interface. If
	// the pod has another route to the same destination, the new one goes before it; IPv6 routes with gateways become
	// one route with several next hops. If the pod has exactly that route, or a default route of the main table with
	// the same metric, the error of Attach matches fs.ErrExist.
	Routes []route.Route
	// Down leaves the pod's interface down. It may then have no addresses and no routes.
	Down bool
	// SameNetNS permits a pod in the bridges' own namespace, which Attach otherwise refuses as a mistake.
	SameNetNS bool

	// BeforeUp, if not nil, is called by Attach with the port's index when the port is on its bridge, and before it
	// comes up. At that time no packet has come in by it, and the kernel adds a queueing discipline without a wait.
	// An error undoes the Attach.
	BeforeUp func(ctx context.Context, index int) error

	// NoWait makes Attach return before the port certainly forwards and the pod's IPv6 addresses are usable. A caller
	// with other things to do calls Wait afterwards, which then rarely waits.
	NoWait bool
	// DAD makes the kernel detect duplicates of the pod's IPv6 addresses. They are unusable until it has finished,
	// and Attach waits for that, a second or two.
	DAD bool

	// Autoconf makes the pod take IPv6 addresses from router advertisements too, once Solicit is called. If nil, the
	// pod accepts none.
	Autoconf *Autoconf
	// LeaveIPv6 leaves the pod's IPv6 to the pod: its interface forms a link-local address when it comes up, and
	// accepts router advertisements, according to its namespace's parameters. It is for a pod without Addresses and
	// Autoconf.
	LeaveIPv6 bool
	// Neighbours are permanent entries in the pod's neighbour tables. They permit a route to a gateway that answers
	// neither ARP nor neighbour solicitations. The kernel deletes them when the interface goes down or gets another
	// MAC.
	Neighbours []Neighbour

	// NoTxOffload makes the pod's interface compute checksums and TCP segments itself. Otherwise the last link on the
	// path writes a checksum where the pod said, behind the bridge's firewall, and the pod could change pages after
	// sending them. The port joins the segments again (GRO), so that TCP loses less speed. Only Attach uses it.
	NoTxOffload bool

	noIPv6 bool // the kernel has no IPv6: see Conn.configure
}

// Neighbour is the address and the MAC of a machine on the pod's link.
type Neighbour struct {
	Addr netip.Addr
	MAC  net.HardwareAddr
}

// hasIPv6 reports whether one of the addresses is an IPv6 address.
func (p *Port) hasIPv6() bool {
	return slices.ContainsFunc(p.Addresses, func(a netip.Prefix) bool { return a.Addr().Is6() })
}

// usesIPv6 reports whether the pod gets IPv6 addresses now or later, and so needs a link-local one.
func (p *Port) usesIPv6() bool { return p.hasIPv6() || p.Autoconf != nil }

func (p *Port) validate() error {
	if err := checkName(p.Name); err != nil {
		return fmt.Errorf("port name: %w", err)
	}

	if err := checkName(p.Peer); err != nil {
		return fmt.Errorf("name of interface: %w", err)
	}

	if len(p.Alias) > aliasMax {
		return fmt.Errorf("%w: an alias of %d bytes, where %d is the most", tombolo.ErrInvalid, len(p.Alias), aliasMax)
	}

	for _, mac := range []net.HardwareAddr{p.MAC, p.PeerMAC} {
		if mac != nil && (len(mac) != 6 || mac[0]&1 != 0) {
			return fmt.Errorf("%w: %s is not a unicast MAC", tombolo.ErrInvalid, mac)
		}
	}

	if p.LeaveIPv6 && p.usesIPv6() {
		return fmt.Errorf("%w: LeaveIPv6 with IPv6 addresses or Autoconf", tombolo.ErrInvalid)
	}

	if p.Down && (len(p.Addresses)+len(p.Routes)+len(p.Neighbours) > 0 || p.Autoconf != nil) {
		return fmt.Errorf("%w: an interface that stays down can have no addresses, routes and neighbours",
			tombolo.ErrInvalid)
	}

	if p.Autoconf != nil && p.MTU != 0 && !hasIPv6(p.MTU) {
		return fmt.Errorf("%w: an MTU of %d, where IPv6 needs %d", tombolo.ErrInvalid, p.MTU, ipv6MinMTU)
	}

	for _, a := range p.Addresses {
		if !a.IsValid() {
			return fmt.Errorf("%w: an address is not valid", tombolo.ErrInvalid)
		}
	}

	for _, n := range p.Neighbours {
		if !n.Addr.IsValid() || len(n.MAC) != 6 {
			return fmt.Errorf("%w: %s with MAC %q is no neighbour", tombolo.ErrInvalid, n.Addr, n.MAC)
		}
	}

	return p.VLAN.Check()
}

// checkName checks a link's name by the kernel's rules (dev_valid_name).
func checkName(name string) error {
	switch {
	case name == "" || name == "." || name == "..":
		return fmt.Errorf("%w: %q names no link", tombolo.ErrInvalid, name)
	case len(name) >= unix.IFNAMSIZ:
		return fmt.Errorf("%w: %q is longer than %d bytes", tombolo.ErrInvalid, name, unix.IFNAMSIZ-1)
	case strings.Contains(name, "%"):
		return fmt.Errorf("%w: %q has a percent sign, for which the kernel would choose a number at each call",
			tombolo.ErrInvalid, name)
	case strings.ContainsAny(name, "/: \t\n\v\f\r\x00"):
		return fmt.Errorf("%w: %q has a character that no link's name may have", tombolo.ErrInvalid, name)
	}

	return nil
}

// create appends the one message that creates both ends. The peer is created in the pod's namespace: moving it there
// later would cost grace periods of the kernel, and a rename. It cannot be created up.
func (p *Port) create(b *nl.Batch, bridge, podNS int) {
	r := link.Request{
		Name: p.Name, MAC: p.MAC, MTU: &p.MTU, Master: &bridge,
		Peer: &link.Request{Name: p.Peer, MAC: p.PeerMAC, MTU: &p.MTU, NetNS: &podNS},
	}
	if p.Group != 0 {
		r.Group = &p.Group
	}
	r.Create(b, "add link", p.Name)
}

// configure appends the settings that the kernel ignores in a creating request: the alias, and the attributes of the
// port. For a fresh port it sends only attributes that differ from the kernel's defaults. It finds the link by its
// name, so that it fits into the same sendmsg. With these settings, and not before, the port comes up. A port in
// VLANs, or with BeforeUp, comes up later (see setUp).
func (p *Port) configure(b *nl.Batch, fresh bool) {
	r := link.Request{
		Name: p.Name, Port: p.flags(fresh),
		IPv4: noIPv4(), NoLinkLocal: !p.noIPv6 && (p.MTU == 0 || hasIPv6(p.MTU)),
	}
	if p.VLAN.IsZero() && (!fresh || p.BeforeUp == nil) {
		r.Flags, r.Change = unix.IFF_UP, unix.IFF_UP
	}

	if p.Alias != "" {
		r.Alias = &p.Alias
	}

	if !fresh {
		if r.MAC = p.MAC; p.MTU != 0 {
			r.MTU = &p.MTU
		}
	}

	r.Set(b, "set port", p.Name)
}

// groupMask returns a mask with a bit for each of the 16 groups.
func (p *Port) groupMask() uint16 {
	const stp, lldp = 1 << 0x0, 1 << 0xe
	if p.ForwardGroups {
		return stp | lldp
	}
	return 0
}

// flags returns the flags of the port. For a fresh port it returns only those that differ from the kernel's defaults,
// or nil if none do.
func (p *Port) flags(fresh bool) *driver.BridgePort {
	var flags driver.BridgePort
	set := func(flag **driver.BridgeEnable, on, initial bool) {
		if !fresh || on != initial {
			*flag = enable(on)
		}
	}
	set(&flags.Mode, p.Hairpin, false)
	set(&flags.Isolated, p.Isolated, false)
	set(&flags.Learning, !p.NoLearning, true)
	set(&flags.UnicastFlood, !p.NoFlood, true)
	set(&flags.McastFlood, !p.NoMulticastFlood, true)
	if p.ForwardGroups || !fresh {
		flags.GroupFwdMask = new(p.groupMask())
	}

	if flags == (driver.BridgePort{}) {
		return nil
	}

	return &flags
}

// hasIPv6 reports whether the kernel enables IPv6 on a link with this MTU. Below the minimum of RFC 8200, section 5,
// it refuses IPv6 attributes.
func hasIPv6(mtu int) bool { return mtu >= ipv6MinMTU }

const ipv6MinMTU = 1280

// podLinkUp appends the settings of the pod's interface: first no link-local address by the kernel (see
// podAddresses), then the addresses, then up. In this order the addresses are announced, if requested.
func (p *Port) podLinkUp(b *nl.Batch, index int) {
	link.Request{Index: loopbackIndex, Flags: unix.IFF_UP, Change: unix.IFF_UP}.Set(b, "set link", "lo")

	// With addrgenmode none, the kernel makes no link-local address when the link comes up. So it sends no duplicate
	// detection, multicast reports and router solicitations, which would be flooded to every port.
	link.Request{Index: index, IPv4: p.ipv4Conf(), NoLinkLocal: !p.noIPv6 && !p.LeaveIPv6 && hasIPv6(p.MTU)}.Set(b,
		"set link", p.Peer)
	if p.Down {
		return
	}

	for _, a := range p.podAddresses() {
		one := addr.Address{Prefix: a, Link: index, Broadcast: addr.Broadcast(a)}
		if a.Addr().Is6() && !p.DAD {
			one.Flags = unix.IFA_F_NODAD
		}
		m, err := one.Message(unix.RTM_NEWADDR, netlink.Create|netlink.Excl)
		b.Add("add address", &one, m, err)
	}

	link.Request{Index: index, Flags: unix.IFF_UP, Change: unix.IFF_UP}.Set(b, "set link up", p.Peer)
	routes := p.podRoutes(index)
	for i, r := range routes {
		// Only the first default route of a metric is exclusive, so that it does not override another interface's.
		isSame := func(o route.Route) bool {
			isOfFamily := r.Dst.IsValid() || o.Gateway.BitLen() == r.Gateway.BitLen()
			return o.Dst == r.Dst && isOfFamily && o.Priority == r.Priority && o.Table == r.Table
		}
		flags := netlink.Create
		if r.Dst.Bits() <= 0 && r.Table == unix.RT_TABLE_MAIN && !slices.ContainsFunc(routes[:i], isSame) {
			flags |= netlink.Excl
		}
		m, err := r.Message(unix.RTM_NEWROUTE, flags)
		b.Add("add route", &r, m, err)
	}

	if !p.Announce {
		p.addNeighbours(b, index)
	}
}

// addNeighbours appends requests for the pod's neighbours. It must follow announce, since the kernel flushes
// neighbours when it sets the interface's MAC.
func (p *Port) addNeighbours(b *nl.Batch, index int) {
	for _, n := range p.Neighbours {
		entry := routing.Neighbour{Addr: n.Addr, MAC: n.MAC, Link: index}
		m, err := entry.ReplaceMessage()
		b.Add("add neighbour", &entry, m, err)
	}
}

// announce appends a request that makes the kernel send a gratuitous ARP for each address: it sets the MAC to its
// present value. The ARPs that the kernel sends when the interface comes up get no further than the port, which
// forwards only when the kernel has noticed its carrier.
func (p *Port) announce(b *nl.Batch, index int) {
	link.Request{Index: index, MAC: p.PeerMAC}.Set(b, "announce addresses of", p.Peer)
}

const loopbackIndex = 1 // the loopback link's index in every namespace, include/net/flow.h

// ipv4Conf returns the IPv4 parameters of the pod's interface.
func (p *Port) ipv4Conf() []link.Parameter {
	if p.Announce {
		return []link.Parameter{{ID: ipv4ConfARPNotify, Value: 1}}
	}
	return nil
}

// podAddresses returns the port's addresses and, with IPv6, the link-local one. The kernel's own link-local address
// would be subject to duplicate address detection.
func (p *Port) podAddresses() []netip.Prefix {
	if !p.usesIPv6() {
		return p.Addresses
	}
	return append(slices.Clone(p.Addresses), netip.PrefixFrom(addr.LinkLocal(p.PeerMAC), 64))
}

func (p *Port) podRoutes(index int) []route.Route {
	list := make([]route.Route, len(p.Routes))
	for i, r := range p.Routes {
		r.Link, r.Protocol = cmp.Or(r.Link, index), cmp.Or(r.Protocol, route.ProtocolTombolo)
		r.Table = cmp.Or(r.Table, unix.RT_TABLE_MAIN)
		list[i] = r
	}
	return list
}

// HostName returns the name of a port: "veth" and 11 hexadecimal digits, which fill the 15 bytes of a name. Agents
// and rules on nodes expect "veth*". The same arguments always give the same name, so a caller finds the port to take
// down without any record.
func HostName(network, containerID, ifname string) string {
	return ident.Port(ident.Hash(network, containerID, ifname))
}
