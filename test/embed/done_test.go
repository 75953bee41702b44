package main

import (
	"context"
	"errors"
	"net/netip"
	"testing"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/bridge/share"
	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/hostport"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/nft/foreign"
	"github.com/tombolo-cni/tombolo/route"
)

// A call whose context is done asks the kernel nothing and says so.
func TestNothingIsAskedOnceTheContextIsDone(t *testing.T) {
	host, pod, _ := hostAndPod(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	links, err := bridge.Dial(host)
	if err != nil {
		t.Fatal(err)
	}
	defer links.Close()
	firewall, err := nft.Dial(&nft.Config{NetNS: host})
	if err != nil {
		t.Fatal(err)
	}
	defer firewall.Close()
	flows, err := hostport.Dial(host, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer flows.Close()
	a := addr.Address{Prefix: prefix("10.0.0.1/32"), Link: 1}
	a6 := addr.Address{Prefix: prefix("fd00::1/128"), Link: 1}
	r := route.Route{Dst: prefix("192.0.2.0/24"), Link: 1}
	port := bridge.Port{Name: "veth0", Peer: "eth0", Bridge: "br0", BridgeIndex: 1}
	ep := nft.Endpoint{Owner: "a", Network: "n", Bridge: "br0", Addrs: []netip.Addr{a.Prefix.Addr()}}
	addrs, routes, second := links.Addresses(), links.Routes(), func(_ any, err error) error { return err }
	for name, err := range map[string]error{
		"addr.Add": addrs.Add(ctx, a), "addr.Replace": addrs.Replace(ctx, a), "addr.Remove": addrs.Remove(ctx, a),
		"addr.Ensure": second(addrs.Ensure(ctx, a)), "addr.Has": second(addrs.Has(ctx, a)), "addr.Has, IPv6": second(addrs.Has(ctx, a6)),
		"addr.List": second(addrs.List(ctx, addr.Filter{})),
		"route.Add": routes.Add(ctx, r), "route.Replace": routes.Replace(ctx, r), "route.Remove": routes.Remove(ctx, r),
		"route.Ensure": second(routes.Ensure(ctx, r)), "route.List": second(routes.List(ctx, route.Filter{})),
		"route.Walk": routes.Walk(ctx, route.Filter{}, func(route.Route) {}), "route.Get": second(routes.Get(ctx, a.Prefix.Addr())),
		"bridge.Ensure": second(links.Ensure(ctx, bridge.Bridge{Name: "br0"})), "bridge.Attach": second(links.Attach(ctx, pod, port)),
		"bridge.Enslave": links.Enslave(ctx, port), "bridge.Check": second(links.Check(ctx, port)), "bridge.Remove": links.Remove(ctx, "br0"),
		"bridge.Detach": links.Detach(ctx, "veth0", "x"), "bridge.Link": second(links.Link(ctx, "lo")), "bridge.Veths": second(links.Veths(ctx)),
		"bridge.Ports": second(links.Ports(ctx, 1)), "bridge.Shut": links.Shut(ctx, "lo", ""), "bridge.SetAlias": links.SetAlias(ctx, "lo", "", "x"),
		"bridge.SetPortMTU": links.SetPortMTU(ctx, "lo", 1400),
		"vlan.Ensure":       second(links.VLANs().Ensure(ctx, 1, vlan.Membership{ID: 7})), "vlan.Join": second(links.VLANs().Join(ctx, 1, vlan.Range{First: 7, Last: 7})),
		"vlan.EnsureLink": second(links.VLANs().EnsureLink(ctx, vlan.Link{Name: "v7", Bridge: 1, ID: 7})),
		"bandwidth":       second(bandwidth.On(links.Socket()).Ensure(ctx, bandwidth.Target{Port: "lo", IFB: "i", MTU: 1500}, bandwidth.Shape{Egress: bandwidth.Limit{Rate: 1e6}})),
		"share.Ensure":    second(share.On(links.Socket()).Ensure(ctx, share.Share{NIC: "lo", Bridge: "br0"})),
		"nft.Ensure":      second(firewall.Ensure(ctx, nft.Network{Name: "n"})), "nft.Check": second(firewall.Check(ctx, nft.Network{Name: "n"})),
		"nft.Ready": second(firewall.Ready(ctx, nft.Network{Name: "n"})), "nft.Add": firewall.Add(ctx, ep), "nft.Replace": firewall.Replace(ctx, ep),
		"nft.Move": firewall.Move(ctx, ep, ep), "nft.Remove": firewall.Remove(ctx, ep), "nft.Endpoints": second(firewall.Endpoints(ctx, "")),
		"nft.RemoveNetwork": firewall.RemoveNetwork(ctx, "n"),
		"foreign.Check":     second(foreign.On(firewall.Socket(), nil).Check(ctx)), "foreign.Ensure": second(foreign.On(firewall.Socket(), nil).Ensure(ctx)),
		"foreign.Obstacles": second(foreign.On(firewall.Socket(), nil).Obstacles(ctx, foreign.Path{Bridge: "br0"})),
		"hostport.Flush":    flows.Flush(ctx, ep.Addrs, nft.Port{Protocol: nft.UDP, HostPort: 53, PodPort: 53}),
	} {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
