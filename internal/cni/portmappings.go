package cni

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/network"
)

// PortMapping is one of the capability portMappings, as runtimes write it
// (CONVENTIONS.md of the CNI specification).
type PortMapping struct {
	HostPort      int    `json:"hostPort"`
	ContainerPort int    `json:"containerPort"`
	Protocol      string `json:"protocol"`
	HostIP        string `json:"hostIP"`
}

// publishedPorts reads the mappings. One that stands there twice counts once.
func publishedPorts(mappings []PortMapping) ([]network.HostPort, error) {
	var list []network.HostPort
	for i, m := range mappings {
		p, err := m.published()
		if err != nil {
			return nil, newError(codeInvalidConfig, "runtimeConfig.portMappings[%d]: %v", i, err)
		}
		if slices.Contains(list, p) {
			continue
		}
		for _, other := range list {
			if overlap(p, other) {
				return nil, newError(codeInvalidConfig, "runtimeConfig.portMappings[%d]: port %s is to lead to port %d of the pod, and %s to %d: publish a port of the host once", i, endpoint.PortText(p), p.PodPort, endpoint.PortText(other), other.PodPort)
			}
		}
		list = append(list, p)
	}
	return list, nil
}

// overlap says whether two mappings would lead one port of the host to different ports
// of the pod.
func overlap(a, b network.HostPort) bool {
	if a.Protocol != b.Protocol || a.HostPort != b.HostPort || a.PodPort == b.PodPort {
		return false
	}
	if !a.HostAddr.IsValid() || !b.HostAddr.IsValid() {
		return true
	}
	return a.HostAddr.Is4() == b.HostAddr.Is4() && (a.HostAddr == b.HostAddr || a.HostAddr.IsUnspecified() || b.HostAddr.IsUnspecified())
}

func (m *PortMapping) published() (network.HostPort, error) {
	protocol := strings.ToLower(m.Protocol)
	if protocol == "" {
		protocol = "tcp"
	}
	p := network.HostPort{HostPort: uint16(m.HostPort), PodPort: uint16(m.ContainerPort)}
	switch {
	case p.Protocol.UnmarshalText([]byte(protocol)) != nil:
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
	p.HostAddr = ip
	return p, nil
}
