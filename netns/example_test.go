package netns_test

import (
	"fmt"
	"net"

	"github.com/tombolo-cni/tombolo/netns"
)

// A namespace is made, and looked into.
func Example() {
	ns, err := netns.New()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer ns.Close()

	err = ns.Do(func() error {
		links, err := net.Interfaces()
		for _, link := range links {
			fmt.Println(link.Name)
		}
		return err
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output: lo
}

// A path that does not name a network namespace is told apart from one that is
// not there.
func ExampleOpen() {
	_, err := netns.Open("/dev/null")
	fmt.Println(err)
	// Output: open network namespace /dev/null: not a network namespace
}
