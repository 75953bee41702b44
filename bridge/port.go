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

// Port describes how one pod is connected to a bridge: by a veth pair, of which one end is a port of the bridge and
// the other, the peer, is the pod's interface. A field with its zero value asks for nothing, unless it says
// otherwise.
type Port struct {
	// Bridge is the bridge's name. BridgeIndex is its index where the caller knows
	// it (Link.Index), which spares a request.
	Bridge      string
	BridgeIndex int
	// Name names the veth end in the bridge's namespace, 1 to 15 bytes. See
	// HostName.
	Name string
	// Peer names the interface in the pod: "eth0".
	Peer string
	// Alias is kept by the kernel with the port, at most 255 bytes: its owner.
	Alias string
	// Group is the group of links that Attach makes the port in (IFLA_GROUP), by which
	// rules of the firewall know it (nft.PodGroup); 0 is that of most links. An
	// operator may put it into another later on.
	Group uint32

	// MAC and PeerMAC are set at creation, random where nil: never left to the
	// kernel, whose choice udev may overrule after it has been reported.
	MAC, PeerMAC net.HardwareAddr
	// MTU is that of both ends, in bytes; 0 means that of the bridge.
	MTU int

	// Announce has the pod's interface send a gratuitous ARP when it comes up, and once
	// more when its port forwards, for neighbours that know one of its addresses with
	// another MAC. It is flooded to every port of the bridge.
	Announce bool

	Hairpin  bool // frames may leave by the port that they came in by
	Isolated bool // no frames to and from other isolated ports
	// ForwardGroups has frames to the groups of STP (01:80:c2:00:00:00) and LLDP (:0e) go the way of all others
	// (IFLA_BRPORT_GROUP_FWD_MASK, Linux 4.15), so that the firewall of the bridge sees them and can drop them
	// (nft.Network's Groups). Without it the host gets them past any rule.
	ForwardGroups bool
	// StaticFDB enters PeerMAC into the bridge's forwarding database for good. So the port works
	// with NoFlood and NoLearning, and another port that sends from that MAC does not get its
	// frames. It does nothing for a MAC that is the bridge's own, or that has a static entry for
	// another port.
	StaticFDB  bool
	NoLearning bool // the bridge does not learn MACs from the port
	NoFlood    bool // no unknown unicast goes out of the port
	// NoMulticastFlood keeps unknown multicast off the port. Pods that resolve each
	// other over IPv6 then need a multicast querier on the bridge.
	NoMulticastFlood bool

	// VLAN is which of the bridge's VLANs the port is in; the zero Membership leaves it in the
	// default one. The bridge has to filter VLANs, or all are one.
	VLAN vlan.Membership

	// Addresses are the pod's, each with the length of its prefix.
	Addresses []netip.Prefix
	// Routes are the pod's, in the order in which they can be made. A Link of 0 is the pod's interface. If the pod has
	// another route to the same destination, the new one goes before it; IPv6 routes with gateways become one route
	// with several next hops. The error of Attach matches fs.ErrExist if the pod has exactly that route, or has a
	// default route of the main table with the same metric already.
	Routes []route.Route
	// Down leaves the pod's interface down. It may then have no addresses and no
	// routes.
	Down bool
	// SameNetNS lets the pod be the very namespace that the bridge is in, which Attach
	// takes for a mistake otherwise.
	SameNetNS bool

	// BeforeUp, unless nil, is called by Attach when the port is on its bridge, with its index, and before it comes
	// up: nothing has come in by it yet, and a queueing discipline takes the kernel no wait. An error of it undoes
	// the Attach.
	BeforeUp func(ctx context.Context, index int) error

	// NoWait has Attach return before the port forwards and the pod's IPv6 addresses
	// are usable for certain. A caller that has other things to do calls Wait after
	// them, and in general does not wait there.
	NoWait bool
	// DAD has the kernel detect duplicates of the pod's IPv6 addresses, which are
	// of no use until it is done: Attach waits for it, a second or two.
	DAD bool

	// Autoconf has the pod take IPv6 addresses from router advertisements as well, once
	// Solicit is called. Nil keeps it from hearing any.
	Autoconf *Autoconf
	// LeaveIPv6 leaves the pod's IPv6 to the pod: its interface forms a link-local address as it
	// comes up, and hears routers, as its namespace's parameters have it. Attach refuses
	// it with Addresses and with Autoconf. Solicit has a use for it, too.
	LeaveIPv6 bool
	// Neighbours are permanent entries in the pod's neighbour tables. With one, a route can lead to a gateway that
	// answers neither ARP nor neighbour solicitations. The kernel deletes them when the interface goes down or gets
	// another MAC.
	Neighbours []Neighbour

	// NoTxOffload makes the pod's interface compute checksums and TCP segments itself. Otherwise the last link on the way
	// writes a checksum at the place that the pod named, behind the bridge's firewall, and the pod could change pages
	// that it has sent. The port joins the segments again (GRO), so that TCP loses less. Only Attach reads it.
	NoTxOffload bool

	noIPv6 bool // the kernel has none: see Conn.configure
}

// Neighbour is the address and the MAC of a machine on the pod's link.
type Neighbour struct {
	Addr netip.Addr
	MAC  net.HardwareAddr
}

// hasIPv6 says whether one of the addresses is an IPv6 one.
func (p *Port) hasIPv6() bool {
	return slices.ContainsFunc(p.Addresses, func(a netip.Prefix) bool { return a.Addr().Is6() })
}

// usesIPv6 says whether the pod is to have IPv6 addresses now or later, and so a
// link-local one.
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
		return fmt.Errorf("%w: an interface that stays down can have no addresses, routes and neighbours", tombolo.ErrInvalid)
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

// checkName holds a link's name to the kernel's rules (dev_valid_name).
func checkName(name string) error {
	switch {
	case name == "" || name == "." || name == "..":
		return fmt.Errorf("%w: %q names no link", tombolo.ErrInvalid, name)
	case len(name) >= unix.IFNAMSIZ:
		return fmt.Errorf("%w: %q is longer than %d bytes", tombolo.ErrInvalid, name, unix.IFNAMSIZ-1)
	case strings.Contains(name, "%"):
		return fmt.Errorf("%w: %q has a percent sign, for which the kernel would choose a number at each call", tombolo.ErrInvalid, name)
	case strings.ContainsAny(name, "/: \t\n\v\f\r\x00"):
		return fmt.Errorf("%w: %q has a character that no link's name may have", tombolo.ErrInvalid, name)
	}
	return nil
}

// create appends the one message that makes both ends. The peer is born in the
// pod's namespace: moving it there later would cost grace periods of the kernel,
// and a rename. It cannot be born up.
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

// configure appends what the kernel passes over in a request that creates: the
// alias, and the attributes of the port; of a fresh port only those which it does
// not have by itself. The link is found by its name, so that this can stand in the
// same sendmsg. With all that, and not before, it comes up; one in VLANs only once it
// is in these, and one with BeforeUp once that has returned (see setUp).
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

// groupMask has a bit for each of the 16 groups.
func (p *Port) groupMask() uint16 {
	const stp, lldp = 1 << 0x0, 1 << 0xe
	if p.ForwardGroups {
		return stp | lldp
	}
	return 0
}

// flags are those of the port; of a fresh one those that the kernel does not give it, nil
// if there are none.
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

// hasIPv6 says whether the kernel has IPv6 on a link of an MTU at all: not below
// the least of RFC 8200, section 5, and then it refuses IPv6 attributes.
func hasIPv6(mtu int) bool { return mtu >= ipv6MinMTU }

const ipv6MinMTU = 1280

// podLinkUp appends what the pod's interface needs: no kernel-made link-local
// address before it comes up (see podAddresses), then the addresses, then up, so
// that they are announced where that is asked for.
func (p *Port) podLinkUp(b *nl.Batch, index int) {
	link.Request{Index: loopbackIndex, Flags: unix.IFF_UP, Change: unix.IFF_UP}.Set(b, "set link", "lo")
	// addrgenmode none: the kernel then makes no link-local address when the link comes up,
	// and with it no duplicate detection, no multicast reports and no router solicitations,
	// which would be flooded to every port of the bridge.
	link.Request{Index: index, IPv4: p.ipv4Conf(), NoLinkLocal: !p.noIPv6 && !p.LeaveIPv6 && hasIPv6(p.MTU)}.Set(b, "set link", p.Peer)
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
		// Only the first default route of a metric is exclusive: it must not go before another interface's.
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

// addNeighbours appends the requests for the pod's neighbours. The kernel flushes them when it sets the interface's
// MAC, so they come after announce.
func (p *Port) addNeighbours(b *nl.Batch, index int) {
	for _, n := range p.Neighbours {
		entry := routing.Neighbour{Addr: n.Addr, MAC: n.MAC, Link: index}
		m, err := entry.ReplaceMessage()
		b.Add("add neighbour", &entry, m, err)
	}
}

// announce appends a request that has the kernel send a gratuitous ARP for each address: it sets the MAC, to the
// same value. The ARPs that the kernel sends when the interface comes up get no further than the port, which
// forwards only once the kernel has taken notice of its carrier.
func (p *Port) announce(b *nl.Batch, index int) {
	link.Request{Index: index, MAC: p.PeerMAC}.Set(b, "announce addresses of", p.Peer)
}

const loopbackIndex = 1 // LOOPBACK_IFINDEX, include/net/flow.h: in every namespace

// ipv4Conf returns the IPv4 parameters of the pod's interface.
func (p *Port) ipv4Conf() []link.Parameter {
	if p.Announce {
		return []link.Parameter{{ID: ipv4ConfARPNotify, Value: 1}}
	}
	return nil
}

// podAddresses are the port's, and with IPv6 the link-local one: the kernel's own
// would be subject to duplicate address detection.
func (p *Port) podAddresses() []netip.Prefix {
	if !p.usesIPv6() {
		return p.Addresses
	}
	return append(slices.Clone(p.Addresses), netip.PrefixFrom(LinkLocal(p.PeerMAC), 64))
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

// LinkLocal forms the link-local address of a MAC of six bytes (RFC 4291,
// appendix A). Of any other it is the zero Addr.
func LinkLocal(mac net.HardwareAddr) netip.Addr {
	if len(mac) != 6 {
		return netip.Addr{}
	}
	return ident.LinkLocal(mac)
}

// HostName derives the name of a port from what it is for: "veth" and 11
// hexadecimal digits, which fills the 15 bytes that a name may have. Agents and
// rules on a node match "veth*". The same arguments always give the same name, so
// that a caller finds the port that it has to take down without having kept anything.
func HostName(network, containerID, ifname string) string {
	return "veth" + ident.Hash(network, containerID, ifname)
}
