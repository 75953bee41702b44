package guard_test

import (
	"fmt"
	"log"
	"net"
	"net/netip"

	"github.com/tombolo-cni/tombolo/nft/guard"
)

// What the firewall of a program of its own needs: sets, chains that look into them, and the
// elements of a port. Package nft does it for Endpoint.GuardedPort.
func Example() {
	port := guard.Port{
		Name:  "veth0123",
		MAC:   net.HardwareAddr{2, 0, 0, 0, 0, 5},
		Addrs: []netip.Addr{netip.MustParseAddr("10.22.0.5")},
	}
	if err := port.Check(); err != nil {
		log.Fatal(err)
	}
	fmt.Println(len(guard.Sets()), "sets")
	for _, chain := range guard.Guarded() {
		fmt.Println("chain", chain.Name, "at", chain.Priority)
	}
	for set, key := range port.Elements() {
		fmt.Printf("%s: %d bytes\n", set, len(key))
	}
	// Output:
	// 10 sets
	// chain guard at -300
	// chain untrusted at -299
	// guarded: 16 bytes
	// guard-mac: 24 bytes
	// guard4: 20 bytes
}
