package network

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/link"
)

// hostPart is the part with the facts about the host in the firewall's rules, which all networks share
// (nft.Conn.SetHost). Uplinks are the links through which packets of pods leave the host. Service addresses are the
// addresses of the link kube-ipvs0. kube-proxy in IPVS mode keeps the addresses of all services there. The kernel
// takes them for the host's own, so host ports without a hostIP must leave them alone.
type hostPart struct{}

// look compares the firewall's service addresses with the addresses of the link kube-ipvs0. It does not compare the
// uplinks, since this takes a list of all links: see lookAtExits.
func (hostPart) look(ctx context.Context, n *site) error {
	if n.bridge.Index == 0 || n.quick && !slices.ContainsFunc(n.pods(), endpoint.PublishesIPv4) {
		return nil
	}

	services, err := n.s.services(ctx)
	if err != nil || n.quick && len(services) == 0 {
		return err
	}

	_, known, err := n.s.Firewall.Host(ctx)
	slices.SortFunc(known, netip.Addr.Compare)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil // the table is missing, which firewallPart reports
	case err == nil && !slices.Equal(known, services):
		n.found.advise(tombolo.RemedyRepair,
			"host ports without a hostIP leave alone other addresses than those of %s", link.ServiceLink)
	}

	return err
}

func (hostPart) make(ctx context.Context, n *site) (bool, error) { return false, n.s.setHost(ctx) }

// setHost updates the facts about the host in the firewall's rules. Without rules it does nothing.
func (s *session) setHost(ctx context.Context) error {
	uplinks, err := s.uplinks(ctx)
	services, servicesErr := s.services(ctx)
	trusted, trustedErr := s.trusted(ctx)
	if err := errors.Join(err, servicesErr, trustedErr); err != nil {
		return err
	}

	err = s.Firewall.SetHost(ctx, uplinks, trusted, services)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// trusted lists the links that tombolod added to firewalld's zone trusted. Without rules of firewalld it returns
// none.
func (s *session) trusted(ctx context.Context) ([]string, error) {
	zones, err := s.Dir.Zones()
	if err != nil || len(zones.Joined) == 0 {
		return nil, err
	}
	is, _, err := s.foreignFirewall("").HasFirewalld(ctx)
	if !is {
		return nil, err
	}
	return zones.Joined, err
}

// uplinks returns the names of the host's uplinks (bridge.Conn.Uplinks), without the networks' own bridges.
func (s *session) uplinks(ctx context.Context) ([]string, error) {
	records, _, err := s.Dir.ListNetworks()
	if err != nil {
		return nil, err
	}
	var ours []string
	for _, rec := range records {
		ours = append(ours, rec.Bridge)
	}
	return s.Links.Uplinks(ctx, ours...)
}

// lookAtExits finds the host's uplinks that the rules do not contain. It needs several lists from the kernel, which
// would take too long for Add and Check.
func (s *session) lookAtExits(ctx context.Context, found *findings) error {
	known, _, err := s.Firewall.Host(ctx)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the table is missing, which firewallPart reports
	}

	if err != nil {
		return err
	}

	names, err := s.uplinks(ctx)
	for _, name := range names {
		if !slices.Contains(known, name) {
			found.advise(tombolo.RemedyRepair,
				"%s, an uplink of the host, is missing in set uplinks of table inet tombolo", name)
		}
	}

	return err
}

// services returns the addresses of kube-ipvs0, sorted.
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
