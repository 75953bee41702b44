package network

import (
	"net"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network/internal/build"
	"github.com/tombolo-cni/tombolo/network/internal/elements"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/reroute"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/route"
)

// plan is what an Add makes of what the pod was given.
type plan struct {
	want *build.Want
	port bridge.Port
	rec  state.Attachment // as it will be on record
}

// elements is what the pod's part in the firewall is made from.
func (p *plan) elements() elements.Plan {
	return elements.Plan{Record: &p.rec, Want: p.want, Port: p.port.Name}
}

// plan derives what the network has to be, the port and the record from what the pod was
// given. made is the pod's link, if it is there.
func (a *adding) plan(g given, made *bridge.Attachment) (*plan, error) {
	nw := a.nw
	p := &plan{rec: *a.base, want: wantOf(a.nw, a.hash, a.s.Mark)}
	p.rec.Addresses, p.rec.HostGateways = g.addresses, g.hosts
	p.rec.Masquerade, p.rec.Guarded, p.rec.MACOnly, p.rec.Untrusted = nw.Masquerade, nw.Guard, nw.MACOnly, nw.Untrusted
	p.rec.DefaultRoute, p.rec.SLAAC = string(nw.Exit), nw.SLAAC
	if err := a.checkGiven(g); err != nil {
		return nil, err
	}
	for _, address := range g.addresses {
		p.want.AddSubnet(address.Prefix.Masked())
		if nw.Gateway {
			p.want.AddGateway(netip.PrefixFrom(address.Gateway, address.Prefix.Bits()))
		}
	}
	p.want.Loopback = endpoint.PublishesIPv4(&p.rec)
	if len(p.rec.Published) > 0 {
		p.want.Reached = endpoint.Addresses(&p.rec)
	}

	mac := a.mac()
	p.port = bridge.Port{
		Bridge: nw.Bridge, Name: a.base.HostIf, Peer: a.pod.IfName,
		Hairpin: nw.Hairpin, Isolated: nw.Isolated, ForwardGroups: true, Down: nw.Down, DAD: nw.DAD,
		PeerMAC: mac, Group: nft.PodGroup, NoWait: true, SameNetNS: a.pod.SameNetNS, VLAN: nw.VLAN,
		// Neighbours know an address's last MAC: that which follows from it, unless another
		// was asked for, or another plugin gave the address to a pod of its own.
		Announce: mac != nil || a.base.DataDir != "",
		Routes:   a.metrics.Apply(podRoutes(nw, g.addresses, g.routes)),
	}
	p.port.LeaveIPv6 = nw.LeaveIPv6 && len(g.addresses) == 0 && a.leasing == nil
	for _, address := range g.addresses {
		p.port.Addresses = append(p.port.Addresses, address.Prefix)
	}
	if mac == nil {
		p.port.PeerMAC = addressMAC(g.addresses)
	}
	if p.port.PeerMAC == nil && nw.Guard && made == nil {
		p.port.PeerMAC = ident.RandomMAC() // the guard has to know it before the kernel does
	}
	recorded.LANPort(&p.port, &p.rec)
	p.rec.Port = state.Port{Hairpin: &p.port.Hairpin, Isolated: &p.port.Isolated}
	if a.leasing == nil {
		p.rec.Routes = recorded.Routed(lasting(nw, p.port.Routes))
	}
	p.rec.MAC = p.port.PeerMAC.String()
	p.port.Alias = endpoint.Alias(a.hash, nw.Name, endpoint.Addresses(&p.rec))
	if made != nil {
		p.port.PeerMAC = made.PeerMAC
		p.link(made)
	}
	return p, nil
}

// wantOf is the network as it is asked for, before it is known what the pod calls for.
func wantOf(nw *Network, hash string, mark uint32) *build.Want {
	w := &build.Want{
		Record: state.Network{
			Name: nw.Name, Bridge: nw.Bridge, MTU: nw.MTU,
			Masquerade: nw.Masquerade, NonMasquerade: nw.NonMasquerade,
			Policy: recorded.PolicyName(nw.Policy), Guard: nw.Guard, Mark: uint64(mark), NFCall: nw.NFCall, Promiscuous: nw.Promiscuous,
			Uplink: nw.Uplink.NIC, DefaultRoute: string(nw.Exit), SLAAC: nw.SLAAC, VLAN: recorded.VLANRecord(nw.VLAN),
		},
		DefaultMTU: nw.DefaultMTU, Gateway: nw.Gateway, Routed: nw.Routed, ForceAddress: nw.ForceAddress, Owner: hash,
	}
	if sets := ipam.RangeSetsOf(nw.Allocator); len(sets) > 0 {
		w.Record.Pools, w.Record.PoolDir = recorded.PoolsText(sets), nw.Origin.Dir
	}
	if nw.Uplink.NIC != "" {
		w.Uplink = ours(nw.Uplink, nw.Bridge)
	}
	return w
}

// onto is the port on its bridge.
func (p *plan) onto(b *build.Built) bridge.Port {
	port := p.port
	port.BridgeIndex, port.MTU = b.Bridge.Index, b.MTU
	recorded.KeepTable(&port, p.rec.Guarded, b.Bridge)
	return port
}

// link notes what the kernel made of the port.
func (p *plan) link(l *bridge.Attachment) {
	p.rec.MTU, p.rec.MAC, p.rec.HostMAC = l.MTU, l.PeerMAC.String(), l.MAC.String()
	p.rec.NetNSCookie = l.NetNSCookie
}

// mac is the one that was asked for, or that a lease goes by; nil: ours to choose.
func (a *adding) mac() net.HardwareAddr {
	if a.leasing != nil {
		return net.HardwareAddr(a.leasing.client.MAC)
	}
	return a.pod.MAC
}

// checkGiven refuses what the pod could not be given.
func (a *adding) checkGiven(g given) error {
	if len(g.addresses) == 0 && a.leasing != nil {
		return nil // they are to come
	}
	if len(g.addresses) == 0 && a.nw.Origin.Type != "" {
		return fail.Errorf(ErrInvalid, "ipam %q gave no address", a.nw.Origin.Type)
	}
	for _, address := range g.addresses {
		if a.nw.Gateway && !address.Gateway.IsValid() {
			return fail.Errorf(ErrNoGateway, "ipam %q gave %s without a gateway, and the bridge is to be one: name the gateway in the ipam, or set isGateway to false", a.nw.Origin.Type, address.Prefix)
		}
	}
	return checkPublished(a.pod.Ports, g.addresses)
}

// lasting leaves out the default route that a pod has learnt from its LAN's router, and may
// learn anew.
func lasting(nw *Network, routes []route.Route) []route.Route {
	var list []route.Route
	for _, r := range routes {
		if !nw.SLAAC || nw.Exit == ExitHost || r.Dst.Bits() > 0 || !r.Gateway.Is6() {
			list = append(list, r)
		}
	}
	return list
}

// addressMAC derives the pod's MAC from its IPv4 address: an address that goes to
// another pod soon afterwards is then no stale entry in anybody's neighbour table, and
// nobody has to be told of it.
func addressMAC(addresses []ipam.Address) net.HardwareAddr {
	for _, a := range addresses {
		if a.Prefix.Addr().Is4() {
			ip := a.Prefix.Addr().As4()
			return net.HardwareAddr{0x0a, 0x58, ip[0], ip[1], ip[2], ip[3]}
		}
	}
	return nil
}

// podRoutes are the routes that a pod gets: those that were asked for, and the default routes
// that its network calls for.
func podRoutes(nw *Network, addresses []ipam.Address, routes []route.Route) []route.Route {
	var direct, led []route.Route
	for _, r := range withDefaultRoutes(nw, addresses, routes) {
		r.Dst, r.Protocol = r.Dst.Masked(), route.ProtocolTombolo
		if !r.Gateway.IsValid() && r.Scope == nil {
			// A route that names no gateway goes by that of the address.
			r.Gateway = gatewayFor(r.Dst.Addr().BitLen(), addresses)
		}
		r.OnLink = r.Gateway.IsValid() && !reachable(r.Gateway, addresses)
		if r.Gateway.IsValid() {
			led = append(led, r)
		} else {
			direct = append(direct, r)
		}
	}
	// Those that lead to a gateway come last.
	return append(direct, led...)
}

// withDefaultRoutes adds a default route for each family that has a gateway and
// for which there is none.
func withDefaultRoutes(nw *Network, addresses []ipam.Address, routes []route.Route) []route.Route {
	if !nw.DefaultGateway {
		return routes
	}
	list := append([]route.Route(nil), routes...)
	for _, bits := range []int{32, 128} {
		if gateway := gatewayFor(bits, addresses); gateway.IsValid() && !hasDefault(list, bits) {
			list = append(list, defaultRoute(gateway))
		}
	}
	return list
}

// hasDefault says whether there is a default route among them, of the family whose
// addresses have so many bits.
func hasDefault(routes []route.Route, bits int) bool {
	for i := range routes {
		if reroute.IsDefault(&routes[i]) && routes[i].Dst.Addr().BitLen() == bits {
			return true
		}
	}
	return false
}

func defaultRoute(gateway netip.Addr) route.Route {
	any4or6, _ := gateway.Prefix(0)
	return route.Route{Dst: any4or6, Gateway: gateway}
}

// gatewayFor gives the first gateway of the family whose addresses have so many bits.
func gatewayFor(bits int, addresses []ipam.Address) netip.Addr {
	for _, a := range addresses {
		if a.Gateway.IsValid() && a.Gateway.BitLen() == bits {
			return a.Gateway
		}
	}
	return netip.Addr{}
}

// reachable says whether a gateway is on link by one of the addresses' prefixes.
// Of link-local gateways only IPv6's always are: its interfaces have a prefix for
// them.
func reachable(gw netip.Addr, addresses []ipam.Address) bool {
	return gw.Is6() && gw.IsLinkLocalUnicast() ||
		slices.ContainsFunc(addresses, func(a ipam.Address) bool { return a.Prefix.Contains(gw) })
}
