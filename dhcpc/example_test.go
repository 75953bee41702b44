package dhcpc_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/netns"
)

// Package transport has an example with a server.
func ExampleClient() {
	ctx, pod, index, mac := context.Background(), new(netns.NS), 2, net.HardwareAddr{2, 0, 10, 9, 0, 7}
	client, err := dhcpc.New(&dhcpc.Config{MAC: mac, Dial: transport.Dialer(&transport.Config{NetNS: pod, Link: index})})
	if err != nil {
		fmt.Println(err)
		return
	}
	lease, err := client.Acquire(ctx)
	if err == nil {
		fmt.Println("configure", lease.Address)
		err = client.Run(ctx, lease, func(_, _ *dhcpc.Lease) error { return nil }) // until ctx is done
	}
	fmt.Println(err, client.Release(context.Background(), lease))
}

// A program that keeps many leases has a Session for each, and calls Step when the
// first of them is due, or when a packet comes for one. No goroutine waits.
func ExampleMachine_Step() {
	mac := net.HardwareAddr{2, 0, 10, 9, 0, 7}
	machine, err := dhcpc.NewMachine(&dhcpc.Config{MAC: mac})
	if err != nil {
		fmt.Println(err)
		return
	}
	granted := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	lease := &dhcpc.Lease{ // as it was read from a file
		Address: netip.MustParsePrefix("192.0.2.7/24"), Server: netip.MustParseAddr("192.0.2.1"), MAC: dhcpc.Hex(mac),
		Obtained: granted, Renew: granted.Add(30 * time.Minute), Rebind: granted.Add(52 * time.Minute), Expire: granted.Add(time.Hour),
	}
	session, err := machine.Restore(granted.Add(time.Minute), 1, lease)
	if err != nil {
		fmt.Println(err)
		return
	}
	// The server is gone: nothing but the time is told to the session.
	for state := session.State(); session.Lease() != nil; {
		var out dhcpc.Output
		session, out = machine.Step(session, session.Wake(), nil)
		if session.State() != state {
			fmt.Println(session.State(), "sends to", out.Send.Dst.Addr())
		}
		if out.Lost != nil {
			fmt.Println("lost:", out.Err)
		}
		state = session.State()
	}
	// Output:
	// RENEWING sends to 192.0.2.1
	// REBINDING sends to 255.255.255.255
	// SELECTING sends to 255.255.255.255
	// lost: lease expired: 192.0.2.7, at 2026-05-01T13:00:00Z
}
