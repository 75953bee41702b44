package cni

import (
	"cmp"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// LANConf holds the fields that connect a network's pods to the host's LAN through a NIC of the host, the uplink.
type LANConf struct {
	Uplink       string `json:"uplink"`
	DefaultRoute string `json:"defaultRoute"`
	LANGuard     *bool  `json:"lanGuard"`
	IPv6         string `json:"ipv6"`
}

const ipv6SLAAC, ipv6DHCP = "slaac", "dhcp"

// lanProblems adds a problem for each fault in the fields of LANConf, and for each other field that contradicts them or
// mode "lan".
func (c *NetConf) lanProblems(p *problems) {
	lan := c.Mode == modeLAN
	p.add(lan && c.Uplink == "", `mode "lan" needs an uplink: the NIC by which this node is on the LAN, such as "eth0"`)
	p.add(c.Uplink != "" && !lan && c.Mode != modeL2,
		`uplink %q: in mode "gateway" pods are on a network of their own: use mode "lan", or "l2"`, c.Uplink)
	p.add(c.Uplink != "" && !ident.IsLinkName(c.Uplink),
		"uplink %q cannot name a link: it takes 1 to 15 bytes without '/', ':', '%%' and space", c.Uplink)
	p.add(c.Uplink != "" && c.Uplink == c.settings().Bridge,
		"uplink and bridge are both %q: the uplink is the NIC by which the bridge is on the LAN", c.Uplink)
	p.add(c.DefaultRoute != "" && c.DefaultRoute != string(network.ExitHost) &&
		c.DefaultRoute != string(network.ExitRouter),
		`defaultRoute %q is not known: use "host" or "router"`, c.DefaultRoute)
	p.add(c.IPv6 != "" && c.IPv6 != ipv6SLAAC && c.IPv6 != ipv6DHCP,
		`ipv6 %q is not known: use "slaac" or "dhcp", or leave it out`, c.IPv6)
	p.add(lan && (orDefault(c.IsGateway, false) || orDefault(c.IPMasq, false)),
		`mode "lan" has neither isGateway nor ipMasq: the LAN has its own router, and pods are on it with addresses `+
			`of their own`)
	p.add(lan && c.PromiscMode, `mode "lan" and promiscMode exclude each other: the host would get every frame of `+
		`the LAN twice`)
	const ofLAN, ofUplink = `%s is a field of mode "lan"`, "%s has no effect without an uplink"
	p.add(!lan && c.DefaultRoute != "", ofLAN, "defaultRoute")
	p.add(!lan && c.IPAM.DetectConflicts != nil && c.IPAM.Type != typeDHCP,
		`ipam.detectConflicts is a field of mode "lan", and of the ipam "dhcp"`)
	p.add(!lan && c.Mode != modeL2 && c.IPv6 != "",
		`ipv6 is a field of modes "lan" and "l2": elsewhere pods get IPv6 by the ipam`)
	p.add(c.Mode == modeL2 && c.IPv6 != "" && c.DisableContainerInterface,
		"ipv6 and disableContainerInterface exclude each other")
	p.add(c.Uplink == "" && orDefault(c.LANGuard, false), ofUplink, "lanGuard")
	p.add(lan && c.DisableContainerInterface,
		`mode "lan" and disableContainerInterface exclude each other: use mode "l2"`)
}

// lan sets the fields of s that depend on LANConf, and the guard against false source addresses.
func (c *NetConf) lan(s *network.Network) {
	s.Uplink = c.Uplink
	s.SLAAC, s.DHCPv6 = c.IPv6 != "", c.IPv6 == ipv6DHCP

	// The guard drops packets that pods send from a false source. If several fields select one, the first of them in
	// this order counts, since its guard checks most.
	switch {
	case orDefault(c.LANGuard, c.Mode == modeLAN):
		s.Guard = nft.GuardUntrusted
	case c.Guard:
		s.Guard = nft.GuardAddresses
	case c.MACSpoofCheck:
		s.Guard = nft.GuardMAC
	}

	if c.Mode != modeLAN {
		return
	}

	s.Exit = cmp.Or(network.Exit(c.DefaultRoute), network.ExitRouter)
	s.DetectConflicts = c.IPAM.DetectConflicts
	s.NoDefaultRoute = !orDefault(c.IsDefaultGateway, true)

	// In mode lan the host has no gateway address. With defaultRoute "router", the next hop of pods' default route is
	// the gateway that the IPAM or the DHCP server names.
	s.Gateway, s.DefaultGateway = false, s.Exit == network.ExitRouter && !s.NoDefaultRoute
	if s.NFCall == nil && s.Exit == network.ExitHost {
		s.NFCall = new(true) // without it, conntrack would see only one direction of traffic through the host
	}
}
