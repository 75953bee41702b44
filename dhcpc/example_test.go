package dhcpc_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"time"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/netns"
)

// An interface leases an address, and keeps it until the program is told to end.
func Example() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, "/run/netns/pod", 2, net.HardwareAddr{2, 0, 10, 9, 0, 7}); err != nil {
		fmt.Println(err)
	}
}

func run(ctx context.Context, path string, index int, mac net.HardwareAddr) error {
	pod, err := netns.Open(path)
	if err != nil {
		return err
	}
	defer pod.Close()
	addresses, err := addr.Dial(pod)
	if err != nil {
		return err
	}
	defer addresses.Close()
	var held *dhcpc.Lease
	apply := func(old, next *dhcpc.Lease) error { // next is nil when the lease is lost
		held = next
		if next == nil {
			return addresses.Remove(ctx, addr.Address{Prefix: old.Address, Link: index})
		}
		_, err := addresses.Ensure(ctx, addr.Address{Prefix: next.Address, Link: index})
		return err // A lease has routes, MTU and DNS, too.
	}

	dial := transport.Dialer(&transport.Config{NetNS: pod, Link: index, MAC: mac})
	client, err := dhcpc.New(&dhcpc.Config{MAC: mac, Dial: dial})
	if err != nil {
		return err
	}
	lease, err := client.Acquire(ctx)
	if err != nil {
		return err
	}
	err = apply(nil, lease)
	if err != nil {
		return err
	}
	err = client.Run(ctx, lease, apply) // until ctx is done; apply gets each change
	if !errors.Is(err, context.Canceled) {
		return err
	}
	err = client.Release(context.WithoutCancel(ctx), held) // held is the last lease that apply got
	return err
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
