package network

import (
	"context"
	"net/netip"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network/internal/build"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
)

// solicit has the pod ask for router advertisements, if it takes any: else it gives nil. They are
// waited for later, since other things can be done meanwhile.
func (a *adding) solicit(ctx context.Context, port bridge.Port) (*bridge.Solicitation, error) {
	if port.Autoconf == nil {
		return nil, nil
	}
	return a.s.Links.Solicit(ctx, a.pod.NetNS, port)
}

// advertised waits for the pod's first address by a router advertisement, adds it to
// what the pod has, and gives the pod its default route.
func (a *adding) advertised(ctx context.Context, asked *bridge.Solicitation, g given, b *build.Built, link *bridge.Attachment) (given, error) {
	if asked == nil {
		return g, nil
	}
	var err error
	got := new(bridge.Autoconfigured)
	if !a.nw.DHCPv6 {
		if got, err = asked.Wait(ctx); err != nil {
			return g, fail.Errorf(ErrTryAgain, `ipv6 "slaac": %w`, err)
		}
	}
	var gateway netip.Addr
	var metric uint32
	if !a.nw.NoDefaultRoute {
		if gateway, metric, err = gateway6(a.s.Links, b.Bridge, a.pod.NetNS, link, got, a.nw.Exit != ExitHost); err != nil {
			return g, err
		}
	}
	for _, address := range got.Addresses {
		g.addresses = append(g.addresses, ipam.Address{Prefix: address.Prefix, Gateway: gateway})
	}
	if gateway.IsValid() {
		r := defaultBy(gateway)
		r.Priority = metric
		g.routes = append(g.routes, r)
	}
	g.dns.Servers = append(g.dns.Servers, got.Servers...)
	g.informs = got.OtherConfig && len(got.Servers) == 0
	return g, nil
}

// autoconfigure does all of it for a pod whose other addresses are there already.
func (a *adding) autoconfigure(ctx context.Context, t *tied) (*tied, error) {
	asked, err := a.solicit(ctx, t.plan.port)
	if err != nil {
		return nil, err
	}
	defer asked.Close()
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
