package network_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// sandbox calls do on a node with a network and a pod that is not attached yet. It needs root, and runs in namespaces of
// its own.
func sandbox(do func(context.Context, *network.Node, network.Network, network.Pod) error) {
	err := func() error {
		host, err := netns.New()
		if err != nil {
			return err
		}
		defer host.Close()
		pod, err := netns.New()
		if err != nil {
			return err
		}
		defer pod.Close()
		return host.Do(func() error { return onNode(context.Background(), pod, do) })
	}()
	if err != nil {
		fmt.Println(err)
	}
}

func onNode(ctx context.Context, ns *netns.NS, do func(context.Context, *network.Node, network.Network, network.Pod) error) error {
	dir, err := os.MkdirTemp("", "state")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	ranges := []ipam.RangeSet{{Ranges: []ipam.Range{{Subnet: netip.MustParsePrefix("10.22.0.0/24")}}}}
	ports := []nft.Port{{Protocol: nft.TCP, HostPort: 8080, PodPort: 80}}
	path := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.FD())    // one with a name has a file
	node, err := network.Open(ctx, &network.Config{StateDir: dir}) // a nil Config means DefaultStateDir
	if err != nil {
		return err
	}
	pool, err := ipam.NewHostLocal(&ipam.Config{Network: "pods", Dir: dir + "/ipam", Ranges: ranges})
	if err != nil {
		return err
	}
	pods := network.Network{
		Name: "pods", Bridge: "cbr0", Gateway: true, DefaultGateway: true, Masquerade: true, Hairpin: true,
		Allocator: pool, Origin: network.Origin{Type: "host-local"}, // Del needs Origin to release the address
	}
	pod := network.Pod{ContainerID: "c1", IfName: "eth0", NetNS: ns, Path: path, Ports: ports}
	return do(ctx, node, pods, pod)
}

// A pod gets an interface with an address, a port of the host, and a way out, and loses all of it again.
func Example() {
	sandbox(func(ctx context.Context, node *network.Node, pods network.Network, pod network.Pod) error {
		made, err := node.Add(ctx, &pods, &pod)
		if err != nil {
			return err
		}
		fmt.Printf("%s has %s on %s\n", made.ContainerID, made.Addresses[0], made.Bridge)
		differences, err := node.Check(ctx, &pods, &pod)
		if err != nil {
			return err
		}
		fmt.Println(len(differences), "differences")
		err = node.Del(ctx, made.Key, nil) // needs neither the pod nor its network
		if err != nil {
			return err
		}
		left, err := node.Attachments(ctx, "pods")
		fmt.Println(len(left), "attachments")
		return err
	})
	// Output:
	// c1 has 10.22.0.2/24 via 10.22.0.1 on cbr0
	// 0 differences
	// 0 attachments
}

// A plugin further down a chain limits a pod that is attached, and publishes another port of it.
func ExampleNode_Change() {
	sandbox(func(ctx context.Context, node *network.Node, pods network.Network, pod network.Pod) error {
		made, err := node.Add(ctx, &pods, &pod)
		if err != nil {
			return err
		}
		change := node.Change(made.Key)
		limits := bandwidth.Shape{Ingress: bandwidth.Limit{Rate: 10e6, Burst: 1e6}} // bit/s and bits, to the pod
		if _, err := change.Limit(ctx, limits); err != nil {
			return err
		}
		ports := append(pod.Ports, nft.Port{Protocol: nft.UDP, HostPort: 53, PodPort: 53})
		if err := change.Publish(ctx, network.Publication{Ports: ports}); err != nil {
			return err
		}
		list, err := node.Attachments(ctx, "pods")
		for _, a := range list {
			fmt.Println(a.Ports, a.Limits.Ingress.Rate)
		}
		return err
	})
	// Output: [8080/tcp 53/udp] 10000000
}

// A runtime that was restarted lists the pods that it has. Collect deletes all others.
func ExampleNode_Collect() {
	sandbox(func(ctx context.Context, node *network.Node, pods network.Network, pod network.Pod) error {
		if _, err := node.Add(ctx, &pods, &pod); err != nil {
			return err
		}
		deleted, err := node.Collect(ctx, "pods", []network.Key{{Network: "pods", ContainerID: "c2", IfName: "eth0"}}, nil)
		fmt.Println(deleted)
		return err
	})
	// Output: [{pods c1 eth0}]
}

// Another program deletes a pod's part of the firewall. Inspect finds that, and Repair puts it back.
func ExampleNode_Repair() {
	sandbox(func(ctx context.Context, node *network.Node, pods network.Network, pod network.Pod) error {
		if _, err := node.Add(ctx, &pods, &pod); err != nil {
			return err
		}
		firewall, err := nft.Dial(nil)
		if err != nil {
			return err
		}
		defer firewall.Close()
		if err := firewall.RemoveOwners(ctx, nft.OwnerOf("pods", "c1", "eth0")); err != nil {
			return err
		}
		for _, repair := range []func(context.Context) error{func(context.Context) error { return nil }, node.Repair} {
			if err := repair(ctx); err != nil {
				return err
			}
			found, err := node.Inspect(ctx)
			if err != nil {
				return err
			}
			fmt.Println("differs:", found.Differs())
		}
		return nil
	})
	// Output:
	// differs: true
	// differs: false
}
