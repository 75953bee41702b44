package netns_test

import (
	"context"
	"fmt"
	"os"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/netns"
)

// A namespace is made, asked for its addresses, and told to forward.
func Example() {
	if err := run(context.Background()); err != nil {
		fmt.Println(err)
	}
	// Output: [] 1
}

func run(ctx context.Context) error {
	ns, err := netns.New() // or netns.Open("/run/netns/pod")
	if err != nil {
		return err
	}
	defer ns.Close()
	conn, err := addr.Dial(ns) // its socket is in ns, and works from any goroutine
	if err != nil {
		return err
	}
	defer conn.Close()
	list, err := conn.List(ctx, addr.Filter{})
	if err != nil {
		return err
	}
	err = ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) })
	if err != nil {
		return err
	}
	return ns.Do(func() error {
		forwards, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward")
		fmt.Print(list, " ", string(forwards))
		return err
	})
}

// A path that does not name a network namespace is told apart from one that is
// not there.
func ExampleOpen() {
	_, err := netns.Open("/dev/null")
	fmt.Println(err)
	// Output: open network namespace /dev/null: not a network namespace
}
