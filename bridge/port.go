package bridge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"slices"
	"strconv"

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
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/route"
)

// Port describes a veth pair that connects a pod to a bridge. One end is a port of the bridge. The other end, the
// peer, is the pod's interface. The zero value of a field requests nothing, unless the field's comment says
// otherwise.
type Port struct {
	// Bridge is the name of the bridge. BridgeIndex is its index (Link.Index), which is optional. Setting BridgeIndex
	// saves a request, in Attach only if MTU is set too.
	Bridge      string
	BridgeIndex int
	// Name is the name of the host's end, the port on the bridge, of 1 to 15 bytes. See HostName.
	Name string
	// Peer is the name of the interface in the pod, such as "eth0".
	Peer string
	// Alias is the alias of the port, of at most 255 bytes. It marks the owner of the port: see Detach.
	Alias string
	// Group is the link group of the new port (IFLA_GROUP). Firewall rules recognize the port by its group
	// (nft.PodGroup). 0 is the kernel's default group. An operator may change the group later.
	Group uint32

	// MAC and PeerMAC are the MACs of the port and of the peer. Attach chooses a random MAC for nil. It does not let
	// the kernel choose one, because udev might change that MAC later.
	MAC, PeerMAC net.HardwareAddr
	// MTU is the MTU of both ends, in bytes. 0 means the bridge's MTU.
	MTU int

	// Announce makes the pod's interface send gratuitous ARP messages when it comes up, and again when the port
	// forwards. Use it if neighbours may know one of the pod's addresses with another MAC. The bridge floods these
	// messages to all ports.
	Announce bool

	Hairpin  bool // frames may leave by the port they came in by
	Isolated bool // no frames to and from other isolated ports
	// ForwardGroups makes the bridge forward frames to the groups of STP (01:80:c2:00:00:00) and LLDP
	// (01:80:c2:00:00:0e) like other frames (IFLA_BRPORT_GROUP_FWD_MASK, Linux 4.15). Only then the firewall rules of
	// the bridge can drop these frames (nft.Network's Groups). Without ForwardGroups, they reach the host without
	// passing any rule.
	ForwardGroups bool
	// StaticFDB adds a static entry for PeerMAC to the bridge's forwarding database. Then the port also works with
	// NoFlood and NoLearning, and another port cannot redirect the pod's frames by sending from PeerMAC. StaticFDB
	// has no effect if PeerMAC is the bridge's own MAC or has a static entry for another port.
	StaticFDB  bool
	NoLearning bool // the bridge does not learn MACs from the port
	NoFlood    bool // unknown unicast does not leave by the port
	// NoMulticastFlood stops the bridge from sending unknown multicast frames to the port. Then pods can find each
	// other by IPv6 only if the bridge has a multicast querier.
	NoMulticastFlood bool

	// VLAN is the port's membership in VLANs. A zero Membership means the bridge's default VLAN. VLAN requires
	// Bridge.VLANFiltering.
	VLAN vlan.Membership

	// Addresses are the pod's addresses with their prefix lengths.
	Addresses []netip.Prefix
	// Routes are the pod's routes, in the order in which they are added. A Link of 0 means the pod's interface. If the
	// pod already has an IPv4 route with the same destination and metric, the new route is placed before it. IPv6
	// routes with gateways, and with the same destination and metric, become one route with several next hops. If
	// the pod already has an equal route, the error of Attach matches fs.ErrExist. An equal metric is enough for a
	// default route in the main table.
	Routes []route.Route
	// Down leaves the pod's interface down. Then Addresses, Routes and Neighbours must be empty, and Autoconf nil.
	Down bool
	// SameNetNS permits a pod whose network namespace is also the bridge's. Without SameNetNS, Attach returns an
	// error for such a pod, which is mostly a mistake.
	SameNetNS bool

	// BeforeUp is a function that Attach calls with the index of the port, or nil. At that time the port is on its
	// bridge but still down. So no packet has passed it yet, and the kernel can add a qdisc without waiting. If
	// BeforeUp returns an error, Attach fails and undoes its steps.
	BeforeUp func(ctx context.Context, index int) error

	// NoWait makes Attach return before the port forwards and before the pod's IPv6 addresses are usable. The caller
	// must then call Wait. If the caller does other work first, Wait mostly returns at once.
	NoWait bool
	// DAD enables duplicate address detection for the pod's IPv6 addresses. Unless NoWait is set, Attach waits until
	// the detection has finished, which takes one or two seconds. The addresses are not usable before.
	DAD bool

	// Autoconf configures the pod for router advertisements. The pod accepts them after Solicit was called. If nil, the
	// pod ignores them, unless LeaveIPv6 is set.
	Autoconf *Autoconf
	// LeaveIPv6 leaves the pod's IPv6 to the pod itself. Its interface forms a link-local address when it comes up,
	// and accepts router advertisements, as the sysctls of its namespace say. Attach refuses LeaveIPv6 together
	// with IPv6 Addresses or Autoconf.
	LeaveIPv6 bool
	// Neighbours are permanent entries for the pod's neighbour tables. They permit routes to a gateway that answers
	// neither ARP nor neighbour solicitations. The kernel deletes the entries when the interface goes down or its MAC
	// changes.
	Neighbours []Neighbour

	// NoTxOffload makes the pod's interface compute checksums and split TCP data into segments itself. Without
	// NoTxOffload, the last link on the path writes the checksum, at an offset that the pod chose, after the packet
	// has passed the firewall. The pod could also change the data after sending. The port joins the segments again
	// (GRO), which recovers some of the speed. Only Attach uses this field.
	NoTxOffload bool

	noIPv6 bool // the kernel has no IPv6: see Conn.configure
}

// Neighbour is the address and the MAC of a machine on the pod's link.
type Neighbour struct {
	Addr netip.Addr
	MAC  net.HardwareAddr
}

// usesIPv6 reports whether the pod gets IPv6 addresses now or later. In both cases, the pod also needs a link-local
// address.
func (p *Port) usesIPv6() bool {
	return p.Autoconf != nil || slices.ContainsFunc(p.Addresses, func(a netip.Prefix) bool { return a.Addr().Is6() })
}

func (p *Port) validate() error {
	if err := checkName(p.Name); err != nil {
		return fmt.Errorf("port name: %w", err)
	}

	if err := checkName(p.Peer); err != nil {
		return fmt.Errorf("name of interface: %w", err)
	}

	switch {
	case len(p.Alias) > aliasMax:
		return fmt.Errorf("%w: an alias of %d bytes, where %d is the most", tombolo.ErrInvalid, len(p.Alias), aliasMax)
	case p.LeaveIPv6 && p.usesIPv6():
		return fmt.Errorf("%w: LeaveIPv6 with IPv6 addresses or Autoconf", tombolo.ErrInvalid)
	case p.Down && (len(p.Addresses)+len(p.Routes)+len(p.Neighbours) > 0 || p.Autoconf != nil):
		return fmt.Errorf("%w: an interface that stays down can have no addresses, routes and neighbours",
			tombolo.ErrInvalid)
	case p.Autoconf != nil && p.MTU != 0 && !hasIPv6(p.MTU):
		return fmt.Errorf("%w: an MTU of %d, where IPv6 needs %d", tombolo.ErrInvalid, p.MTU, ipv6MinMTU)
	case slices.ContainsFunc(p.Addresses, func(a netip.Prefix) bool { return !a.IsValid() }):
		return fmt.Errorf("%w: an address is not valid", tombolo.ErrInvalid)
	}

	for _, n := range p.Neighbours {
		if !n.Addr.IsValid() || len(n.MAC) != 6 {
			return fmt.Errorf("%w: %s with MAC %q is no neighbour", tombolo.ErrInvalid, n.Addr, n.MAC)
		}
	}

	return cmp.Or(checkMACs(p.MAC, p.PeerMAC), p.VLAN.Check())
}

// checkName returns an error if name is not a valid name of a link (ident.IsLinkName).
func checkName(name string) error {
	if !ident.IsLinkName(name) {
		return fmt.Errorf("%w: %q is no name of a link"+ident.LinkNameForm, tombolo.ErrInvalid, name)
	}

	return nil
}

// create appends the message that creates both ends of the pair. The peer is created in the pod's namespace, since
// moving it there later would take several RCU grace periods and a rename. Both ends are down at first. The kernel
// refuses a message that sets the peer up (ENOTCONN), and the port needs its settings first: see configure.
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

// configure appends the settings that the kernel ignores in the message that creates the pair: the alias, the sysctls
// and the attributes of the port. If fresh is set, it leaves out port flags that have the kernel's default. If not, it
// also sets p.MAC and p.MTU, unless they are zero. The request identifies the link by name, so that it can follow the
// creation in the same sendmsg. The request also sets the port up, so the port is never up without its settings. A port
// with VLANs, or a new one with BeforeUp, is set up later: see setUp.
func (p *Port) configure(b *nl.Batch, fresh bool) {
	r := link.Request{
		Name: p.Name, Port: p.flags(fresh), IPv4: []link.Parameter{{ID: ipv4ConfRPFilter, Value: 1}},
		NoLinkLocal: !p.noIPv6 && (p.MTU == 0 || hasIPv6(p.MTU)),
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

// groupMask returns the port's mask of forwarded groups, with one bit for each of the 16 link-local groups.
func (p *Port) groupMask() uint16 {
	const stp, lldp = 1 << 0x0, 1 << 0xe
	if p.ForwardGroups {
		return stp | lldp
	}
	return 0
}

// flags returns the flags of the port. If fresh is set, it returns only flags that differ from the kernel's defaults,
// or nil if there are none.
func (p *Port) flags(fresh bool) *driver.BridgePort {
	var flags driver.BridgePort
	set := func(flag **driver.BridgeEnable, on, initial bool) {
		if !fresh || on != initial {
			*flag = optionalBool(on)
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

// hasIPv6 reports whether the kernel enables IPv6 on a link with this MTU. Below the minimum MTU (RFC 8200, section
// 5), the kernel rejects IPv6 attributes.
func hasIPv6(mtu int) bool { return mtu >= ipv6MinMTU }

const ipv6MinMTU = 1280

// podLinkUp appends the requests that set the loopback interface up and configure the pod's interface. Unless p.Down is
// set, it adds the addresses, sets the interface up, and adds routes and, without p.Announce, neighbours. The addresses
// come before the interface is up, so that the kernel announces them with p.Announce.
func (p *Port) podLinkUp(b *nl.Batch, index int) {
	link.Request{Index: loopbackIndex, Flags: unix.IFF_UP, Change: unix.IFF_UP}.Set(b, "set link", "lo")

	// With addrgenmode none, the kernel makes no link-local address when the link comes up. So it sends no messages
	// for duplicate detection, multicast reports or router solicitations, which the bridge would flood to every port.
	set := link.Request{Index: index, NoLinkLocal: !p.noIPv6 && !p.LeaveIPv6 && hasIPv6(p.MTU)}
	if p.Announce {
		set.IPv4 = []link.Parameter{{ID: ipv4ConfARPNotify, Value: 1}}
	}

	set.Set(b, "set link", p.Peer)
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
		// Add the first default route of each family and metric exclusively, so that it does not override the default
		// route of another interface. Further ones cannot be exclusive, since the first one exists by then.
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

// addNeighbours appends requests that add the pod's neighbour entries. They must follow the request of announce, since
// the kernel flushes neighbour entries when a request sets the interface's MAC.
func (p *Port) addNeighbours(b *nl.Batch, index int) {
	for _, n := range p.Neighbours {
		entry := routing.NeighbourEntry{Addr: n.Addr, MAC: n.MAC, Link: index}
		m, err := entry.ReplaceMessage()
		b.Add("add neighbour", &entry, m, err)
	}
}

// announce appends a request that sets the MAC to its present value, so that the kernel sends a gratuitous ARP for
// each IPv4 address. The kernel also sends such messages when the interface comes up. But at that time the port does
// not forward yet, since the kernel has not noticed its carrier.
func (p *Port) announce(b *nl.Batch, index int) {
	link.Request{Index: index, MAC: p.PeerMAC}.Set(b, "announce addresses of", p.Peer)
}

const loopbackIndex = 1 // the loopback link's index in every namespace, include/net/flow.h

// podAddresses returns Addresses and, if the pod uses IPv6, a link-local address. If the kernel made the link-local
// address itself, it would run duplicate address detection for it.
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

// HostName returns a name for the port of a pod: "veth" and a hash of 11 hexadecimal digits, 15 bytes in all. Other
// agents and firewall rules expect names that begin with "veth". The same arguments always give the same name, so a
// caller can find the port to delete without a record.
func HostName(network, containerID, ifname string) string {
	return ident.Port(ident.Hash(network, containerID, ifname))
}

// parameter is an IPv6 sysctl of a link (net.ipv6.conf.LINK.NAME) with its expected value. Netlink reports all such
// sysctls of a link at once, by index. They are set one by one in /proc/sys, by name.
type parameter struct {
	name  string
	index int // DEVCONF_* of include/uapi/linux/ipv6.h
	want  int32

	// Only raSysctls sets the following fields. initial is the sysctl's value in a new network namespace. asks is set
	// if the kernel sends no router solicitations while the sysctl is 0. forms is set if Solicitation.Wait does not
	// expect addresses while the sysctl is 0.
	initial     int32
	asks, forms bool
}

func (p parameter) value() string { return strconv.Itoa(int(p.want)) }

// Numbers of enum IPV4_DEVCONF_* in include/uapi/linux/ip.h.
const (
	ipv4ConfARPNotify     = 22 // IPV4_DEVCONF_ARP_NOTIFY
	ipv4ConfRPFilter      = 8  // IPV4_DEVCONF_RP_FILTER
	ipv4ConfRouteLocalnet = 26 // IPV4_DEVCONF_ROUTE_LOCALNET
)

// raSysctls returns the sysctls that make a pod with Autoconf accept router advertisements, together with the kernel's
// default values. The last one, accept_ra, enables the reception.
func (p *Port) raSysctls() []parameter {
	// A pod accepts routes from advertisements only to prefixes of certain lengths. Thread border routers advertise
	// routes to prefixes of 64 bits, so 64 is the maximum. Without DefaultRoute the minimum is 48, the length of a
	// site's prefix, so that no advertised route replaces the caller's default route.
	router, shortest, dad := int32(1), int32(0), int32(0)
	if !p.Autoconf.DefaultRoute {
		router, shortest = 0, 48
	}

	if p.DAD {
		dad = 1
	}

	return []parameter{
		{name: "autoconf", index: 5, want: 1, initial: 1, forms: true},
		// The value -1 repeats solicitations until a router answers.
		{name: "router_solicitations", index: 7, want: -1, initial: -1, asks: true, forms: true},
		{name: "use_tempaddr", index: 10, want: 0},
		{name: "accept_ra_defrtr", index: 17, want: router, initial: 1},
		{name: "accept_ra_pinfo", index: 18, want: 1, initial: 1, forms: true},
		{name: "accept_dad", index: 27, want: dad, initial: 1},
		{name: "accept_ra_rt_info_min_plen", index: 49, want: shortest},
		{name: "accept_ra_rt_info_max_plen", index: 21, want: 64},
		// The value 2 accepts advertisements even if the pod forwards packets.
		{name: "accept_ra", index: 3, want: 2, initial: 1, asks: true, forms: true},
	}
}

// The host's end of a veth pair is meant to be only a port of a bridge. But some frames reach the host's own IP stack
// directly from the port, so rules that name the bridge do not match them. These are frames to link-local groups
// (01:80:c2:00:00:00 to :0f), and all frames if the port was removed from its bridge. Firewall rules drop the frames
// to link-local groups (nft.Network's Groups).
//
// The following sysctls protect the host even if someone flushes the rules. With rp_filter (RFC 3704), the kernel drops
// all IPv4 packets, since no route leads to this port. The exceptions have the source 0.0.0.0: broadcasts to
// 255.255.255.255, as DHCP clients send, and some multicasts. With accept_ra 0, the kernel ignores router
// advertisements. With drop_unicast_in_l2_multicast, it drops IPv6 packets with a unicast destination inside multicast
// frames. The sysctl disable_ipv6 would stop all IPv6, but writing it takes the kernel's global lock for links (RTNL).

// acceptRA and dropUnicast return the IPv6 sysctls of the host's end of a veth pair, which netlink cannot set.
func acceptRA() parameter { return parameter{name: "accept_ra", index: 3} }

func dropUnicast() parameter {
	return parameter{name: "drop_unicast_in_l2_multicast", index: 40, want: 1}
}

// refuseIPv6 sets the sysctls acceptRA and dropUnicast for a port. It skips sysctls that do not exist, because the
// kernel has no IPv6 or the port's MTU is too small for IPv6. It also skips them if /proc/sys is read-only. In that
// case, only firewall rules protect the host.
func (c *Conn) refuseIPv6(port string) error {
	dir, err := c.hostIPv6()
	if err != nil || dir == nil {
		return err
	}
	for _, p := range [...]parameter{acceptRA(), dropUnicast()} {
		if err := dir.Prefer(port+"/"+p.name, p.value()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// hostIPv6 returns the directory net/ipv6/conf of the bridges' network namespace, or nil if the kernel has no IPv6.
// The Conn keeps the directory open for the next port.
func (c *Conn) hostIPv6() (*sysctl.Dir, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ipv6 != nil {
		return c.ipv6, nil
	}

	err := c.nl.Within(func() (err error) {
		c.ipv6, err = sysctl.OpenDir("net/ipv6/conf")
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}

	return c.ipv6, err
}
