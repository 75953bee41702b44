// Command lease leases an address for an interface in a network namespace, until it is interrupted.
package main

import (
	"context"
	"errors"
	"log"
	"net"
	"os"
	"os/signal"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/netns"
)

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: lease NAMESPACE INTERFACE")
	}
	ctx, _ := signal.NotifyContext(context.Background(), os.Interrupt)
	if err := run(ctx, os.Args[1], os.Args[2]); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, path, name string) error {
	ns, openErr := netns.Open(path)
	conn, dialErr := addr.Dial(ns)
	var link *net.Interface
	find := func() (err error) { link, err = net.InterfaceByName(name); return err }
	if err := errors.Join(openErr, dialErr, ns.Do(find)); err != nil {
		return err
	}
	var held *dhcpc.Lease
	apply := func(old, next *dhcpc.Lease) error { // a lease has routes and DNS, too
		if held = next; next == nil {
			return conn.Remove(ctx, addr.Address{Prefix: old.Address, Link: link.Index})
		}
		return conn.Replace(ctx, addr.Address{Prefix: next.Address, Link: link.Index})
	}
	dial := transport.Dialer(&transport.Config{NetNS: ns, Link: link.Index, MAC: link.HardwareAddr})
	client, err := dhcpc.New(&dhcpc.Config{MAC: link.HardwareAddr, Dial: dial})
	if err != nil {
		return err
	}
	lease, err := client.Acquire(ctx)
	if err != nil {
		return err
	}
	if err = apply(nil, lease); err == nil {
		err = client.Run(ctx, lease, apply)
	}
	if errors.Is(err, context.Canceled) && held != nil {
		return client.Release(context.WithoutCancel(ctx), held)
	}
	return err
}
