package addr_test

import (
	"context"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/netns"
)

// The loopback interface of a new namespace gets an address of each family.
func Example() {
	ctx := context.Background()
	ns, err := netns.New()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer ns.Close()
	conn, err := addr.Dial(ns)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer conn.Close()

	const loopback = 1 // its index in every namespace
	for _, prefix := range []string{"192.0.2.1/32", "2001:db8::1/128"} {
		a := addr.Address{Prefix: netip.MustParsePrefix(prefix), Link: loopback, Flags: unix.IFA_F_NODAD}
		for range 2 {
			changed, err := conn.Ensure(ctx, a)
			fmt.Println(a, changed, err)
		}
	}

	list, err := conn.List(ctx, addr.Filter{Link: loopback, Family: unix.AF_INET6})
	for _, a := range list {
		fmt.Println(a.Prefix)
	}
	fmt.Println(err)
	// Output:
	// 192.0.2.1/32 on link 1 true <nil>
	// 192.0.2.1/32 on link 1 false <nil>
	// 2001:db8::1/128 on link 1 true <nil>
	// 2001:db8::1/128 on link 1 false <nil>
	// 2001:db8::1/128
	// <nil>
}
