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
	// after the program has ended: 0
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
	pod := []netip.Addr{netip.MustParseAddr("10.22.0.5")}
	taken, err := hostport.Listeners(ctx, host, port)
	if err != nil {
		return err
	}
	for _, l := range taken {
		fmt.Println(l.Local, "is taken") // l itself names the program, too
	}
	program.Close()
	if taken, err = hostport.Listeners(ctx, host, port); err != nil {
		return err
	}
	fmt.Println("after the program has ended:", len(taken))

	// Here nft.Conn.Add publishes the port. Clients that sent to the program go on to the pod.
	conn, err := hostport.Dial(host, nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.FlushStale(ctx, pod, port); err != nil {
		return err
	}
	// And once nft.Conn.Remove has taken the port back:
	return conn.Flush(ctx, pod, port)
}
