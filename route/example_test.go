package route_test

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// A new namespace gets a default route, and is asked for its way elsewhere.
func Example() {
	if err := run(context.Background()); err != nil {
		fmt.Println(err)
	}
	// Output:
	// true by 10.1.0.1
	// look up route to 192.0.2.1: network is unreachable
}

func run(ctx context.Context) error {
	ns, err := netns.New()
	if err != nil {
		return err
	}
	defer ns.Close()
	index, err := link(ctx, ns)
	if err != nil {
		return err
	}

	conn, err := route.Dial(ns) // nil is the calling thread's namespace
	if err != nil {
		return err
	}
	defer conn.Close()
	r := route.Route{Gateway: netip.MustParseAddr("10.1.0.1"), Link: index} // without Dst, the default route
	changed, err := conn.Ensure(ctx, r)
	if err != nil {
		return err
	}
	way, err := conn.Get(ctx, netip.MustParseAddr("192.0.2.1")) // the route of a packet to this address
	if err != nil {
		return err
	}
	fmt.Println(changed, "by", way.Gateway)
	err = conn.Remove(ctx, r)
	if err != nil {
		return err
	}
	_, err = conn.Get(ctx, netip.MustParseAddr("192.0.2.1"))
	return err
}

// link makes one with an address, and gives its index.
func link(ctx context.Context, ns *netns.NS) (int, error) {
	links, err := bridge.Dial(ns)
	if err != nil {
		return 0, err
	}
	defer links.Close()
	if _, err := links.Ensure(ctx, bridge.Bridge{Name: "br0", Alias: "mycni"}); err != nil {
		return 0, err
	}
	l, err := links.Link(ctx, "br0")
	if err != nil {
		return 0, err
	}
	return l.Index, links.Addresses().Add(ctx, addr.Address{Prefix: netip.MustParsePrefix("10.1.0.2/24"), Link: l.Index})
}
