package transport_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/server4"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/netns"
)

// An interface in a namespace of its own leases an address.
func Example() {
	pod, link, stop := network()
	defer stop()

	mac := net.HardwareAddr{2, 0, 10, 9, 0, 7}
	cfg := &transport.Config{NetNS: pod, Link: link, MAC: mac}
	client, err := dhcpc.New(&dhcpc.Config{MAC: mac, Dial: transport.Dialer(cfg)})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	lease, err := client.Acquire(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(lease.Address, "from", lease.Server, "for", lease.Expire.Sub(lease.Obtained))
	for _, r := range lease.Routes {
		fmt.Println(r)
	}
	err = transport.Release(ctx, cfg, lease) // from another interface, if the client's is gone
	if err != nil {
		fmt.Println(err)
	}

	// Output:
	// 10.9.0.7/24 from 10.9.0.1 for 1h0m0s
	// 0.0.0.0/0 via 10.9.0.1
}

// network makes a namespace with a link to another, where a server runs.
func network() (pod *netns.NS, link int, stop func()) {
	pod, err := netns.New()
	check(err)
	host, err := netns.New()
	check(err)
	check(vethPair(pod, host))
	check(pod.Do(func() error {
		eth0, err := net.InterfaceByName("eth0")
		if err == nil {
			link = eth0.Index
		}
		return err
	}))
	var server *server4.Server
	check(host.Do(func() error {
		var err error
		server, err = server4.NewServer("veth0", &net.UDPAddr{IP: net.IPv4zero, Port: dhcpv4.ServerPort}, always)
		return err
	}))
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve() }()
	return pod, link, func() { server.Close(); <-done; host.Close(); pod.Close() }
}

// always is a server that gives everybody the same address.
func always(conn net.PacketConn, peer net.Addr, m *dhcpv4.DHCPv4) {
	kind := dhcpv4.MessageTypeOffer
	if m.MessageType() == dhcpv4.MessageTypeRequest {
		kind = dhcpv4.MessageTypeAck
	}
	server := net.IPv4(10, 9, 0, 1)
	resp, err := dhcpv4.NewReplyFromRequest(m, dhcpv4.WithMessageType(kind), dhcpv4.WithYourIP(net.IPv4(10, 9, 0, 7)),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(server)), dhcpv4.WithRouter(server),
		dhcpv4.WithNetmask(net.CIDRMask(24, 32)), dhcpv4.WithLeaseTime(3600))
	check(err)
	_, err = conn.WriteTo(resp.ToBytes(), peer)
	check(err)
}

func vethPair(pod, host *netns.NS) error {
	peer := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), pod.FD())
	for _, args := range [][]string{
		{"link", "add", "veth0", "type", "veth", "peer", "name", "eth0", "netns", peer},
		{"link", "set", "veth0", "up"},
		{"address", "add", "10.9.0.1/24", "dev", "veth0"},
	} {
		if err := ip(host, args...); err != nil {
			return err
		}
	}
	return ip(pod, "link", "set", "eth0", "address", "02:00:0a:09:00:07", "up")
}

func ip(ns *netns.NS, args ...string) error {
	return ns.Do(func() error {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %q: %w: %s", args, err, out)
		}
		return nil
	})
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
