package bridge_test

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// cluster is a node with three pods, one of which is behind a service's address.
type cluster struct {
	*node
	ports                   []bridge.Port
	client, server, witness *netns.NS
	counter                 *counter
}

const (
	service4 = "10.96.0.10"
	service6 = "fd96::10"
)

func newCluster(tb testing.TB) *cluster {
	tb.Helper()
	must.Succeed(tb, bridge.ProbeNetfilter()) // no skip: it is half of what is tested
	c := &cluster{node: newNode(tb)}
	for i, pod := range []**netns.NS{&c.client, &c.server, &c.witness} {
		p := port(byte(i))
		c.ports = append(c.ports, p)
		*pod, _ = attach(tb, c.node, p)
	}
	c.counter = countAt(tb, c.server, c.witness)
	// What counts is the bridge's own attribute. The parameters, which are the
	// namespace's, hold for each bridge in it, and a new namespace has them on.
	for _, name := range []string{"iptables", "ip6tables"} {
		nstest.Sysctl(tb, c.ns, "net/bridge/bridge-nf-call-"+name, "0")
	}
	nstest.Sysctl(tb, c.ns, "net/ipv4/ip_forward", "1")
	nstest.Sysctl(tb, c.ns, "net/ipv6/conf/all/forwarding", "1")
	// As kube-proxy does it: to the pod, and masqueraded where that is the caller.
	nstest.Run(tb, c.ns, "nft", fmt.Sprintf(`table inet service {
		chain prerouting {
			type nat hook prerouting priority dstnat;
			ip daddr %[1]s dnat ip to %[2]s
			ip6 daddr %[3]s dnat ip6 to %[4]s
		}
		chain postrouting {
			type nat hook postrouting priority srcnat;
			ip saddr %[2]s ip daddr %[2]s masquerade
			ip6 saddr %[4]s ip6 daddr %[4]s masquerade
		}
	}`, service4, c.serverAddr(false), service6, c.serverAddr(true)))
	// The host looks for the neighbours of others from a link-local address, and the
	// kernel's own is not usable yet.
	nstest.Run(tb, c.ns, "ip", "addr", "add", "fe80::1/64", "dev", "br0", "nodad")
	nstest.WaitForAddresses(tb, c.ns)
	c.meetAll(tb)
	return c
}

func (c *cluster) serverAddr(v6 bool) netip.Addr {
	list := addrs(c.ports[1])
	if v6 {
		return list[1]
	}
	return list[0]
}

func (c *cluster) meetAll(tb testing.TB) {
	tb.Helper()
	for i, pod := range []*netns.NS{c.client, c.server, c.witness} {
		meet(tb, pod, nstest.Addr("10.44.0.1"), nstest.Addr("fd44::1"))
		meet(tb, c.ns, addrs(c.ports[i])...)
	}
	meet(tb, c.witness, addrs(c.ports[1])...)
}

// mode is a way for pods to reach services on their own node.
type mode struct {
	name                 string
	promiscuous, hairpin bool // of the bridge, of the ports
	dedup                bool // with the rules of that name
	capture              bool // while a capture runs on the bridge
}

// set turns the cluster's bridge, which is in use, to a mode.
func (c *cluster) set(tb testing.TB, m mode, nfCall bool) {
	tb.Helper()
	br := br0()
	br.Promiscuous, br.NFCall = &m.promiscuous, &nfCall
	l, _, err := ensure(tb, c.conn, br)
	must.Succeed(tb, err)
	for _, p := range c.ports {
		p.BridgeIndex, p.Hairpin = l.Index, m.hairpin
		must.Succeed(tb, c.conn.Enslave(tb.Context(), p))
	}
	if m.capture {
		capture(tb, c.ns, l.Index)
	}
	nstest.Run(tb, c.ns, "nft", "add table bridge dedup; delete table bridge dedup")
	if m.dedup {
		nstest.Run(tb, c.ns, "nft", dedup(l.MAC))
	}
}

// capture makes a link promiscuous as tcpdump does, until the test ends.
func capture(tb testing.TB, ns *netns.NS, link int) {
	tb.Helper()
	var fd int
	inside(tb, ns, func() error {
		var err error
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return err
	})
	tb.Cleanup(func() { unix.Close(fd) })
	mreq := &unix.PacketMreq{Ifindex: int32(link), Type: unix.PACKET_MR_PROMISC}
	must.Succeed(tb, unix.SetsockoptPacketMreq(fd, unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP, mreq))
}

// dedup drops what the host sends out of the bridge a second time: it has the
// bridge's MAC, and a pod's address that the host did not put there.
func dedup(mac net.HardwareAddr) string {
	return fmt.Sprintf(`table bridge dedup {
		chain output {
			type filter hook output priority 0;
			oifname "veth*" ether saddr %[1]s ip saddr 10.44.0.1 accept
			oifname "veth*" ether saddr %[1]s ip saddr 10.44.0.0/24 drop
			oifname "veth*" ether saddr %[1]s ip6 saddr fd44::1 accept
			oifname "veth*" ether saddr %[1]s ip6 saddr fd44::/64 drop
		}
	}`, mac)
}

// The way to a service on the caller's own node, on which defaults and docs rest:
// only hairpin ports serve in every case. Promiscuous mode doubles what bridged
// packets that pass the firewall are, a capture does too, and the rules that mend it
// lose everything where they do not pass.
func TestDatagramsToAServiceArriveOnce(t *testing.T) {
	t.Parallel()
	// arrive counts datagrams of ten: from another pod, and masqueraded from the
	// service's pod itself.
	type arrive struct{ other, self int }
	c := newCluster(t)
	for _, tt := range []struct {
		mode
		without, with arrive // NFCall
	}{
		{mode{name: "plain"}, arrive{10, 10}, arrive{10, 0}},
		{mode{name: "promiscuous", promiscuous: true}, arrive{10, 10}, arrive{20, 0}},
		{mode{name: "promiscuous with dedup rules", promiscuous: true, dedup: true}, arrive{0, 10}, arrive{10, 0}},
		{mode{name: "plain with a capture on the bridge", capture: true}, arrive{10, 10}, arrive{20, 0}},
		{mode{name: "hairpin ports", hairpin: true}, arrive{10, 10}, arrive{10, 10}},
		{mode{name: "plain again"}, arrive{10, 10}, arrive{10, 0}},
	} {
		for _, nfCall := range []bool{false, true} {
			want := tt.without
			if nfCall {
				want = tt.with
			}
			t.Run(fmt.Sprintf("%s, NFCall %t", tt.name, nfCall), func(t *testing.T) {
				c.set(t, tt.mode, nfCall)
				for i, service := range []string{service4, service6} {
					client, server, gateway := c.ports[0].Addresses[i].Addr(), c.ports[1].Addresses[i].Addr(), nstest.Prefix(gateways[i]).Addr()
					to := netip.AddrPortFrom(nstest.Addr(service), c.counter.port())
					got := arrive{
						other: c.counter.count(t, c.client, to, server, 10)[client],
						self:  c.counter.count(t, c.server, to, server, 10)[gateway],
					}
					expect.Equal(t, got, want, "of 10 datagrams to %s arrive", service)
				}
			})
		}
	}
}

// What a pod sends to a service, the host translates, since its MAC is the way
// there. The answer need not come by the host.
func TestAnswersComeFromTheServiceOnlyWithNFCall(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	at := nstest.Serve(t, c.server, "udp", netip.MustParseAddrPort("[::]:0"))
	for nfCall, from := range map[bool][]string{false: {"10.44.0.11", "fd44::11"}, true: {service4, service6}} {
		c.set(t, mode{hairpin: true}, nfCall)
		for i, service := range []string{service4, service6} {
			if got := answersFrom(t, c.client, netip.AddrPortFrom(nstest.Addr(service), at.Port())); got != nstest.Addr(from[i]) {
				t.Errorf("with NFCall %t, %s answers from %s, want %s", nfCall, service, got, from[i])
			}
		}
	}
}

// answersFrom asks a server with a socket that hears anybody, and gives the source of the answer.
func answersFrom(tb testing.TB, ns *netns.NS, server netip.AddrPort) netip.Addr {
	tb.Helper()
	var conn *net.UDPConn
	inside(tb, ns, func() error {
		var err error
		conn, err = net.ListenUDP("udp", nil)
		return err
	})
	defer conn.Close()
	must.Succeed(tb, conn.SetDeadline(time.Now().Add(patience)))
	must.Succeed(tb, expect.Err(conn.WriteToUDPAddrPort([]byte("?"), server)))
	_, from, err := conn.ReadFromUDPAddrPort(make([]byte, 128))
	must.Succeed(tb, err)
	return from.Addr().Unmap()
}
