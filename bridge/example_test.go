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

// A program that knows nothing of CNI puts a pod on a bridge.
func Example() {
	if err := run(context.Background()); err != nil {
		fmt.Println(err)
	}
	// Output:
	// changed: true
	// eth0 of the pod has index 2 and an MTU of 1500
	// as it should be: true
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

	conn, err := bridge.Dial(node) // nil is the calling thread's namespace
	if err != nil {
		return err
	}
	defer conn.Close()

	// The bridge, and the pods' gateway on it.
	changed, err := conn.Ensure(ctx, bridge.Bridge{Name: "pods0", Alias: "mycni"})
	if err != nil {
		return err
	}
	fmt.Println("changed:", changed)
	br, err := conn.Link(ctx, "pods0")
	if err != nil {
		return err
	}
	gateway := netip.MustParsePrefix("10.20.0.1/24")
	if _, err := conn.Addresses().Ensure(ctx, addr.Address{Prefix: gateway, Link: br.Index}); err != nil {
		return err
	}

	addresses := []netip.Prefix{netip.MustParsePrefix("10.20.0.7/24")}
	routes := []route.Route{{Gateway: gateway.Addr()}} // the default route
	port := bridge.Port{
		Bridge: "pods0", Name: bridge.HostName("example", "container-1", "eth0"), Peer: "eth0",
		Alias: "example:container-1", Addresses: addresses, Routes: routes,
	}
	attached, err := conn.Attach(ctx, pod, port) // deletes its veth pair if it fails
	if err != nil {
		return err
	}
	fmt.Printf("%s of the pod has index %d and an MTU of %d\n", port.Peer, attached.PeerIndex, attached.MTU)

	differences, err := conn.Check(ctx, port)
	fmt.Println("as it should be:", len(differences) == 0 && err == nil)

	err = conn.Detach(ctx, port.Name, port.Alias) // no error if nothing exists
	return err
}
