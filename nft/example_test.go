package nft_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"net/netip"

	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
)

// Adding a pod takes one transaction of a few elements. The rules are there already,
// but for the first pod, and after someone flushed the table.
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

	network := nft.Network{
		Name:          "podnet",
		Prefixes:      []netip.Prefix{netip.MustParsePrefix("10.22.0.0/16")},
		Masquerade:    true,
		NonMasquerade: []netip.Prefix{netip.MustParsePrefix("192.168.0.0/16")},
	}
	pod := nft.Endpoint{
		Owner:      nft.OwnerOf("podnet", "0123456789abcdef", "eth0"),
		Network:    "podnet",
		Bridge:     "cbr0",
		Addrs:      []netip.Addr{netip.MustParseAddr("10.22.0.5")},
		Masquerade: true,
	}
	changed, err := firewall.Ensure(ctx, network)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("built:", changed)
	if err := firewall.Add(ctx, pod); err != nil {
		log.Fatal(err)
	}

	// Someone else with the same address.
	other := pod
	other.Owner = "bbbbbbbbbbb"
	var conflict *nft.ConflictError
	if err := firewall.Add(ctx, other); errors.Is(err, fs.ErrExist) && errors.As(err, &conflict) {
		fmt.Println(conflict.Element, "belongs to", conflict.Owner)
	}

	pods, err := firewall.Endpoints(ctx, "podnet")
	if err != nil {
		log.Fatal(err)
	}
	for _, p := range pods {
		fmt.Println(p.Owner, p.Bridge, p.Addrs)
	}
	if err := firewall.Remove(ctx, pod); err != nil {
		log.Fatal(err)
	}
	if err := firewall.RemoveNetwork(ctx, "podnet"); err != nil {
		log.Fatal(err)
	}

	// Output:
	// built: true
	// inet tombolo pods4 { cbr0 . 10.22.0.5 } belongs to 58fcaeafe32
	// 58fcaeafe32 cbr0 [10.22.0.5]
}
