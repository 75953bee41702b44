// Command plugin is a CNI plugin of one's own: host-local, masquerade, host ports, limits, CHECK
// and garbage collection.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"

	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

type config struct {
	Name, StateDir string
	Subnet         netip.Prefix
	RuntimeConfig  struct {
		PortMappings []struct{ HostPort, ContainerPort uint16 }
		Bandwidth    struct{ IngressRate, EgressRate uint64 }
	}
	Valid []struct{ ContainerID, IfName string } `json:"cni.dev/valid-attachments"`
}

func main() {
	if err := run(context.Background(), os.Getenv("CNI_COMMAND")); err != nil {
		fmt.Printf("{\"cniVersion\": \"1.1.0\", \"code\": 999, \"msg\": %q}\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, verb string) error {
	if verb == "VERSION" {
		_, err := fmt.Println(`{"cniVersion": "1.1.0", "supportedVersions": ["1.1.0"]}`)
		return err
	}
	var c config
	if err := json.NewDecoder(os.Stdin).Decode(&c); err != nil {
		return err
	}
	ranges := []ipam.RangeSet{{Ranges: []ipam.Range{{Subnet: c.Subnet}}}}
	pool, err := ipam.NewHostLocal(&ipam.Config{Network: c.Name, Dir: c.StateDir + "/ipam", Ranges: ranges})
	if err != nil {
		return err
	}
	node, err := network.Open(ctx, &network.Config{StateDir: c.StateDir,
		Allocators: func(string, *network.Origin) (ipam.Allocator, error) { return pool, nil }})
	if err != nil {
		return err
	}
	pods := network.Network{
		Name: c.Name, Bridge: "embed0", Allocator: pool, Origin: network.Origin{Type: "host-local"},
		Gateway: true, DefaultGateway: true, Masquerade: true, Hairpin: true, Routed: true,
	}
	pod := network.Pod{ContainerID: os.Getenv("CNI_CONTAINERID"), IfName: os.Getenv("CNI_IFNAME"), Path: os.Getenv("CNI_NETNS")}
	for _, p := range c.RuntimeConfig.PortMappings {
		pod.Ports = append(pod.Ports, network.HostPort{Protocol: nft.TCP, HostPort: p.HostPort, PodPort: p.ContainerPort})
	}
	pod.Limits.Ingress.Rate, pod.Limits.Egress.Rate = c.RuntimeConfig.Bandwidth.IngressRate, c.RuntimeConfig.Bandwidth.EgressRate
	switch verb {
	case "DEL":
		return node.Del(ctx, network.Key{Network: c.Name, ContainerID: pod.ContainerID, IfName: pod.IfName}, nil)
	case "GC":
		keep := []network.Key{}
		for _, v := range c.Valid {
			keep = append(keep, network.Key{Network: c.Name, ContainerID: v.ContainerID, IfName: v.IfName})
		}
		if c.Valid != nil { // an empty list is one
			_, err = node.Collect(ctx, c.Name, keep, nil)
		}
		return err
	case "STATUS":
		return node.Ready(ctx, &pods, nil)
	case "ADD", "CHECK":
	default:
		return fmt.Errorf("CNI_COMMAND is %q", verb)
	}
	if pod.NetNS, err = netns.Open(pod.Path); err != nil {
		return err
	}
	defer pod.NetNS.Close()
	if verb == "CHECK" {
		differences, err := node.Check(ctx, &pods, &pod)
		if err == nil && len(differences) > 0 {
			err = fmt.Errorf("%v", differences)
		}
		return err
	}
	made, err := node.Add(ctx, &pods, &pod)
	if err != nil {
		return err
	}
	_, err = fmt.Printf(`{"cniVersion": "1.1.0", "interfaces": [{"name": %q, "sandbox": %q}], "ips": [{"interface": 0, "address": %q, "gateway": %q}]}`+"\n",
		made.IfName, pod.Path, made.Addresses[0].Prefix, made.Addresses[0].Gateway)
	return err
}
