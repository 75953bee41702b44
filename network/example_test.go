package network_test

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

// A pod gets an interface with an address, a port of the host, and a way out, and loses all of
// it again. It needs root, and runs in namespaces of its own.
func Example() {
	host, err := netns.New()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer host.Close()
	pod, err := netns.New()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer pod.Close()
	if err := host.Do(func() error { return attach(context.Background(), pod) }); err != nil {
		fmt.Println(err)
	}
	// Output:
	// c1 has 10.22.0.2/24 via 10.22.0.1 on cbr0
	// 0 differences
	// 0 attachments
}

func attach(ctx context.Context, ns *netns.NS) error {
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
}
