package network

import (
	"context"
	"net/netip"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/sockdiag"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/flows"
)

// published are host ports as they are on record.
func published(ports []HostPort) []state.Published {
	var list []state.Published
	for _, p := range ports {
		list = append(list, state.Published{
			Protocol: endpoint.ProtocolName(p.Protocol), HostIP: p.HostAddr, HostPort: int(p.HostPort), PodPort: int(p.PodPort),
		})
	}
	return list
}

// refuseListeners looks for sockets of the host that have one of the ports: their
// packets would go to the pod from now on.
func refuseListeners(ctx context.Context, pod *Pod) error {
	if len(pod.Ports) == 0 {
		return nil
	}
	conn, err := sockdiag.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	var wants []sockdiag.Want
	for _, p := range pod.Ports {
		wants = append(wants, sockdiag.Want{Proto: p.Protocol, Addr: p.HostAddr, Port: p.HostPort})
	}
	sockets, err := conn.Listeners(ctx, wants)
	if err != nil {
		return err
	}
	for _, s := range sockets {
		if s.Local.Addr() == netip.IPv6Loopback() {
			continue // nothing of ours gets there
		}
		if s.HeldByMonitor(pod.ContainerID) {
			continue // it keeps the port for this very container: podman network reload
		}
		return fail.Errorf(ErrConflict, "publish port %d of the host: %s: stop that program, or choose another hostPort", s.Local.Port(), s.InUse())
	}
	return nil
}

// checkPublished refuses a host port that no address of the pod could serve.
func checkPublished(ports []HostPort, addresses []state.Address) error {
	for _, p := range ports {
		if p.HostAddr.IsValid() && !flows.FirstOf(addresses, p.HostAddr.Is4()).IsValid() {
			return fail.Errorf(ErrInvalid, "publish port %s: the pod has no address of that family", endpoint.PortText(p))
		}
		if len(addresses) == 0 {
			return fail.Errorf(ErrInvalid, "publish port %s: the pod has no address", endpoint.PortText(p))
		}
	}
	return nil
}
