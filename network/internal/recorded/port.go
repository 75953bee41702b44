package recorded

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// LANPort gives a port what a pod on a LAN needs of its interface.
func LANPort(p *bridge.Port, a *state.Attachment) {
	p.NoRedirects = a.DefaultRoute == ExitHost
	if a.SLAAC {
		p.Autoconf = &bridge.Autoconf{DefaultRoute: a.DefaultRoute != ExitHost, AddressOptional: slices.ContainsFunc(a.Addresses, leased6)}
	}
}

// leased6 says whether an address is one by DHCPv6: it has no network's prefix.
func leased6(a ipam.Address) bool { return a.Prefix.Addr().Is6() && a.Prefix.IsSingleIP() }

// Autoconfigured says whether an address is one that a pod has formed by a router
// advertisement. What is advertised may change, so it need not have it for ever.
func Autoconfigured(a *state.Attachment, p netip.Prefix) bool {
	mac, err := net.ParseMAC(a.MAC)
	if !a.SLAAC || err != nil || !p.Addr().Is6() {
		return false
	}
	own, formed := p.Addr().As16(), bridge.LinkLocal(mac).As16()
	return [8]byte(own[8:]) == [8]byte(formed[8:])
}

// KeepTable is what a kernel without such a limit (before Linux 6.7) needs in its place: the
// bridge learns nothing from a pod that nothing holds to its own MAC, and has an entry of
// that MAC for good. Frames for other MACs behind the port then go to all ports.
func KeepTable(p *bridge.Port, guarded bool, br *bridge.Link) {
	if br.Bridge != nil && br.Bridge.MaxLearned == nil && !guarded {
		p.NoLearning, p.StaticFDB = true, true
	}
}

// Lasting are the addresses of an attachment that it is to have for as long as it is there.
func Lasting(rec *state.Attachment) []netip.Prefix {
	var list []netip.Prefix
	for _, a := range rec.Addresses {
		if !Autoconfigured(rec, a.Prefix) {
			list = append(list, a.Prefix)
		}
	}
	return list
}

// Routed is how routes of a pod's interface are on record: without the default route that a pod has
// learnt from its LAN's router, and may learn anew.
func Routed(rec *state.Attachment, routes []route.Route) []state.Route {
	var list []state.Route
	for i := range routes {
		r := &routes[i]
		if rec.SLAAC && rec.DefaultRoute != ExitHost && r.Dst.Bits() <= 0 && r.Gateway.Is6() {
			continue
		}
		one := state.Route{
			Dst: r.Dst, Gateway: r.Gateway, OnLink: r.OnLink, Priority: uint64(r.Priority), Table: uint64(r.Table),
			MTU: uint64(r.MTU), AdvMSS: uint64(r.AdvMSS),
		}
		if r.Scope != nil {
			scope := int(*r.Scope)
			one.Scope = &scope
		}
		list = append(list, one)
	}
	return list
}

// Routes are those of an attachment that it is to have for as long as it is there, in an order in
// which they can be made. A default route to the host leads to the address that the host has now.
func Routes(rec *state.Attachment) []route.Route {
	list := Subnets(Lasting(rec))
	for _, r := range rec.Routes {
		one := route.Route{
			Dst: r.Dst, Gateway: r.Gateway, OnLink: r.OnLink, Priority: uint32(r.Priority), Table: uint32(r.Table),
			MTU: uint32(r.MTU), AdvMSS: uint32(r.AdvMSS), Protocol: route.ProtocolTombolo,
		}
		if r.Scope != nil {
			scope := route.Scope(*r.Scope)
			one.Scope = &scope
		}
		list = append(list, one)
	}
	return Led(rec, list)
}

// Led gives the routes that a pod was made with as they are to be now: where a default route
// led to the host, the host may have another address since.
func Led(rec *state.Attachment, routes []route.Route) []route.Route {
	list := append([]route.Route(nil), routes...)
	for i, r := range list {
		if !r.Gateway.IsValid() || r.Dst.Bits() > 0 {
			continue
		}
		for _, one := range rec.HostGateways {
			if one.HostAtADD.IsValid() && one.HostAtADD == r.Gateway {
				list[i].Gateway = one.Host
			}
		}
	}
	return list
}

// PortFits says whether a link is a port of the bridge with the flags that it
// should have.
func PortFits(l, br *bridge.Link, p *bridge.Port) bool {
	return l.Master == br.Index && l.Up && l.Port != nil &&
		l.Port.Hairpin == p.Hairpin && l.Port.Isolated == p.Isolated &&
		l.Port.ForwardGroups == p.ForwardGroups && l.ClosedToIP() && l.Alias == p.Alias &&
		l.Port.Learning != p.NoLearning && l.Port.Flood != p.NoFlood && l.Port.MulticastFlood != p.NoMulticastFlood &&
		(p.MTU == 0 || l.MTU == p.MTU) && (p.MAC == nil || bytes.Equal(l.MAC, p.MAC))
}

// Port is the host's side of an attachment, from its record.
func Port(a *state.Attachment) bridge.Port {
	on := func(v *bool) bool { return v != nil && *v }
	p := bridge.Port{
		Bridge: a.Bridge, Name: a.HostIf, Peer: a.IfName, MTU: a.MTU,
		Alias:   endpoint.AliasOf(a),
		Hairpin: on(a.Port.Hairpin), Isolated: on(a.Port.Isolated), ForwardGroups: true,
		Down: !a.Up, VLAN: VLANs(a.VLAN),
	}
	LANPort(&p, a)
	p.MAC, _ = net.ParseMAC(a.HostMAC)
	p.PeerMAC, _ = net.ParseMAC(a.MAC)
	return p
}

// PortOn is portOf, with what depends on the bridge that is there.
func PortOn(a *state.Attachment, br *bridge.Link) bridge.Port {
	p := Port(a)
	if p.VLAN.IsZero() {
		p.VLAN = DefaultVLAN(br)
	}
	if p.PeerMAC != nil {
		KeepTable(&p, a.Guarded, br)
	}
	return p
}

// Target says where an attachment's traffic is shaped.
func Target(rec *state.Attachment) bandwidth.Target {
	return bandwidth.Target{
		Port: rec.HostIf, MTU: rec.MTU, IFB: bandwidth.IFBName(rec.Hash()),
		Alias: endpoint.AliasOf(rec), Owner: endpoint.AliasOwner(rec.Hash()),
	}
}

// Shape are the limits of an attachment.
func Shape(rec *state.Attachment) bandwidth.Shape {
	b := rec.Bandwidth
	return bandwidth.Shape{
		Ingress: bandwidth.Limit{Rate: b.IngressRate, Burst: b.IngressBurst},
		Egress:  bandwidth.Limit{Rate: b.EgressRate, Burst: b.EgressBurst},
	}
}

// Limit puts limits on record, with the link that shapes what the pod sends.
func Limit(rec *state.Attachment, s bandwidth.Shape) {
	rec.Bandwidth, rec.IFB = state.Bandwidth{
		IngressRate: s.Ingress.Rate, IngressBurst: s.Ingress.Burst,
		EgressRate: s.Egress.Rate, EgressBurst: s.Egress.Burst,
	}, ""
	if s.Egress.Rate > 0 {
		rec.IFB = bandwidth.IFBName(rec.Hash())
	}
}

// OpenPod opens the namespace of a pod, unless another pod's is at the path by now.
func OpenPod(path string, cookie uint64) (*netns.NS, error) {
	pod, err := netns.Open(path)
	if err != nil {
		return nil, err
	}
	now, err := pod.Cookie()
	if err == nil && now != cookie {
		err = fmt.Errorf("%s is another pod's by now", path)
	}
	if err != nil {
		pod.Close()
		return nil, err
	}
	return pod, nil
}

// InterfaceIn gives the index of a pod's interface.
func InterfaceIn(ctx context.Context, pod *netns.NS, name string) (int, error) {
	conn, err := bridge.Dial(&bridge.Config{NetNS: pod})
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	l, err := conn.Link(ctx, name)
	if err != nil {
		return 0, err
	}
	return l.Index, nil
}
