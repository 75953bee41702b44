// Command pods gives network namespaces a network: addresses, a way out, a port of the host, and a guard.
package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"

	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

func main() {
	if len(os.Args) != 5 {
		fmt.Fprintln(os.Stderr, "usage: pods add|check|del STATE POD NAMESPACE")
	} else if err := run(context.Background(), os.Args[1], os.Args[2], os.Args[3], os.Args[4]); err != nil {
		fmt.Fprintln(os.Stderr, "pods:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, verb, state, id, path string) error {
	node, err := network.Open(ctx, &network.Config{StateDir: state})
	if err != nil {
		return err
	}
	ranges := []ipam.RangeSet{{Ranges: []ipam.Range{{Subnet: netip.MustParsePrefix("10.22.0.0/24")}}}}
	pool, err := ipam.NewHostLocal(&ipam.Config{Network: "pods", Dir: state + "/ipam", Ranges: ranges})
	if err != nil {
		return err
	}
	pods := network.Network{
		Name: "pods", Bridge: "pods0", Allocator: pool, Origin: network.Origin{Type: "host-local"},
		Gateway: true, DefaultGateway: true, Masquerade: true, Routed: true, Hairpin: true, Guard: nft.GuardAddresses,
	}
	pod := network.Pod{ContainerID: id, IfName: "eth0", Path: path}
	pod.Ports = []nft.Port{{Protocol: nft.TCP, HostPort: 8080, PodPort: 80}}
	if verb == "del" { // the namespace may be gone
		return node.Del(ctx, network.Key{Network: pods.Name, ContainerID: id, IfName: pod.IfName}, nil)
	}
	if pod.NetNS, err = netns.Open(path); err != nil {
		return err
	}
	defer pod.NetNS.Close()
	if verb == "check" {
		differences, err := node.Check(ctx, &pods, &pod)
		for _, d := range differences {
			fmt.Println(d)
		}
		return err
	}
	made, err := node.Add(ctx, &pods, &pod)
	if err == nil {
		fmt.Println(made.Addresses[0])
	}
	return err
}
