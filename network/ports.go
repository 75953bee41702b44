package network

import (
	"context"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/hostport"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
)

// refuseListeners looks for sockets of the host that have one of the ports: their
// packets would go to the pod from now on. A port on all addresses leads to the pod in the
// families that it has, or may have yet, as one that leases an address or forms some by itself.
func refuseListeners(ctx context.Context, containerID string, asked []HostPort, has []ipam.Address, mayHaveMore bool) error {
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
	return fail.Errorf(ErrConflict, "publish port %d of the host: %s: stop that, or %s", l.Local.Port(), l, instead)
}

// refuseUnreachable refuses a host port that no address of the pod could serve.
func refuseUnreachable(ports []HostPort, addresses []ipam.Address) error {
	for _, p := range ports {
		if p.HostAddr.IsValid() && !slices.ContainsFunc(addresses, func(a ipam.Address) bool { return a.Prefix.Addr().Is4() == p.HostAddr.Is4() }) {
			return fail.Errorf(ErrInvalid, "publish port %s: the pod has no address of that family", endpoint.PortText(p))
		}
		if len(addresses) == 0 {
			return fail.Errorf(ErrInvalid, "publish port %s: the pod has no address", endpoint.PortText(p))
		}
	}
	return nil
}

// flushStale has the kernel forget the flows to a new pod's ports that lead elsewhere.
func flushStale(ctx context.Context, links *bridge.Conn, rec *state.Attachment) error {
	ports := endpoint.Ports(rec)
	if !hostport.HasFlows(ports...) {
		return nil
	}
	conn, err := hostport.Dial(&hostport.Config{Routes: links.Routes()})
	if err != nil {
		return err
	}
	defer conn.Close()
	return conn.FlushStale(ctx, endpoint.Addresses(rec), ports...)
}
