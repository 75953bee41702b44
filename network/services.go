package network

import (
	"context"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/link"
)

// servicePart keeps host ports without a hostIP from the addresses of kube-ipvs0: kube-proxy in IPVS mode has the
// addresses of all services there, which the kernel takes for the host's own.
type servicePart struct{}

func (servicePart) look(ctx context.Context, n *site) error {
	if n.bridge.Index == 0 || n.usual && (n.want == nil || !n.want.Loopback) {
		return nil
	}
	services, err := n.s.services(ctx)
	if err != nil || n.usual && len(services) == 0 {
		return err
	}
	left, err := n.s.Firewall.LeftAlone(ctx)
	slices.SortFunc(left, netip.Addr.Compare)
	if err == nil && !slices.Equal(left, services) {
		n.found.Advise(tombolo.RemedyRepair, "host ports without a hostIP leave alone other addresses than those of %s", link.ServiceLink)
	}
	return err
}

func (servicePart) make(ctx context.Context, n *site) (bool, error) {
	services, err := n.s.services(ctx)
	if err != nil {
		return false, err
	}
	return false, n.s.Firewall.LeaveAlone(ctx, services)
}

// services lists the addresses of kube-ipvs0, in order.
func (s *session) services(ctx context.Context) (list []netip.Addr, _ error) {
	l, err := s.link(ctx, link.ServiceLink)
	if err != nil || l.Index == 0 {
		return nil, err
	}
	addresses, err := s.Links.Addresses().List(ctx, addr.Filter{Link: l.Index})
	for _, a := range addresses {
		if own := a.Prefix.Addr(); !own.IsLinkLocalUnicast() {
			list = append(list, own)
		}
	}
	slices.SortFunc(list, netip.Addr.Compare)
	return slices.Compact(list), err
}
