package recorded

import (
	"net"
	"net/netip"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// LANPort gives a port what a pod on a LAN needs of its interface.
func LANPort(p *bridge.Port, a *state.Attachment) {
	p.NoRedirects = a.DefaultRoute == ExitHost
	if a.SLAAC {
		p.Autoconf = &bridge.Autoconf{DefaultRoute: a.DefaultRoute == ExitRouter}
	}
}

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

// PortFits says whether a link is a port of the bridge with the flags that it
// should have.
func PortFits(l, br *bridge.Link, p *bridge.Port) bool {
	return l.Master == br.Index && l.Up && l.Port != nil &&
		l.Port.Hairpin == p.Hairpin && l.Port.Isolated == p.Isolated &&
		l.Port.ForwardGroups == p.ForwardGroups && l.ClosedToIP() && l.Alias == p.Alias
}

// Port is the host's side of an attachment, from its record.
func Port(a *state.Attachment) bridge.Port {
	on := func(v *bool) bool { return v != nil && *v }
	p := bridge.Port{
		Bridge: a.Bridge, Name: a.HostIf, Peer: a.IfName, MTU: a.MTU,
		Alias:   endpoint.AliasOf(a),
		Hairpin: on(a.Port.Hairpin), Isolated: on(a.Port.Isolated), ForwardGroups: true,
		Down: !a.Up,
	}
	LANPort(&p, a)
	p.MAC, _ = net.ParseMAC(a.HostMAC)
	p.PeerMAC, _ = net.ParseMAC(a.MAC)
	return p
}

// PortOn is portOf, with what depends on the bridge that is there.
func PortOn(a *state.Attachment, br *bridge.Link) bridge.Port {
	p := Port(a)
	if p.PeerMAC != nil {
		KeepTable(&p, a.Guarded, br)
	}
	return p
}
