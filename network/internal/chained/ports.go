package chained

import (
	"context"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/hostport"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/nft"
)

// RefuseListeners looks for sockets of the host that have one of the ports: their
// packets would go to the pod from now on. A port on all addresses leads to the pod in the
// families that it has, or may have yet, as one that leases an address or forms some by itself.
func RefuseListeners(ctx context.Context, containerID string, asked []nft.Port, has []ipam.Address, mayHaveMore bool) error {
	if len(asked) == 0 {
		return nil
	}
	ports := slices.Clone(asked)
	of4 := func(a ipam.Address) bool { return a.Prefix.Addr().Is4() }
	of6 := func(a ipam.Address) bool { return !of4(a) }
	if has4, has6 := slices.ContainsFunc(has, of4), slices.ContainsFunc(has, of6); has4 != has6 && !mayHaveMore {
		all := netip.IPv6Unspecified()
		if has4 {
			all = netip.IPv4Unspecified()
		}
		for i := range ports {
			if !ports[i].HostAddr.IsValid() {
				ports[i].HostAddr = all
			}
		}
	}
	taken, err := hostport.Listeners(ctx, nil, ports...)
	if err != nil {
		return err
	}
	if taken = hostport.NotHeldFor(containerID, taken); len(taken) == 0 {
		return nil
	}
	l, instead := taken[0], "choose another hostPort"
	if !l.Local.Addr().IsUnspecified() {
		instead += ", or a hostIP that is another address of the host"
	}
	return fail.Errorf(fail.ErrConflict, "publish port %d of the host: %s: stop that, or %s", l.Local.Port(), l, instead)
}

// RefuseUnreachable refuses a host port that no address of the pod could serve.
func RefuseUnreachable(ports []nft.Port, addresses []ipam.Address) error {
	for _, p := range ports {
		if p.HostAddr.IsValid() && !slices.ContainsFunc(addresses, func(a ipam.Address) bool { return a.Prefix.Addr().Is4() == p.HostAddr.Is4() }) {
			return fail.Errorf(tombolo.ErrInvalid, "publish port %s: the pod has no address of that family", endpoint.PortText(p))
		}
		if len(addresses) == 0 {
			return fail.Errorf(tombolo.ErrInvalid, "publish port %s: the pod has no address", endpoint.PortText(p))
		}
	}
	return nil
}
