package route_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// A new namespace gets a route.
func Example() {
	ctx := context.Background()
	ns, err := netns.New()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer ns.Close()
	conn, err := route.Dial(ns)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer conn.Close()

	documentation := netip.MustParsePrefix("192.0.2.0/24")
	for range 2 {
		changed, err := conn.Ensure(ctx, route.Route{Dst: documentation, Type: unix.RTN_UNREACHABLE})
		fmt.Println(changed, err)
	}
	err = conn.Add(ctx, route.Route{Dst: documentation, Type: unix.RTN_BLACKHOLE})
	fmt.Println(err, errors.Is(err, fs.ErrExist))

	list, err := conn.List(ctx, route.Filter{Family: unix.AF_INET, Protocol: route.ProtocolTombolo})
	fmt.Println(list, err)
	// Output:
	// true <nil>
	// false <nil>
	// add route blackhole 192.0.2.0/24: file exists true
	// [unreachable 192.0.2.0/24] <nil>
}

// The kernel is asked whether an address is one of the host's own.
func ExampleConn_Get() {
	ctx := context.Background()
	ns, err := netns.New()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer ns.Close()
	addresses, err := addr.Dial(ns)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer addresses.Close()
	routes, err := route.Dial(ns)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer routes.Close()

	own := netip.MustParsePrefix("192.0.2.1/32")
	if err := addresses.Add(ctx, addr.Address{Prefix: own, Link: 1}); err != nil {
		fmt.Println(err)
	}
	r, err := routes.Get(ctx, own.Addr())
	fmt.Println(r.Type, err)
	_, err = routes.Get(ctx, own.Addr().Next())
	fmt.Println(err)
	// Output:
	// local <nil>
	// look up route to 192.0.2.2: network is unreachable
}
