package network

import (
	"context"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/conntrack"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/sockdiag"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/route"
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

// portText names a host port in messages: 8080/tcp, 192.0.2.1:8080/tcp.
func portText(p HostPort) string {
	if p.HostAddr.IsValid() && p.HostAddr.IsUnspecified() {
		p.HostAddr = netip.Addr{}
	}
	return p.String()
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
		if p.HostAddr.IsValid() && !firstOf(addresses, p.HostAddr.Is4()).IsValid() {
			return fail.Errorf(ErrInvalid, "publish port %s: the pod has no address of that family", portText(p))
		}
		if len(addresses) == 0 {
			return fail.Errorf(ErrInvalid, "publish port %s: the pod has no address", portText(p))
		}
	}
	return nil
}

// firstOf is the first address of a family, to which host ports
// lead; the zero address if there is none.
func firstOf(addresses []state.Address, is4 bool) netip.Addr {
	i := slices.IndexFunc(addresses, func(a state.Address) bool { return a.Prefix.Addr().Is4() == is4 })
	if i < 0 {
		return netip.Addr{}
	}
	return addresses[i].Prefix.Addr()
}

// publications are an attachment's UDP ports, of each family. A client that keeps
// on sending keeps its flow alive for ever, to wherever the port led before; TCP has
// an end.
func publications(rec *state.Attachment) []conntrack.Publication {
	var list []conntrack.Publication
	for _, p := range rec.Published {
		if p.Protocol != "udp" {
			continue
		}
		for _, is4 := range []bool{true, false} {
			pod := firstOf(rec.Addresses, is4)
			if !pod.IsValid() || p.HostIP.IsValid() && p.HostIP.Is4() != is4 {
				continue
			}
			list = append(list, conntrack.Publication{
				Proto: unix.IPPROTO_UDP,
				Host:  netip.AddrPortFrom(p.HostIP, uint16(p.HostPort)),
				Pod:   netip.AddrPortFrom(pod, uint16(p.PodPort)),
			})
		}
	}
	return list
}

// flushStaleFlows has the kernel forget the flows to a new pod's ports that lead
// elsewhere: to the host, or to a pod that was there before.
func flushStaleFlows(ctx context.Context, links *bridge.Conn, rec *state.Attachment) error {
	local := func(a netip.Addr) bool {
		r, err := links.Routes().Get(a)
		return err == nil && r.Type == route.Local
	}
	return flushFlows(ctx, rec, func(p conntrack.Publication) conntrack.Filter { return p.Stale(local) })()
}

// flushOwnFlows has it forget those that lead to a pod which is going. The kernel
// goes through all of its table for that, some 10 ms, and so does it when it deletes
// the link: they are done side by side.
func flushOwnFlows(ctx context.Context, rec *state.Attachment) <-chan error {
	if rec == nil || len(publications(rec)) == 0 {
		return nothingToDo()
	}
	return inBackground(flushFlows(ctx, rec, conntrack.Publication.Flows))
}

// flushFlows opens the kernel, which belongs to the caller's thread, and gives what
// is to be done, which any can do.
func flushFlows(ctx context.Context, rec *state.Attachment, which func(conntrack.Publication) conntrack.Filter) func() error {
	var filters []conntrack.Filter
	for _, p := range publications(rec) {
		filters = append(filters, which(p))
	}
	if len(filters) == 0 {
		return func() error { return nil }
	}
	conn, err := conntrack.Dial(nil)
	return func() error {
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err := conn.Flush(ctx, filters...)
		return err
	}
}

// inBackground does a step beside others: the kernel mostly waits in it.
func inBackground(step func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- step() }()
	return done
}

func nothingToDo() <-chan error {
	done := make(chan error, 1)
	done <- nil
	return done
}
