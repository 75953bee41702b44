package main

import (
	"encoding/json"
	"net/netip"
)

// netconf is what the plugins' configurations have in common, by the reference
// plugin's names, and what only one of them knows.
type netconf struct {
	CNIVersion string `json:"cniVersion"`
	Name       string `json:"name"`
	Type       string `json:"type"`
	Bridge     string `json:"bridge,omitempty"`
	MTU        int    `json:"mtu,omitempty"`
	IPAM       *ipam  `json:"ipam,omitempty"`

	Mode     string `json:"mode,omitempty"`
	StateDir string `json:"stateDir,omitempty"`
	LeaseDir string `json:"leaseDir,omitempty"`

	IsGateway        bool   `json:"isGateway,omitempty"`
	IsDefaultGateway bool   `json:"isDefaultGateway,omitempty"`
	HairpinMode      bool   `json:"hairpinMode,omitempty"`
	IPMasq           bool   `json:"ipMasq,omitempty"`
	IPMasqBackend    string `json:"ipMasqBackend,omitempty"`
	Backend          string `json:"backend,omitempty"`

	RuntimeConfig *runtimeConfig  `json:"runtimeConfig,omitempty"`
	PrevResult    json.RawMessage `json:"prevResult,omitempty"`
}

type ipam struct {
	Type    string       `json:"type"`
	Ranges  [][]ipamPool `json:"ranges,omitempty"`
	DataDir string       `json:"dataDir,omitempty"`

	DaemonSocketPath string `json:"daemonSocketPath,omitempty"`
	Transport        string `json:"transport,omitempty"`
	Keeper           string `json:"keeper,omitempty"`
	RapidCommit      bool   `json:"rapidCommit,omitempty"`
}

type ipamPool struct {
	Subnet netip.Prefix `json:"subnet"`
}

// config gives tombolo its defaults, which include masquerade and hairpin, and the
// reference the same features by its own fields. In the IPv4 scenario the reference
// is let off masquerade: it would exec nft or iptables, and that comparison is the
// dual scenario's.
func (n *node) config() netconf {
	if n.scenario.dhcp {
		return n.dhcpConfig()
	}
	c := netconf{
		CNIVersion: "1.0.0", Name: networkName, MTU: podMTU,
		IPAM: &ipam{Type: "host-local"},
	}
	for _, subnet := range subnets(n.scenario.dual) {
		c.IPAM.Ranges = append(c.IPAM.Ranges, []ipamPool{{subnet}})
	}
	if n.contender == tombolo {
		c.Type, c.Bridge, c.Mode, c.StateDir = tombolo, "tmb0", "gateway", n.state
		return c
	}
	c.Type, c.Bridge = "bridge", "cni0"
	c.IsGateway, c.IsDefaultGateway, c.HairpinMode = true, true, true
	c.IPAM.DataDir = n.state
	if n.scenario.masquerade {
		c.IPMasq, c.IPMasqBackend = true, n.backend()
	}
	return c
}

// backend is what the reference's plugins change the firewall by.
func (n *node) backend() string {
	if n.contender == chainIPTables {
		return "iptables"
	}
	return "nftables"
}

// chain puts the other plugins behind bridge. Of a scenario about ports only portmap
// takes part. The firewall plugin knows iptables alone.
func (n *node) chain(bridge netconf, pod int) []netconf {
	capabilities := n.capabilities(pod)
	next := func(kind, backend string, c *runtimeConfig) netconf {
		return netconf{CNIVersion: bridge.CNIVersion, Name: bridge.Name, Type: kind, Backend: backend, RuntimeConfig: c}
	}
	list := []netconf{bridge, next("portmap", n.backend(), &runtimeConfig{PortMappings: capabilities.PortMappings})}
	if n.scenario.full {
		list = append(list,
			next("firewall", "iptables", nil),
			next("bandwidth", "", &runtimeConfig{Bandwidth: capabilities.Bandwidth}))
	}
	return list
}

// capabilities are what a runtime passes for a pod of a number; nil for nothing.
func (n *node) capabilities(pod int) *runtimeConfig {
	switch {
	case n.scenario.full:
		return &runtimeConfig{
			PortMappings: []portMapping{{HostPort: firstPort + pod, ContainerPort: podPort, Protocol: "tcp"}},
			Bandwidth:    &bandwidth{limitRate, limitBurst, limitRate, limitBurst},
		}
	case n.scenario.ports > 0:
		return &runtimeConfig{PortMappings: n.portsOf(pod)}
	}
	return nil
}

// A measured pod's host port is the first and its number, or as many as there are.
const (
	firstPort = 20000
	podPort   = 80
)

// The limits of a pod, each way: in bits a second and bits.
const (
	limitRate  = 100_000_000
	limitBurst = 1_000_000
)

// runtimeConfig is what a runtime passes by capabilities.
type runtimeConfig struct {
	PortMappings []portMapping `json:"portMappings,omitempty"`
	Bandwidth    *bandwidth    `json:"bandwidth,omitempty"`
}

type portMapping struct {
	HostPort      int    `json:"hostPort"`
	ContainerPort int    `json:"containerPort"`
	Protocol      string `json:"protocol"`
}

type bandwidth struct {
	IngressRate  uint64 `json:"ingressRate"`
	IngressBurst uint64 `json:"ingressBurst"`
	EgressRate   uint64 `json:"egressRate"`
	EgressBurst  uint64 `json:"egressBurst"`
}
