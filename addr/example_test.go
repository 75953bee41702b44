package addr_test

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/netns"
)

// The loopback interface of a new namespace gets an address, and loses it.
func Example() {
	if err := run(context.Background()); err != nil {
		fmt.Println(err)
	}
	// Output:
	// 2001:db8::1/64 on link 1 true
	// [2001:db8::1/64 on link 1]
}

func run(ctx context.Context) error {
	ns, err := netns.New()
	if err != nil {
		return err
	}
	defer ns.Close()
	const index = 1 // of the loopback interface, in every namespace

	conn, err := addr.Dial(ns) // nil is the calling thread's namespace
	if err != nil {
		return err
	}
	defer conn.Close()
	a := addr.Address{Prefix: netip.MustParsePrefix("2001:db8::1/64"), Link: index, Flags: addr.NoDAD}
	changed, err := conn.Ensure(ctx, a) // adds it, or does nothing
	if err != nil {
		return err
	}
	fmt.Println(a, changed)
	list, err := conn.List(ctx, addr.Filter{Link: index})
	if err != nil {
		return err
	}
	fmt.Println(list)
	err = conn.Remove(ctx, a) // no error if it does not exist
	return err
}
