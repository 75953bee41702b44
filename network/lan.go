package network

import (
	"context"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
)

// A pod of a LAN is a neighbour of the host's neighbours. Its default route may lead
// through the host all the same (defaultRoute "host"), so that the host's firewall and
// its services see what it sends; what comes back is bridged, and seen because the
// bridge calls the firewall.

// routingOf is what the host has to be for a network's pods; ok is false where they do
// not go through it.
func routingOf(rec *state.Network) (r bridge.Routing, ok bool) {
	return bridge.Routing{IPv4: true, IPv6: rec.SLAAC, NoRedirects: rec.Bridge}, rec.DefaultRoute == string(ExitHost)
}

// buildLAN has the host be the pods' way to everywhere.
func buildLAN(ctx context.Context, links *bridge.Conn, rec *state.Network) error {
	r, ok := routingOf(rec)
	if !ok {
		return nil
	}
	_, err := links.EnsureRouting(ctx, r)
	return err
}

// lanDifferences lists what of it is not so.
func lanDifferences(rec *state.Network) ([]tombolo.Difference, error) {
	r, ok := routingOf(rec)
	if !ok {
		return nil, nil
	}
	return bridge.CheckRouting(r)
}

// hostAddress finds the host's own address in the subnet of a pod's; it is invalid where
// there is none.
func hostAddress(links *bridge.Conn, l *bridge.Link, pod netip.Prefix) (netip.Addr, error) {
	list, err := hostAddresses(links, l, pod)
	if err != nil || len(list) == 0 {
		return netip.Addr{}, err
	}
	return list[0], nil
}

// hostAddresses are all of them.
func hostAddresses(links *bridge.Conn, l *bridge.Link, pod netip.Prefix) ([]netip.Addr, error) {
	family := uint8(unix.AF_INET)
	if pod.Addr().Is6() {
		family = unix.AF_INET6
	}
	all, err := links.Addresses().List(addr.Filter{Link: l.Index, Family: family})
	if err != nil {
		return nil, err
	}
	var list []netip.Addr
	for _, a := range all {
		own := a.Prefix.Addr()
		if pod.Contains(own) && own != pod.Addr() && a.Flags&(addr.Tentative|addr.DADFailed) == 0 {
			list = append(list, own)
		}
	}
	return list, nil
}

// throughHost is hostAddress for a pod that is to have its default route by it; it is
// invalid where the network is not of that kind.
func (s *session) throughHost(ctx context.Context, nw *Network, l *bridge.Link, pod netip.Prefix) (netip.Addr, error) {
	if nw.Exit != ExitHost || nw.NoDefaultRoute {
		return netip.Addr{}, nil
	}
	own, err := hostAddress(s.br, l, pod)
	if err == nil && !own.IsValid() {
		// A network manager may have put it back on the NIC.
		if err := s.mendUplink(ctx, nw.Uplink.NIC); err != nil {
			return own, err
		}
		own, err = hostAddress(s.br, l, pod)
	}
	if err == nil && !own.IsValid() {
		err = fail.Errorf(ErrNoGateway, `defaultRoute "host": the host has no address on bridge %s in %s, the subnet of the pod's address: give it one, or set defaultRoute to "router"`, nw.Bridge, pod.Masked())
	}
	return own, err
}
