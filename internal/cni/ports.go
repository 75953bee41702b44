package cni

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/conntrack"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/sockdiag"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/route"
)

// PortMapping is one of the capability portMappings, as runtimes write it
// (CONVENTIONS.md of the CNI specification).
type PortMapping struct {
	HostPort      int    `json:"hostPort"`
	ContainerPort int    `json:"containerPort"`
	Protocol      string `json:"protocol"`
	HostIP        string `json:"hostIP"`
}

// published reads the mappings. One that stands there twice counts once.
func (rc *runtimeConfig) published() ([]state.Published, error) {
	var list []state.Published
	for i, m := range rc.PortMappings {
		p, err := m.published()
		if err != nil {
			return nil, newError(codeInvalidConfig, "runtimeConfig.portMappings[%d]: %v", i, err)
		}
		if slices.Contains(list, p) {
			continue
		}
		for _, other := range list {
			if overlap(p, other) {
				return nil, newError(codeInvalidConfig, "runtimeConfig.portMappings[%d]: port %s is to lead to port %d of the pod, and %s to %d: publish a port of the host once", i, portText(p), p.PodPort, portText(other), other.PodPort)
			}
		}
		list = append(list, p)
	}
	return list, nil
}

// overlap says whether two mappings would lead one port of the host to different ports
// of the pod.
func overlap(a, b state.Published) bool {
	if a.Protocol != b.Protocol || a.HostPort != b.HostPort || a.PodPort == b.PodPort {
		return false
	}
	if !a.HostIP.IsValid() || !b.HostIP.IsValid() {
		return true
	}
	return a.HostIP.Is4() == b.HostIP.Is4() && (a.HostIP == b.HostIP || a.HostIP.IsUnspecified() || b.HostIP.IsUnspecified())
}

func (m *PortMapping) published() (state.Published, error) {
	p := state.Published{Protocol: strings.ToLower(m.Protocol), HostPort: m.HostPort, PodPort: m.ContainerPort}
	if p.Protocol == "" {
		p.Protocol = "tcp"
	}
	switch {
	case protocolNumber(p.Protocol) == 0:
		return p, fmt.Errorf(`protocol %q is not known: use "tcp", "udp" or "sctp"`, m.Protocol)
	case m.HostPort < 1 || m.HostPort > 65535:
		return p, fmt.Errorf("hostPort %d is not within 1 and 65535", m.HostPort)
	case m.ContainerPort < 1 || m.ContainerPort > 65535:
		return p, fmt.Errorf("containerPort %d is not within 1 and 65535", m.ContainerPort)
	case m.HostIP == "":
		return p, nil
	}
	ip, err := netip.ParseAddr(m.HostIP)
	ip = ip.Unmap()
	switch {
	case err != nil || ip.Zone() != "":
		return p, fmt.Errorf("hostIP %q is not an address such as 192.0.2.1", m.HostIP)
	case ip.IsMulticast():
		return p, fmt.Errorf("hostIP %s is a multicast address", ip)
	case ip == netip.IPv6Loopback():
		return p, errors.New("hostIP ::1: the kernel leads nothing from there to a pod: use 127.0.0.1")
	}
	p.HostIP = ip
	return p, nil
}

func protocolNumber(name string) uint8 { return endpoint.Protocol(name) }

// portText names a host port in messages: 8080/tcp, 192.0.2.1:8080/tcp.
func portText(p state.Published) string {
	if !p.HostIP.IsValid() || p.HostIP.IsUnspecified() {
		return fmt.Sprintf("%d/%s", p.HostPort, p.Protocol)
	}
	return netip.AddrPortFrom(p.HostIP, uint16(p.HostPort)).String() + "/" + p.Protocol
}

// publishesIPv4 says whether a port of the host's IPv4 addresses leads to the pod, or will
// once more: one whose lease has ended has no address until the keeper has got another.
func publishesIPv4(rec *state.Attachment) bool {
	leased := rec.IPAMType == ipamDHCP
	return (leased || slices.ContainsFunc(rec.Addresses, func(a state.Address) bool { return a.Prefix.Addr().Is4() })) &&
		slices.ContainsFunc(rec.Published, func(p state.Published) bool { return !p.HostIP.IsValid() || p.HostIP.Is4() })
}

// refuseListeners looks for sockets of the host that have one of the ports: their
// packets would go to the pod from now on.
func (a *adding) refuseListeners(ctx context.Context) error {
	if len(a.rec.Published) == 0 {
		return nil
	}
	conn, err := sockdiag.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	var wants []sockdiag.Want
	for _, p := range a.rec.Published {
		wants = append(wants, sockdiag.Want{Proto: protocolNumber(p.Protocol), Addr: p.HostIP, Port: uint16(p.HostPort)})
	}
	sockets, err := conn.Listeners(ctx, wants)
	if err != nil {
		return err
	}
	for _, s := range sockets {
		if s.Local.Addr() == netip.IPv6Loopback() {
			continue // nothing of ours gets there
		}
		if s.HeldByMonitor(a.call.containerID) {
			continue // it keeps the port for this very container: podman network reload
		}
		return newError(codeConflict, "publish port %d of the host: %s: stop that program, or choose another hostPort", s.Local.Port(), s.InUse())
	}
	return nil
}

// explainConflict says which pod has a port that is wanted, in the operator's
// words.
func (a *adding) explainConflict(conflict *nft.ConflictError) error {
	if conflict.Port == "" {
		return conflict
	}
	owner := "another program"
	if conflict.Owner != "" {
		owner = "endpoint " + string(conflict.Owner)
		if rec, err := a.dir.Load(conflict.Network, string(conflict.Owner)); err == nil {
			owner = describePod(rec)
		}
	}
	return newError(codeConflict, "port %s is already published by %s", conflict.Port, owner)
}

// describePod names a pod as its operator knows it.
func describePod(rec *state.Attachment) string {
	id := rec.ContainerID
	if len(id) > 12 {
		id = id[:12] + "…"
	}
	if rec.Pod == "" {
		return "container " + id
	}
	return "pod " + rec.Pod + " (container " + id + ")"
}

// checkPublished refuses a host port that no address of the pod could serve.
func (a *adding) checkPublished() error {
	for _, p := range a.rec.Published {
		if p.HostIP.IsValid() && firstOf(a.rec, p.HostIP.Is4()) == (netip.Addr{}) {
			return newError(codeInvalidConfig, "publish port %s: the pod has no address of that family", portText(p))
		}
		if len(a.rec.Addresses) == 0 {
			return newError(codeInvalidConfig, "publish port %s: the pod has no address", portText(p))
		}
	}
	return nil
}

// firstOf is an attachment's first address of a family, to which its host ports
// lead; the zero address if it has none.
func firstOf(rec *state.Attachment, is4 bool) netip.Addr {
	for _, a := range rec.Addresses {
		if a.Prefix.Addr().Is4() == is4 {
			return a.Prefix.Addr()
		}
	}
	return netip.Addr{}
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
			pod := firstOf(rec, is4)
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
func (h *host) flushStaleFlows(ctx context.Context, rec *state.Attachment) error {
	local := func(a netip.Addr) bool {
		r, err := h.br.Routes().Get(a)
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
