package cni

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// portmapConf is the configuration of the reference plugin portmap, which publishes ports of a pod at ports of the
// host.
type portmapConf struct {
	Common
	Backend              *string  `json:"backend"`
	SNAT                 *bool    `json:"snat"`
	ConditionsV4         []string `json:"conditionsV4"`
	ConditionsV6         []string `json:"conditionsV6"`
	MasqAll              bool     `json:"masqAll"`
	MarkMasqBit          *int     `json:"markMasqBit"`          // not used: masquerading needs no mark here
	ExternalSetMarkChain *string  `json:"externalSetMarkChain"` // not used: no other program marks packets
}

func (f *portmapConf) problems() []error {
	p := problems(f.Common.problems())
	const maxBit = 31
	bit, backend := orZero(f.MarkMasqBit), f.Backend
	p.add(f.MarkMasqBit != nil && f.ExternalSetMarkChain != nil,
		"markMasqBit and externalSetMarkChain exclude each other")
	p.add(bit < 0 || bit > maxBit, "markMasqBit %d is not within 0 and %d", bit, maxBit)
	p.add(backend != nil && *backend != "iptables" && *backend != "nftables",
		`backend %q is neither "iptables" nor "nftables"`, orZero(backend))
	return p
}

// unsupported returns an error if the configuration has fields that this plugin does not support.
func (f *portmapConf) unsupported() error {
	field := "conditionsV4"
	switch {
	case len(f.ConditionsV4) > 0:
	case len(f.ConditionsV6) > 0:
		field = "conditionsV6"
	default:
		return nil
	}

	return newError(codeUnsupportedField,
		"%s (conditions of iptables or nft as text) is not supported: leave it out, or have the reference's portmap "+
			"do this (tombolo install --undo --names portmap DIR)", field)
}

func (f *portmapConf) lacks(rec *state.Attachment) bool {
	ports, err := publishedPorts(f.RuntimeConfig.PortMappings)
	return err == nil && len(ports) > 0 && len(rec.Published) == 0
}

// publication returns the ports to publish for a pod. Its field SNAT selects the connections whose source address the
// firewall replaces by the host's. prev is a result with the pod's addresses. As in the reference plugin, masqAll has
// no effect if snat is false. publication drops mappings of a host address whose family the pod lacks, with a warning.
func (f *portmapConf) publication(c *call, prev *current.Result) (p network.Publication, _ error) {
	switch {
	case f.SNAT != nil && !*f.SNAT:
		p.SNAT = nft.SNATNone
	case f.MasqAll:
		p.SNAT = nft.SNATAll
	}

	ports, err := publishedPorts(f.RuntimeConfig.PortMappings)
	if err != nil {
		return p, err
	}

	has := map[bool]bool{}
	for _, a := range c.podAddresses(prev) {
		has[a.Is4()] = true
	}

	p.Ports = slices.DeleteFunc(ports, func(p nft.Port) bool {
		// Drop ports of a family that the pod lacks. As in the reference plugin, they are no error, since runtimes
		// pass host addresses of both families.
		passed := p.HostAddr.IsValid() && !has[p.HostAddr.Is4()]
		if passed {
			c.log.warn("host port " + endpoint.PortText(p) + " is not published: the pod has no address of that family")
		}
		return passed
	})

	return p, nil
}

func (f *portmapConf) run(ctx context.Context, c *call) (*current.Result, error) {
	if c.verb == "DEL" {
		// Even if ADD would refuse the configuration, DEL must not return an error, or the runtime would not call the
		// DEL of the previous plugins.
		if len(c.undecoded) > 0 || len(f.RuntimeConfig.PortMappings) > 0 {
			c.undoChange(func(change network.Change) error { return change.Publish(ctx, network.Publication{}) })
		}
		return nil, nil
	}

	prev, change, err := c.chainedChange()
	if err != nil {
		return nil, err
	}

	publish, err := f.publication(c, prev)
	if err != nil {
		return nil, err
	}

	switch {
	case len(publish.Ports) == 0:
		return c.passThrough()
	case c.verb == "CHECK":
		return nil, differ(change.Check(ctx, &publish, nil))
	}

	if err := f.unsupported(); err != nil {
		return nil, err
	}

	return prev, change.Publish(ctx, publish)
}

// PortMapping is an element of runtimeConfig.portMappings, the argument of the capability portMappings (CONVENTIONS.md
// of the CNI specification).
type PortMapping struct {
	HostPort      int    `json:"hostPort"`
	ContainerPort int    `json:"containerPort"`
	Protocol      string `json:"protocol"`
	HostIP        string `json:"hostIP"`
	// Range is the number of consecutive ports that are mapped one to one, as in netavark; 0 means one. It is not
	// part of the convention.
	Range int `json:"range,omitempty"`
}

// publishedPorts converts the mappings, and drops duplicates. It returns an error if a mapping is invalid, or if two
// mappings lead one port of the host to different ports of the pod.
func publishedPorts(mappings []PortMapping) ([]nft.Port, error) {
	var list []nft.Port
	read := map[nft.Port]bool{}
	byPort := map[uint16][]nft.Port{} // the single ports of all mappings, by host port
	for i, m := range mappings {
		p, err := m.port()
		if err != nil {
			return nil, newError(codeInvalidConfig, "runtimeConfig.portMappings[%d]: %v", i, err)
		}

		if read[p] {
			continue
		}

		read[p], list = true, append(list, p)
		one := p
		one.Count = 0
		for range max(p.Count, 1) {
			for _, other := range byPort[one.HostPort] {
				if overlap(one, other) {
					return nil, newError(codeInvalidConfig,
						"runtimeConfig.portMappings[%d]: port %s is mapped to port %d of the pod, and %s to %d: "+
							"publish a port of the host once", i, endpoint.PortText(
							one), one.PodPort, endpoint.PortText(other), other.PodPort)
				}
			}

			byPort[one.HostPort] = append(byPort[one.HostPort], one)
			one.HostPort, one.PodPort = one.HostPort+1, one.PodPort+1
		}
	}

	return list, nil
}

// overlap reports whether two mappings would lead one port of the host to different ports of the pod.
func overlap(a, b nft.Port) bool {
	if a.Protocol != b.Protocol || a.HostPort != b.HostPort || a.PodPort == b.PodPort {
		return false
	}
	if !a.HostAddr.IsValid() || !b.HostAddr.IsValid() {
		return true
	}
	return a.HostAddr.Is4() == b.HostAddr.Is4() &&
		(a.HostAddr == b.HostAddr || a.HostAddr.IsUnspecified() || b.HostAddr.IsUnspecified())
}

// port converts the mapping, and returns an error if it is not valid.
func (m *PortMapping) port() (nft.Port, error) {
	protocol := cmp.Or(strings.ToLower(m.Protocol), "tcp")
	p := nft.Port{HostPort: uint16(m.HostPort), PodPort: uint16(m.ContainerPort), Count: uint16(m.Range)}
	switch {
	case p.Protocol.UnmarshalText([]byte(protocol)) != nil:
		return p, fmt.Errorf(`protocol %q is not known: use "tcp", "udp" or "sctp"`, m.Protocol)
	case m.HostPort < 1 || m.HostPort > 65535:
		return p, fmt.Errorf("hostPort %d is not within 1 and 65535", m.HostPort)
	case m.ContainerPort < 1 || m.ContainerPort > 65535:
		return p, fmt.Errorf("containerPort %d is not within 1 and 65535", m.ContainerPort)
	case m.Range < 0 || max(m.HostPort, m.ContainerPort)+m.Range > 1<<16:
		return p, fmt.Errorf("range %d: so many ports from %d on do not end within 65535", m.Range,
			max(m.HostPort, m.ContainerPort))
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
		return p, errors.New("hostIP ::1: the kernel forwards nothing from there to a pod: use 127.0.0.1")
	}

	p.HostAddr = ip
	return p, nil
}
