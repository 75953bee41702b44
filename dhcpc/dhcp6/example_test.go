package dhcp6_test

import (
	"context"
	"fmt"
	"log"

	"github.com/tombolo-cni/tombolo/dhcpc/dhcp6"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/netns"
)

// The client of a pod, by a socket in the pod's namespace.
func Example() {
	pod, err := netns.Open("/run/netns/pod-7")
	if err != nil {
		log.Fatal(err)
	}
	defer pod.Close()
	client, err := dhcp6.New(&dhcp6.Config{
		DUID: dhcp6.DUID([16]byte{15: 7}), IAID: 1, RapidCommit: true,
		Dial: transport.Dialer6(&transport.Config{NetNS: pod, Link: 2}), // eth0's index there
	})
	if err != nil {
		log.Fatal(err)
	}
	lease, err := client.Acquire(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(lease.Address, lease.DNS)
}
