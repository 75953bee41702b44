package foreign_test

import (
	"context"
	"fmt"
	"log"

	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/nft/foreign"
)

// On a host without another firewall there is nothing to do, and nothing in the way.
func Example() {
	host, err := netns.New() // a namespace to try it in; nil is one's own
	if err != nil {
		log.Fatal(err)
	}
	defer host.Close()
	firewall, err := nft.Dial(&nft.Config{NetNS: host})
	if err != nil {
		log.Fatal(err)
	}
	defer firewall.Close()
	ctx := context.Background()
	conn := foreign.On(firewall.Socket(), nil) // firewall is an nft.Conn

	changed, err := conn.Ensure(ctx)
	if err != nil {
		log.Fatal(err)
	}
	obstacles, err := conn.Obstacles(ctx, foreign.Path{Bridge: "cbr0"})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("changed:", changed, "obstacles:", len(obstacles))
	// Output: changed: false obstacles: 0
}
