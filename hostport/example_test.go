package hostport_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"github.com/tombolo-cni/tombolo/hostport"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
)

// A pod is to get port 5353 of the host, where a program of the host listens.
func Example() {
	if err := run(context.Background()); err != nil {
		fmt.Println(err)
	}
	// Output:
	// 0.0.0.0:5353 is taken
}

func run(ctx context.Context) error {
	host, err := netns.New() // a namespace of the example's own; nil is the caller's
	if err != nil {
		return err
	}
	defer host.Close()
	var program net.PacketConn
	listen := func() (err error) { program, err = net.ListenPacket("udp4", ":5353"); return err }
	if err := host.Do(listen); err != nil {
		return err
	}
	port := nft.Port{Protocol: nft.UDP, HostPort: 5353, PodPort: 53}
	taken, err := hostport.Listeners(ctx, host, port) // sockets that would lose packets to the pod
	if err != nil {
		return err
	}
	for _, l := range taken {
		fmt.Println(l.Local, "is taken") // l itself names the program, too
	}
	program.Close()

	firewall, err := nft.Dial(&nft.Config{NetNS: host})
	if err != nil {
		return err
	}
	defer firewall.Close()
	if _, err := firewall.Ensure(ctx, nft.Network{Name: "pods"}); err != nil {
		return err
	}
	pod := nft.Endpoint{
		Owner: nft.OwnerOf("pods", "c1", "eth0"), Network: "pods", Bridge: "cbr0",
		Addrs: []netip.Addr{netip.MustParseAddr("10.22.0.5")}, Ports: []nft.Port{port},
	}
	conn, err := hostport.Dial(host, nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	err = firewall.Add(ctx, pod) // package nft
	if err != nil {
		return err
	}
	err = conn.FlushStale(ctx, pod.Addrs, port) // deletes flows that began earlier
	if err != nil {
		return err
	}
	err = firewall.Remove(ctx, pod)
	if err != nil {
		return err
	}
	err = conn.Flush(ctx, pod.Addrs, port)
	return err
}
