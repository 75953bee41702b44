package transport_test

import (
	"context"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/server4"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// The addresses of these tests' network.
const (
	serverIP = "10.9.0.1"
	clientIP = "10.9.0.7"
)

func clientMAC() net.HardwareAddr { return net.HardwareAddr{2, 0, 10, 9, 0, 7} }

// lan is a pod's end of a veth pair whose other end is the host's: the server's own
// interface, or a port of a bridge.
type lan struct {
	pod, host *netns.NS
	eth0      int // in the pod
	link      string
	index     int // the host's interface with the server's address
}

// newLAN makes a veth pair between two namespaces; the host's end has an address.
func newLAN(t testing.TB) *lan {
	t.Helper()
	l := &lan{pod: nstest.New(t), host: nstest.New(t), link: "veth0"}
	l.eth0, l.index = nstest.Veth(t, l.pod, "eth0", l.host, "veth0")
	nstest.Run(t, l.pod, "ip", "link", "set", "eth0", "address", clientMAC().String())
	nstest.Run(t, l.host, "ip", "address", "add", serverIP+"/24", "dev", "veth0")
	return l
}

func (l *lan) config() *transport.Config {
	return &transport.Config{NetNS: l.pod, Link: l.eth0, MAC: clientMAC()}
}

// client makes a client in the pod that gets its first lease by dial.
func (l *lan) client(t testing.TB, change func(*dhcpc.Config)) *dhcpc.Client {
	t.Helper()
	cfg := &dhcpc.Config{
		MAC: clientMAC(), ClientID: []byte("\x00pod-7"), HostName: "pod-7", Dial: transport.Dialer(l.config()), Timeout: longEnough,
	}
	if change != nil {
		change(cfg)
	}
	return must.Of(dhcpc.New(cfg)).Get(t)
}

// apply gives the pod's interface a lease's address and routes.
func (l *lan) apply(t testing.TB, lease *dhcpc.Lease) {
	t.Helper()
	nstest.Run(t, l.pod, "ip", "address", "replace", lease.Address.String(), "dev", "eth0")
	for _, r := range lease.Routes {
		args := []string{"route", "replace", r.Dst.String(), "dev", "eth0"}
		if r.Gateway.IsValid() {
			args = append(args, "via", r.Gateway.String())
		}
		nstest.Run(t, l.pod, "ip", args...)
	}
}

// nobody is how server4 names a peer without an address: by where it answers to.
const nobody = "255.255.255.255:68"

// seen is what a scripted server heard.
type seen struct {
	kind dhcpv4.MessageType
	peer string
	m    *dhcpv4.DHCPv4
}

// said is what a message has in common with itself sent again.
type said struct {
	kind dhcpv4.MessageType
	id   dhcpv4.TransactionID
}

// hearing is what a server heard, all of it, and what of that a test has looked at.
type hearing struct {
	heard  chan seen
	before map[said]bool
}

// listening has serve's messages told apart.
func listening(heard chan seen) *hearing { return &hearing{heard, map[said]bool{}} }

// serve runs a server that gives everybody the same address, and reports what it
// hears. Before an answer leaves, change may change it.
func serve(t testing.TB, ns *netns.NS, link string, change func(req, resp *dhcpv4.DHCPv4)) chan seen {
	t.Helper()
	heard := make(chan seen, 10_000) // more than anybody says
	handle := func(conn net.PacketConn, peer net.Addr, m *dhcpv4.DHCPv4) {
		heard <- seen{m.MessageType(), peer.String(), m}
		kind := dhcpv4.MessageTypeOffer
		switch m.MessageType() {
		case dhcpv4.MessageTypeDiscover:
		case dhcpv4.MessageTypeRequest:
			kind = dhcpv4.MessageTypeAck
		default:
			return
		}
		resp, err := dhcpv4.NewReplyFromRequest(m, dhcpv4.WithMessageType(kind),
			dhcpv4.WithYourIP(net.ParseIP(clientIP)), dhcpv4.WithServerIP(net.ParseIP(serverIP)),
			dhcpv4.WithOption(dhcpv4.OptServerIdentifier(net.ParseIP(serverIP))),
			dhcpv4.WithNetmask(net.CIDRMask(24, 32)), dhcpv4.WithRouter(net.ParseIP(serverIP)), dhcpv4.WithLeaseTime(3600))
		if err != nil {
			t.Error(err)
			return
		}
		if change != nil {
			change(m, resp)
		}
		if resp.OpCode == 0 {
			return
		}
		expect.Success(t, expect.Err(conn.WriteTo(resp.ToBytes(), peer)))
	}
	var server *server4.Server
	must.Succeed(t, ns.Do(func() error {
		var err error
		server, err = server4.NewServer(link, &net.UDPAddr{IP: net.IPv4zero, Port: dhcpv4.ServerPort}, handle)
		return err
	}))
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve() }()
	t.Cleanup(func() { server.Close(); <-done })
	return heard
}

// next gives the next message that the server hears, or has heard, and that is not one
// of before sent again: on a slow machine a client does not wait for its answer.
func (h *hearing) next(t testing.TB) seen {
	t.Helper()
	for {
		select {
		case s := <-h.heard:
			if !h.before[said{s.kind, s.m.TransactionID}] {
				h.before[said{s.kind, s.m.TransactionID}] = true
				return s
			}
		case <-time.After(longEnough):
			t.Fatal("the server hears nothing more")
		}
	}
}

// forget passes over what was heard of a conversation that has ended in an ACK.
func (h *hearing) forget() {
	for len(h.heard) > 0 {
		s := <-h.heard
		h.before[said{s.kind, s.m.TransactionID}] = true
	}
}

// deaf takes an answer back.
func deaf(_, resp *dhcpv4.DHCPv4) { resp.OpCode = 0 }

// longEnough is for machines of any speed: only a test that fails waits so long.
const longEnough = 3 * time.Minute

// soon is a context for what takes milliseconds, on a machine that may be busy.
func soon(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), longEnough)
	t.Cleanup(cancel)
	return ctx
}

// dnsmasq runs the real one on an interface, and gives its file of leases.
func dnsmasq(t testing.TB, ns *netns.NS, link string, args ...string) func() string {
	t.Helper()
	return nstest.NewDnsmasq(t, ns, link, append([]string{"--dhcp-range=10.9.0.100,10.9.0.120,255.255.255.0,120s"}, args...)...).Leased
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// counting tells what is sent by packet sockets.
type counting struct{ sent []dhcpv4.MessageType }

func (c *counting) dial(l *lan) func(context.Context, netip.Addr) (dhcpc.Transport[*dhcpc.Packet], error) {
	return func(context.Context, netip.Addr) (dhcpc.Transport[*dhcpc.Packet], error) {
		r, err := transport.DialRaw(l.config())
		return &countingRaw{r, c}, err
	}
}

type countingRaw struct {
	dhcpc.Transport[*dhcpc.Packet]
	c *counting
}

func (r *countingRaw) Send(ctx context.Context, p *dhcpc.Packet) error {
	m, err := dhcpv4.FromBytes(p.Payload)
	if err != nil {
		return err
	}
	r.c.sent = append(r.c.sent, m.MessageType())
	return r.Transport.Send(ctx, p)
}

// udpOnly dials UDP sockets in the pod, whether it has an address or not.
func udpOnly(l *lan) func(context.Context, netip.Addr) (dhcpc.Transport[*dhcpc.Packet], error) {
	return func(context.Context, netip.Addr) (dhcpc.Transport[*dhcpc.Packet], error) {
		return transport.DialUDP(l.config())
	}
}
