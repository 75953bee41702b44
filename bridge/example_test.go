package bridge_test

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// A program of its own, which knows nothing of CNI, ties a pod to a bridge.
func Example() {
	if err := run(context.Background()); err != nil {
		fmt.Println(err)
	}
	// Output:
	// eth0 of the pod has index 2 and an MTU of 1500
	// as it should be: true
	// gone: true
}

func run(ctx context.Context) error {
	// Two namespaces of the example's own stand for the node and for the pod. A
	// program for a real node would leave NetNS out, and netns.Open the pod's.
	node, err := netns.New()
	if err != nil {
		return err
	}
	defer node.Close()
	pod, err := netns.New()
	if err != nil {
		return err
	}
	defer pod.Close()

	conn, err := bridge.Dial(node)
	if err != nil {
		return err
	}
	defer conn.Close()

	// The bridge, and the pods' gateway on it.
	if _, err := conn.Ensure(ctx, bridge.Bridge{Name: "pods0", MTU: 1500}); err != nil {
		return err
	}
	br, err := conn.Link(ctx, "pods0")
	if err != nil {
		return err
	}
	gateway := netip.MustParsePrefix("10.20.0.1/24")
	if _, err := conn.Addresses().Ensure(ctx, addr.Address{Prefix: gateway, Link: br.Index}); err != nil {
		return err
	}

	port := bridge.Port{
		Bridge:    "pods0",
		Name:      bridge.HostName("example", "container-1", "eth0"),
		Peer:      "eth0",
		Alias:     "example:container-1",
		Hairpin:   true,
		Addresses: []netip.Prefix{netip.MustParsePrefix("10.20.0.7/24")},
		Routes:    []route.Route{{Gateway: gateway.Addr()}}, // the default route
	}
	a, err := conn.Attach(ctx, pod, port)
	if err != nil {
		return err
	}
	fmt.Printf("%s of the pod has index %d and an MTU of %d\n", a.Peer, a.PeerIndex, a.MTU)

	differences, err := conn.Check(ctx, pod, port)
	fmt.Println("as it should be:", len(differences) == 0 && err == nil)

	fmt.Println("gone:", conn.Detach(ctx, port.Name, port.Alias) == nil)
	return nil
}
