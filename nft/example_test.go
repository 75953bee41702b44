package nft_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"

	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
)

// A network gets its rules, and a pod its elements. Another pod is refused the same address.
func Example() {
	if err := run(context.Background()); err != nil {
		fmt.Println(err)
	}
	// Output:
	// changed: true
	// inet tombolo pods4 { cbr0 . 10.22.0.5 } belongs to 58fcaeafe32
	// 58fcaeafe32 cbr0 [10.22.0.5]
	// differences: []
}

func run(ctx context.Context) error {
	host, err := netns.New()
	if err != nil {
		return err
	}
	defer host.Close()
	prefixes := []netip.Prefix{netip.MustParsePrefix("10.22.0.0/16")}
	addresses := []netip.Addr{netip.MustParseAddr("10.22.0.5")}

	firewall, err := nft.Dial(&nft.Config{NetNS: host}) // nil is the calling thread's namespace
	if err != nil {
		return err
	}
	defer firewall.Close()
	network := nft.Network{Name: "podnet", Bridge: "cbr0", Prefixes: prefixes, Masquerade: true}
	changed, err := firewall.Ensure(ctx, network) // creates the rules, or repairs them
	if err != nil {
		return err
	}
	fmt.Println("changed:", changed)
	pod := nft.Endpoint{
		Owner: nft.OwnerOf("podnet", "0123456789abcdef", "eth0"), Network: "podnet",
		Bridge: "cbr0", Addrs: addresses, Masquerade: true,
	}
	err = firewall.Add(ctx, pod) // one transaction that adds a few set elements
	if err != nil {
		return err
	}
	other := pod
	other.Owner = "bbbbbbbbbbb"
	var conflict *nft.ConflictError
	if err := firewall.Add(ctx, other); errors.Is(err, fs.ErrExist) && errors.As(err, &conflict) {
		fmt.Println(conflict.Element, "belongs to", conflict.Owner)
	}

	pods, err := firewall.Endpoints(ctx, "podnet")
	if err != nil {
		return err
	}
	for _, p := range pods {
		fmt.Println(p.Owner, p.Bridge, p.Addrs)
	}
	differences, err := firewall.Check(ctx, network)
	if err != nil {
		return err
	}
	fmt.Println("differences:", differences)
	err = firewall.Remove(ctx, pod)
	if err != nil {
		return err
	}
	return firewall.RemoveNetwork(ctx, "podnet")
}
