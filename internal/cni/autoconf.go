package cni

import (
	"context"
	"net"
	"net/netip"

	current "github.com/containernetworking/cni/pkg/types/100"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/route"
)

// lanPort gives a port what a pod on a LAN needs of its interface.
func lanPort(p *bridge.Port, a *state.Attachment) {
	p.NoRedirects = a.DefaultRoute == defaultRouteHost
	if a.SLAAC {
		p.Autoconf = &bridge.Autoconf{DefaultRoute: a.DefaultRoute == defaultRouteRouter}
	}
}

// solicited is a pod that has asked for router advertisements; nil where it takes none.
type solicited struct{ *bridge.Solicitation }

func (s *solicited) close() {
	if s != nil {
		_ = s.Close()
	}
}

// solicit has the pod ask for router advertisements, if it takes any. They are waited for
// later: other things can be done meanwhile.
func (a *adding) solicit(ctx context.Context, port *bridge.Port) (*solicited, error) {
	if port.Autoconf == nil {
		return nil, nil
	}
	s, err := a.br.Solicit(ctx, a.pod, *port)
	if err != nil {
		return nil, err
	}
	return &solicited{s}, nil
}

// advertised waits for the pod's first address by a router advertisement, adds it to
// what the pod has, and gives the pod its default route.
func (a *adding) advertised(ctx context.Context, s *solicited, t *tied) error {
	if s == nil {
		return nil
	}
	got, err := s.Wait(ctx)
	if err != nil {
		return newError(codeTryAgainLater, `ipv6 "slaac": %v`, err)
	}
	gateway, err := a.ipv6Gateway(ctx, t, got)
	if err != nil {
		return err
	}
	for _, address := range got.Addresses {
		ip := &current.IPConfig{Address: ipNet(address.Prefix)}
		if gateway.IsValid() {
			ip.Gateway = gateway.AsSlice()
		}
		t.leased.IPs = append(t.leased.IPs, ip)
	}
	if gateway.IsValid() {
		t.leased.Routes = append(t.leased.Routes, defaultRoute(gateway))
	}
	for _, server := range got.Servers {
		t.leased.DNS.Nameservers = append(t.leased.DNS.Nameservers, server.String())
	}
	return nil
}

// ipv6Gateway is where the pod's default route leads: to the LAN's router, of whom the
// pod's own kernel has learnt it, or to the host, to which it is added here. A link-local
// address of the host's stays when the LAN gets another prefix.
func (a *adding) ipv6Gateway(ctx context.Context, t *tied, got *bridge.Autoconfigured) (netip.Addr, error) {
	if a.settings.NoDefaultRoute {
		return netip.Addr{}, nil
	}
	if a.settings.DefaultRoute == defaultRouteRouter {
		if len(got.Gateways) == 0 {
			return netip.Addr{}, nil
		}
		return got.Gateways[0], nil
	}
	list, err := a.br.Addresses().List(addr.Filter{Link: t.built.bridge.Index, Family: unix.AF_INET6})
	if err != nil {
		return netip.Addr{}, err
	}
	for _, one := range list {
		if ip := one.Prefix.Addr(); ip.IsLinkLocalUnicast() && one.Flags&(addr.Tentative|addr.DADFailed) == 0 {
			return ip, a.routeIPv6(t.attachment, ip)
		}
	}
	return netip.Addr{}, newError(codeNoGateway, `defaultRoute "host": bridge %s has no link-local IPv6 address to which the pod could send: give it one, or set defaultRoute to "router"`, a.settings.Bridge)
}

// routeIPv6 adds the default route to the host.
func (a *adding) routeIPv6(att *bridge.Attachment, gateway netip.Addr) error {
	routes, err := route.Dial(&route.Config{NetNS: a.pod})
	if err != nil {
		return err
	}
	defer routes.Close()
	_, err = routes.Ensure(route.Route{Gateway: gateway, Link: att.PeerIndex, Protocol: route.ProtocolTombolo})
	return explainRoute(err)
}

// autoconfigure does all of it for a pod whose other addresses are there already.
func (a *adding) autoconfigure(ctx context.Context, t *tied, port *bridge.Port) error {
	s, err := a.solicit(ctx, port)
	if err != nil {
		return err
	}
	defer s.close()
	if err := a.advertised(ctx, s, t); err != nil {
		return err
	}
	n, port, err := a.plan(t.leased)
	if err != nil {
		return err
	}
	t.network = n
	port.PeerMAC = t.attachment.PeerMAC
	a.onto(t.built, port)
	if err := a.br.Enslave(ctx, *port); err != nil {
		return err
	}
	t.built, err = a.ready(ctx, t.network)
	return err
}

// autoconfigured says whether an address is one that a pod has formed by a router
// advertisement. What is advertised may change, so it need not have it for ever.
func autoconfigured(a *state.Attachment, p netip.Prefix) bool {
	mac, err := net.ParseMAC(a.MAC)
	if !a.SLAAC || err != nil || !p.Addr().Is6() {
		return false
	}
	own, formed := p.Addr().As16(), bridge.LinkLocal(mac).As16()
	return [8]byte(own[8:]) == [8]byte(formed[8:])
}
