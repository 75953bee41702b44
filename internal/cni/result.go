package cni

import (
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/network"
)

// result is what ADD prints: the interfaces in the order bridge, port, pod, after
// those that a plugin before this one made.
func (c *call) result(a *asked, from ipamconf.Allocator, made *network.Attachment) *current.Result {
	r := &current.Result{CNIVersion: current.ImplementedSpecVersion}
	if a.prev != nil {
		r.Interfaces, r.IPs, r.Routes, r.DNS = a.prev.Interfaces, a.prev.IPs, a.prev.Routes, a.prev.DNS
	}
	r.Interfaces = append(r.Interfaces,
		&current.Interface{Name: made.Bridge, Mac: made.BridgeMAC.String(), Mtu: made.BridgeMTU},
		&current.Interface{Name: made.Port, Mac: made.PortMAC.String(), Mtu: made.MTU},
		&current.Interface{Name: made.IfName, Mac: made.MAC.String(), Mtu: made.PodMTU, Sandbox: c.netns},
	)
	podInterface := len(r.Interfaces) - 1
	if made.IFB != "" {
		r.Interfaces = append(r.Interfaces, &current.Interface{Name: made.IFB, Mtu: made.MTU})
	}
	if made.HostVLAN != "" {
		r.Interfaces = append(r.Interfaces, &current.Interface{Name: made.HostVLAN, Mac: made.HostVLANMAC.String(), Mtu: made.BridgeMTU})
	}
	addresses := made.Addresses
	if from != nil {
		addresses = from.Ordered(addresses)
	}
	ipamconf.Give(r, addresses, made.Routes, &podInterface)
	switch leased := leasedDNS(from, made.DNS); {
	case !a.dns.IsEmpty():
		r.DNS = a.dns
	case !leased.IsEmpty():
		r.DNS = leased
	}
	return r
}

// leasedDNS is what the IPAM said, or a lease, and router advertisements.
func leasedDNS(from ipamconf.Allocator, heard network.DNS) types.DNS {
	dns := types.DNS{Domain: heard.Domain, Search: heard.Search}
	if from != nil {
		dns = from.DNS()
	}
	for _, server := range heard.Servers {
		dns.Nameservers = append(dns.Nameservers, server.String())
	}
	return dns
}
