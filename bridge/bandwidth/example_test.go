package bandwidth_test

import (
	"context"
	"fmt"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/netns"
)

// A pod behind a port gets 10 Mbit/s, and may send 5.
func Example() {
	if err := run(context.Background()); err != nil {
		fmt.Println(err)
	}
	// Output:
	// changed: true
	// differences: []
	// left: 0
}

func run(ctx context.Context) error {
	// Two namespaces of the example's own stand for the node and for the pod.
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
	links, err := bridge.Dial(node)
	if err != nil {
		return err
	}
	defer links.Close()
	if _, err := links.Ensure(ctx, bridge.Bridge{Name: "pods0", Alias: "mycni", MTU: 1500}); err != nil {
		return err
	}
	port := bridge.HostName("example", "container-1", "eth0")
	if _, err := links.Attach(ctx, pod, bridge.Port{Bridge: "pods0", Name: port, Peer: "eth0"}); err != nil {
		return err
	}

	conn := bandwidth.On(links.Socket()) // links is a bridge.Conn
	ifb := bandwidth.IFBName(port)
	target := bandwidth.Target{Port: port, IFB: ifb, Owner: "example:", Alias: "example:container-1"}
	ingress, egress := bandwidth.Limit{Rate: 10e6}, bandwidth.Limit{Rate: 5e6} // bits per second
	limits := bandwidth.Shape{Ingress: ingress, Egress: egress}
	changed, err := conn.Ensure(ctx, target, limits)
	if err != nil {
		return err
	}
	fmt.Println("changed:", changed)
	differences, err := conn.Check(ctx, target, limits)
	if err != nil {
		return err
	}
	fmt.Println("differences:", differences)
	err = conn.Remove(ctx, target)
	if err != nil {
		return err
	}
	left, err := conn.IFBs(ctx)
	fmt.Println("left:", len(left))
	return err
}
