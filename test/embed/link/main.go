// Command link puts a network namespace on a bridge, whose gateway the host is.
package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

func main() {
	if len(os.Args) != 5 {
		fmt.Fprintln(os.Stderr, "usage: link BRIDGE GATEWAY/LENGTH NAMESPACE ADDRESS/LENGTH")
	} else if err := run(context.Background(), os.Args[1], os.Args[2], os.Args[3], os.Args[4]); err != nil {
		fmt.Fprintln(os.Stderr, "link:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, name, gateway, path, address string) error {
	host, hostErr := netip.ParsePrefix(gateway)
	own, ownErr := netip.ParsePrefix(address)
	pod, err := netns.Open(path)
	if err := errors.Join(hostErr, ownErr, err); err != nil {
		return err
	}
	links, err := bridge.Dial(nil)
	if err != nil {
		return err
	}
	_, err = links.Ensure(ctx, bridge.Bridge{Name: name, Alias: "mycni"})
	br, linkErr := links.Link(ctx, name)
	if err := errors.Join(err, linkErr); err != nil {
		return err
	}
	_, err = links.Addresses().Ensure(ctx, addr.Address{Prefix: host, Link: br.Index})
	port := bridge.Port{Bridge: name, Name: bridge.HostName(name, path, "eth0"), Peer: "eth0"}
	port.Addresses, port.Routes = []netip.Prefix{own}, []route.Route{{Gateway: host.Addr()}}
	if err == nil {
		_, err = links.Attach(ctx, pod, port)
	}
	return err
}
