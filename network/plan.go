package network

import (
	"cmp"
	"context"
	"net"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/nft"
)

// derive makes the plan from the pod's addresses, routes and DNS.
func (a *addCall) derive(context.Context) error {
	a.addHostRoutes()
	g := a.assigned
	if err := a.checkAssigned(g); err != nil {
		return err
	}

	nw, rec := a.nw, a.rec
	a.required = newRequirement(a.nw, a.hash, a.s.Mark)
	rec.Addresses, rec.Masquerade, rec.Guard = nil, nw.Masquerade, nw.Guard
	a.limitEgress()
	rec.PublishFrom = slices.DeleteFunc([]string{nw.PublishFrom, a.pod.PublishFrom},
		func(list string) bool { return list == "" })
	rec.Unadmitted = nw.Unadmitted
	rec.DefaultRoute, rec.SLAAC = string(nw.Exit), nw.SLAAC
	rec.Hairpin, rec.Isolated = nw.Hairpin, nw.Isolated
	if a.site != nil {
		rec.NIC = a.site.sharedNIC()
	}

	for _, address := range g.addresses {
		record := &a.required.Record
		record.Subnets = appendNew(record.Subnets, address.Prefix.Masked())
		if address.Gateway.IsUnspecified() {
			address.Gateway = netip.Addr{} // an allocator returns 0.0.0.0 or :: if there is no gateway
		}
		if nw.Gateway && address.Gateway.IsValid() {
			record.Gateways = appendNew(record.Gateways, netip.PrefixFrom(address.Gateway, address.Prefix.Bits()))
		}
		rec.Addresses = append(rec.Addresses, address)
	}

	a.required.Pod = rec
	mac := a.pod.MAC
	if mac == nil {
		mac = ident.MACOf(endpoint.Addresses(rec))
	}

	switch {
	case a.link != nil:
		mac = a.link.PeerMAC
	case mac == nil && (rec.Guard != "" || nw.Uplink != ""):
		mac = ident.RandomMAC() // the rules need a MAC before the kernel would choose one
	}

	rec.MAC = state.MAC(mac)
	port := portOf(rec)
	port.DAD, port.Group, port.NoWait, port.SameNetNS = nw.DAD, nft.PodGroup, a.leasing == nil, a.pod.SameNetNS
	if nw.Gateway && nw.Uplink == "" {
		port.Group = nft.GatewayGroup
	}

	// A pod that leases its address waits until its port forwards (NoWait above), or its first frame would be lost.
	//
	// Announce the MAC only if neighbours may remember another MAC for the address. By default the MAC is derived
	// from the address, so it stays the same. It may differ if the pod requests a MAC, or if another plugin's pod had
	// the address before.
	port.Announce = a.pod.MAC != nil || rec.DataDir != ""

	// If the uplink has no checksum offloading, the kernel fills in checksums only after the guard. So make the pod
	// fill them in.
	port.NoTxOffload = nw.Guard != "" && nw.Guard != nft.GuardMAC && nw.Uplink != ""
	port.LeaveIPv6 = nw.LeaveIPv6 && len(g.addresses) == 0 && a.leasing == nil
	port.Addresses = prefixesOf(g.addresses)
	port.Routes = a.metrics.apply(routesFor(g.addresses, withDefaults(nw.DefaultGateway, g.addresses, g.routes)))
	if a.leasing == nil {
		rec.Routes = recordedRoutes(rec, port.Routes)
	}

	a.port = port
	return nil
}

// limitEgress sets the pod's egress policy in the plan, and the name servers that the policies permit.
func (a *addCall) limitEgress() {
	var resolvers []netip.Addr
	if from, ok := a.nw.Allocator.(interface{ Resolvers() []netip.Addr }); ok {
		resolvers = from.Resolvers()
	}

	if endpoint.WithResolvers(a.nw.Egress, resolvers) != a.nw.Egress {
		a.required.Record.Resolvers = resolvers
	}

	if a.pod.Egress == "" {
		return
	}

	a.required.PodEgress, a.rec.Egress = true, endpoint.WithResolvers(a.pod.Egress, resolvers)
	if a.rec.Guard == "" || a.rec.Guard == nft.GuardMAC {
		a.rec.Guard = nft.GuardAddresses // otherwise the pod could send from other addresses
	}
}

// newRequirement returns the network as the configuration requests it, without the needs of a pod.
func newRequirement(nw *Network, hash string, mark uint32) *requirement {
	w := &requirement{
		Record: state.Network{
			Name: nw.Name, Bridge: nw.Bridge, MTU: nw.MTU,
			Masquerade: nw.Masquerade, NonMasquerade: nw.NonMasquerade,
			Policy: nw.Policy, Internal: nw.Internal, Egress: nw.Egress, Guard: nw.Guard != "", Mark: mark,
			NFCall: nw.NFCall, Promiscuous: nw.Promiscuous,
			Uplink: nw.Uplink, DefaultRoute: string(nw.Exit), SLAAC: nw.SLAAC, VLAN: nw.VLAN,
		},
		DefaultMTU: nw.DefaultMTU, Gateway: nw.Gateway, Routed: nw.Routed, ForceAddress: nw.ForceAddress, Owner: hash,
	}
	if sets := ipam.RangeSetsOf(nw.Allocator); len(sets) > 0 {
		w.Record.Pools, w.Record.PoolDir = sets, nw.Origin.Dir
	}
	return w
}

// portOnBridge returns the requested port, with the properties that depend on the network as it was built.
func (a *addCall) portOnBridge() bridge.Port {
	port, b := a.port, a.site
	port.BridgeIndex, port.MTU = b.bridge.Index, b.rec.MTU
	port.Neighbours = neighbours(a.rec, net.HardwareAddr(b.rec.HostMAC))
	if b.sharedNIC() != "" {
		port.Hairpin = false
		port.MTU = cmp.Or(a.required.Record.MTU, b.uplink.nic.MTU) // may differ from the recorded MTU
	}
	keepTable(&port, a.rec.Guard != "", b.bridge)
	return port
}

// checkAssigned refuses addresses and routes that the pod could not get.
func (a *addCall) checkAssigned(g assignment) error {
	if len(g.addresses) == 0 && a.leasing != nil {
		return nil // the addresses come later
	}

	if len(g.addresses) == 0 && a.nw.Origin.Type != "" {
		return failf(ErrInvalid, "ipam %q gave no address", a.nw.Origin.Type)
	}

	for _, address := range g.addresses {
		if a.nw.Gateway && !address.Gateway.IsValid() {
			return failf(ErrNoGateway,
				"ipam %q gave %s without a gateway, and the bridge is to be one: name the gateway in the ipam, or "+
					"set isGateway to false", a.nw.Origin.Type, address.Prefix)
		}
	}

	if slices.ContainsFunc(prefixesOf(g.addresses), isIPv6) {
		return refuseUnreachable(a.pod.Ports, g.addresses)
	}

	return cmp.Or(refuseIPv6(a.nw.Name, false, nil, g.routes...), refuseUnreachable(a.pod.Ports, g.addresses))
}
