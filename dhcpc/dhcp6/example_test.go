package dhcp6_test

import (
	"context"
	"fmt"
	"log"

	"github.com/tombolo-cni/tombolo/dhcpc/dhcp6"
)

// A client needs a transport, which the caller opens on its interface.
func Example() {
	var dial func(context.Context) (dhcp6.Transport, error)
	client, err := dhcp6.New(&dhcp6.Config{DUID: dhcp6.DUID([16]byte{15: 7}), IAID: 1, RapidCommit: true, Dial: dial})
	if err != nil {
		log.Fatal(err)
	}
	lease, err := client.Acquire(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(lease.Address, lease.DNS)
}
