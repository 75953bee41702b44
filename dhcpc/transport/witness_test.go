package transport_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// witness listens at the host's end of the pod's link.
func (l *lan) witness(t testing.TB, change func(*transport.Config), send func() (dhcpc.Transport[*dhcpc.Packet], error)) dhcpc.Transport[*dhcpc.Packet] {
	t.Helper()
	cfg := &transport.Config{NetNS: l.host, Link: l.index, MAC: clientMAC()}
	if change != nil {
		change(cfg)
	}
	w := must.Of(transport.DialWitness(cfg, send)).Get(t)
	t.Cleanup(func() { w.Close() })
	return w
}

// byUDP dials what a witness that only hears needs besides.
func (l *lan) byUDP() (dhcpc.Transport[*dhcpc.Packet], error) { return transport.DialUDP(l.config()) }

// outside dials what sends in the pod and hears outside of it.
func (l *lan) outside(t testing.TB, send func(context.Context, netip.Addr) (dhcpc.Transport[*dhcpc.Packet], error)) func(context.Context, netip.Addr) (dhcpc.Transport[*dhcpc.Packet], error) {
	return func(ctx context.Context, local netip.Addr) (dhcpc.Transport[*dhcpc.Packet], error) {
		return l.witness(t, nil, func() (dhcpc.Transport[*dhcpc.Packet], error) { return send(ctx, local) }), nil
	}
}

func TestAWitnessHearsAnswersToItsClientAlone(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.witness(t, nil, l.byUDP)
	server, pod := raw(t, &transport.Config{NetNS: l.host, Link: l.index}), raw(t, l.config())
	ctx := soon(t)
	to := func(mac dhcpc.Hex) *dhcpc.Packet {
		p := packet(clientMAC())
		p.DstMAC = mac
		return p
	}
	for _, p := range []*dhcpc.Packet{
		packet(net.HardwareAddr{2, 0, 10, 9, 0, 8}),
		to(dhcpc.Hex{2, 0, 10, 9, 0, 9}), // as an answer to another, of which the bridge does not know where it is
		to(dhcpc.Hex{2, 0, 10, 10, 0, 7}),
		to(dhcpc.Hex{2, 0, 10, 9, 0xff, 0xff}),
		to(dhcpc.Hex{0xff, 0xff, 0xff, 0xff, 0, 7}),
		to(dhcpc.Hex{1, 0, 0x5e, 0, 0, 1}),
		{ARP: &dhcpc.ARP{SenderMAC: dhcpc.Hex(clientMAC()), SenderIP: addr(serverIP), TargetIP: addr(clientIP)}},
	} {
		must.Succeed(t, server.Send(ctx, p))
	}
	// What the pod says comes in by the port, to whomever it is.
	for _, mac := range []dhcpc.Hex{nil, dhcpc.Hex(clientMAC()), {1, 0, 0x5e, 0, 0, 1}, {2, 0, 10, 9, 0, 9}} {
		must.Succeed(t, pod.Send(ctx, to(mac)))
	}
	for _, mac := range []string{"ff:ff:ff:ff:ff:ff", clientMAC().String()} {
		own, _ := net.ParseMAC(mac)
		must.Succeed(t, server.Send(ctx, to(dhcpc.Hex(own))))
		got, err := w.Receive(ctx, time.Time{})
		must.That(t, err == nil && got.DstMAC.String() == mac && string(got.Payload) == string(packet(clientMAC()).Payload),
			"received %v, %v, want what was sent to %s", got, err, mac)
	}
	p, err := w.Receive(ctx, time.Now())
	expect.That(t, errors.Is(err, os.ErrDeadlineExceeded), "received %v, %v", p, err)
}

// Some switches and routers tag what they send with VLAN 0 and a priority (IEEE 802.1Q): a Linux host takes such frames as
// it takes others. Those of another VLAN are another network's.
func TestPriorityTagsAreNoObstacle(t *testing.T) {
	t.Parallel()
	for _, byBridge := range []bool{false, true} { // which has the tag in the frame, and beside it
		l := newLAN(t)
		from := &transport.Config{NetNS: l.host, Link: l.index}
		if byBridge {
			wire := nstest.New(t)
			from = &transport.Config{NetNS: wire}
			from.Link, _ = nstest.Veth(t, wire, "eth0", l.host, "wire0")
			nstest.Run(t, l.host, "ip", "link", "add", "br0", "up", "type", "bridge")
			for _, port := range []string{l.link, "wire0"} {
				nstest.Run(t, l.host, "ip", "link", "set", port, "master", "br0")
			}
		}
		all := l.config()
		all.ARP = true // the socket is of all protocols, which hears what the kernel has not sorted yet
		heard := map[string]dhcpc.Transport[*dhcpc.Packet]{"witness": l.witness(t, nil, l.byUDP), "client": raw(t, l.config()), "client of ARP": raw(t, all)}
		ctx := soon(t)
		send := func() {
			for _, tag := range []uint16{7, 5 << 13} {
				from.VLAN = tag
				p := packet(clientMAC())
				p.DstMAC = dhcpc.Hex(clientMAC())
				p.Payload[7] = byte(tag) // of the transaction
				must.Succeed(t, raw(t, from).Send(ctx, p))
			}
		}
		for who, conn := range heard {
			got, err := (*dhcpc.Packet)(nil), os.ErrDeadlineExceeded
			for errors.Is(err, os.ErrDeadlineExceeded) && ctx.Err() == nil { // until the bridge's ports forward
				send()
				got, err = conn.Receive(ctx, time.Now().Add(100*time.Millisecond))
			}
			expect.That(t, err == nil && got.Payload[7] == 0, "by a bridge %v: the %s received %v, %v", byBridge, who, got, err)
		}
	}
}

func TestAWitnessOfARPHearsIt(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.witness(t, func(c *transport.Config) { c.ARP = true }, l.byUDP)
	arp := func(sender string) *dhcpc.Packet {
		return &dhcpc.Packet{ARP: &dhcpc.ARP{Reply: true, SenderMAC: dhcpc.Hex(clientMAC()), SenderIP: addr(sender), TargetIP: addr(clientIP)}}
	}
	ctx := soon(t)
	// The pod does not make its servers believe that an address is taken.
	must.Succeed(t, raw(t, l.config()).Send(ctx, arp("10.9.0.66")))
	must.Succeed(t, raw(t, &transport.Config{NetNS: l.host, Link: l.index}).Send(ctx, arp("10.9.0.67")))
	got, err := w.Receive(ctx, time.Time{})
	expect.That(t, err == nil && got.ARP != nil && got.ARP.SenderIP == addr("10.9.0.67"), "received %v, %v", got, err)
}

func TestAWitnessNeedsTheClientsMAC(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	_, err := transport.DialWitness(&transport.Config{Link: 1}, l.byUDP)
	expect.Is(t, err, tombolo.ErrInvalid, "without the client's MAC address")
	_, err = transport.DialWitness(&transport.Config{Link: 1, MAC: clientMAC()}, nil)
	expect.Is(t, err, tombolo.ErrInvalid, "with nothing to send by")
	_, err = transport.DialWitness(&transport.Config{NetNS: l.host, Link: 4711, MAC: clientMAC()}, l.byUDP)
	expect.Is(t, err, os.ErrNotExist, "of a link that is not there")
}

// The pod gets its address by either socket, and by UDP although the server answers to the
// address that the pod does not have yet, and although it hears nothing itself.
func TestAClientLeasesByWhatItsWitnessHears(t *testing.T) {
	t.Parallel()
	for name, dial := range map[string]func(*lan) func(context.Context, netip.Addr) (dhcpc.Transport[*dhcpc.Packet], error){
		"raw": func(l *lan) func(context.Context, netip.Addr) (dhcpc.Transport[*dhcpc.Packet], error) {
			return transport.Dialer(l.config())
		},
		"udp": udpOnly,
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			l := newLAN(t)
			nstest.Sysctl(t, l.pod, "net/ipv4/conf/all/rp_filter", "1")
			dnsmasq(t, l.host, l.link)
			lease, err := l.client(t, func(c *dhcpc.Config) { c.Dial = l.outside(t, dial(l)) }).Acquire(soon(t))
			expect.That(t, err == nil && netip.MustParsePrefix("10.9.0.0/24").Contains(lease.Address.Addr()),
				"%v, %v", lease, err)
		})
	}
}

// Somebody has all rights in a pod's namespace, and has the pod's own server give it the
// router's address. A client that hears in the pod believes it.
func TestAPodThatAnswersItselfIsNotBelieved(t *testing.T) {
	t.Parallel()
	for _, way := range nstest.Diversions() {
		nstest.RunParallel(t, way, func(t *testing.T) {
			l := newLAN(t)
			rogue := nstest.Divert(t, l.pod, "eth0", way)
			l.eth0 = nstest.Index(t, l.pod, "eth0")
			nstest.Run(t, rogue, "ip", "address", "add", serverIP+"/24", "dev", "eth0")
			asked := serve(t, rogue, "eth0", func(_, resp *dhcpv4.DHCPv4) { resp.YourIPAddr = net.ParseIP("10.9.0.66") })
			for _, inPod := range []bool{true, false} {
				change := func(c *dhcpc.Config) { c.Retransmit = 100 * time.Millisecond }
				if !inPod {
					change = func(c *dhcpc.Config) {
						c.Retransmit, c.Timeout = 100*time.Millisecond, time.Second
						c.Dial = l.outside(t, c.Dial)
					}
				}
				before := len(asked)
				lease, err := l.client(t, change).Acquire(soon(t))
				switch {
				case inPod && (err != nil || lease.Address.Addr() != addr("10.9.0.66")):
					t.Fatalf("the attack does not work, so that the test shows nothing: %v, %v", lease, err)
				case !inPod && !errors.Is(err, dhcpc.ErrTimeout):
					t.Errorf("%v, %v, want that nobody answered", lease, err)
				case len(asked) == before:
					t.Error("the pod's server was not asked")
				}
			}
		})
	}
}
