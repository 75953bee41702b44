package network

import (
	"context"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network/internal/build"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/route"
)

// solicited is a pod that has asked for router advertisements; nil where it takes none.
type solicited struct{ *bridge.Solicitation }

func (s *solicited) close() {
	if s != nil {
		_ = s.Close()
	}
}

// solicit has the pod ask for router advertisements, if it takes any. They are waited for
// later: other things can be done meanwhile.
func solicit(ctx context.Context, links *bridge.Conn, pod *netns.NS, port bridge.Port) (*solicited, error) {
	if port.Autoconf == nil {
		return nil, nil
	}
	asked, err := links.Solicit(ctx, pod, port)
	if err != nil {
		return nil, err
	}
	return &solicited{asked}, nil
}

// advertised waits for the pod's first address by a router advertisement, adds it to
// what the pod has, and gives the pod its default route.
func (a *adding) advertised(ctx context.Context, asked *solicited, g given, b *build.Built, link *bridge.Attachment) (given, error) {
	if asked == nil {
		return g, nil
	}
	got, err := asked.Wait(ctx)
	if err != nil {
		return g, fail.Errorf(ErrTryAgain, `ipv6 "slaac": %v`, err)
	}
	gateway, metric, err := ipv6Gateway(a.nw, a.s.Links, b.Bridge, a.pod.NetNS, link, got)
	if err != nil {
		return g, err
	}
	for _, address := range got.Addresses {
		g.addresses = append(g.addresses, ipam.Address{Prefix: address.Prefix, Gateway: gateway})
	}
	if gateway.IsValid() {
		r := defaultRoute(gateway)
		r.Priority = metric
		g.routes = append(g.routes, r)
	}
	g.dns.Servers = append(g.dns.Servers, got.Servers...)
	return g, nil
}

// ipv6Gateway is where the pod's default route leads: to the LAN's router, of which the
// pod's own kernel has learnt it, or to the host, to which it is added here. A link-local
// address of the host's stays when the LAN gets another prefix.
func ipv6Gateway(nw *Network, links *bridge.Conn, l *bridge.Link, pod *netns.NS, link *bridge.Attachment, got *bridge.Autoconfigured) (_ netip.Addr, metric uint32, _ error) {
	if nw.NoDefaultRoute {
		return netip.Addr{}, 0, nil
	}
	if nw.Exit == ExitRouter {
		if len(got.Gateways) == 0 {
			return netip.Addr{}, 0, nil
		}
		return got.Gateways[0], 0, nil
	}
	list, err := links.Addresses().List(addr.Filter{Link: l.Index, Family: unix.AF_INET6})
	if err != nil {
		return netip.Addr{}, 0, err
	}
	for _, one := range list {
		if ip := one.Prefix.Addr(); ip.IsLinkLocalUnicast() && one.Flags&(addr.Tentative|addr.DADFailed) == 0 {
			metric, err := routeIPv6(pod, link, ip)
			return ip, metric, err
		}
	}
	return netip.Addr{}, 0, fail.Errorf(ErrNoGateway, `defaultRoute "host": bridge %s has no link-local IPv6 address to which the pod could send: give it one, or set defaultRoute to "router"`, nw.Bridge)
}

// routeIPv6 adds the default route to the host, and gives its metric.
func routeIPv6(pod *netns.NS, link *bridge.Attachment, gateway netip.Addr) (metric uint32, _ error) {
	metric, err := freeMetric(pod, true, 0)
	if err != nil {
		return 0, err
	}
	routes, err := route.Dial(&route.Config{NetNS: pod})
	if err != nil {
		return 0, err
	}
	defer routes.Close()
	_, err = routes.Ensure(route.Route{Gateway: gateway, Link: link.PeerIndex, Priority: metric, Protocol: route.ProtocolTombolo})
	return metric, explainRoute(err)
}

// autoconfigure does all of it for a pod whose other addresses are there already.
func (a *adding) autoconfigure(ctx context.Context, t *tied) (*tied, error) {
	asked, err := solicit(ctx, a.s.Links, a.pod.NetNS, t.plan.port)
	if err != nil {
		return nil, err
	}
	defer asked.close()
	g, err := a.advertised(ctx, asked, t.given, t.built, t.link)
	if err != nil {
		return nil, err
	}
	return a.again(ctx, g, t.built, t.link)
}

// again plans for a pod that was given more after it got its link, whose port can tell only
// now whose addresses are behind it.
func (a *adding) again(ctx context.Context, g given, b *build.Built, link *bridge.Attachment) (*tied, error) {
	p, err := a.plan(g, link)
	if err != nil {
		return nil, err
	}
	if err := a.s.Links.Enslave(ctx, p.onto(b)); err != nil {
		return nil, err
	}
	if b, err = build.Ready(ctx, a.s, p.want); err != nil {
		return nil, err
	}
	return &tied{g, p, b, link, nil}, nil
}
