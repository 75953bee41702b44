package transport_test

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/dhcp6"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// lan6 is a bridge with a server in a namespace of its own at one port and a pod at another.
type lan6 struct {
	host, pod, server *netns.NS
	eth0, port        int // the pod's end of its link, and the host's
}

const server6, linkLocal6 = "fd00:9::1", "fe80::7"

func newLAN6(t testing.TB) *lan6 {
	t.Helper()
	l := &lan6{host: nstest.New(t), pod: nstest.New(t), server: nstest.New(t)}
	nstest.Run(t, l.host, "ip", "link", "add", "br0", "type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
	nstest.Run(t, l.host, "ip", "link", "set", "br0", "up")
	l.eth0, l.port = nstest.Veth(t, l.pod, "eth0", l.host, "pod")
	nstest.Veth(t, l.server, "eth0", l.host, "server")
	for _, port := range []string{"pod", "server"} {
		nstest.Run(t, l.host, "ip", "link", "set", port, "master", "br0")
	}
	nstest.Run(t, l.server, "ip", "address", "add", server6+"/64", "dev", "eth0", "nodad")
	nstest.Run(t, l.server, "ip", "link", "set", "lo", "up")
	nstest.Run(t, l.server, "ip", "address", "add", "fe80::1/64", "dev", "eth0", "nodad")
	nstest.Run(t, l.pod, "ip", "address", "add", linkLocal6+"/64", "dev", "eth0", "nodad")
	return l
}

func (l *lan6) witness(t testing.TB) *transport.Config {
	mac := must.Of(net.ParseMAC(nstest.MAC(t, l.pod, "eth0"))).Get(t)
	return &transport.Config{NetNS: l.host, Link: l.port, MAC: mac}
}

// lease6 asks for an address, and hears by conn what comes of it in some seconds.
func (l *lan6) lease6(t testing.TB, conn dhcpc.Transport[[]byte]) (got *dhcp6.Lease6) {
	t.Helper()
	m, err := dhcp6.NewMachine(&dhcp6.Config{DUID: dhcp6.DUID([16]byte{9, 7}), IAID: 7, RapidCommit: true})
	must.Succeed(t, err)
	s, e := m.Start(time.Now(), 1), dhcp6.Event{}
	for limit := time.Now().Add(3 * time.Second); got == nil && time.Now().Before(limit); {
		next, out := m.Step(s, time.Now(), e)
		s, e, got = next, dhcp6.Event{}, out.Bound
		if out.Send != nil {
			err = conn.Send(t.Context(), out.Send)
		}
		if err == nil && got == nil {
			e.Message, err = conn.Receive(t.Context(), s.Wake())
		}
		must.That(t, err == nil || errors.Is(err, os.ErrDeadlineExceeded), "%v", err)
		err = nil
	}
	return got
}

// serve6 answers every SOLICIT with an address at once.
func serve6(t testing.TB, ns *netns.NS, link string, address netip.Addr) {
	t.Helper()
	var conn net.PacketConn
	err := ns.Do(func() error {
		index, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		conn, err = net.ListenMulticastUDP("udp6", index, &net.UDPAddr{IP: dhcpv6.AllDHCPRelayAgentsAndServers, Port: dhcpv6.DefaultServerPort, Zone: link})
		return err
	})
	must.Succeed(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 1500)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			m, err := dhcpv6.MessageFromBytes(buf[:n])
			if err != nil || m.MessageType != dhcpv6.MessageTypeSolicit {
				continue
			}
			reply, err := dhcpv6.NewReplyFromMessage(m, dhcpv6.WithServerID(&dhcpv6.DUIDUUID{}), dhcpv6.WithOption(&dhcpv6.OptIANA{
				IaId: m.Options.OneIANA().IaId, Options: dhcpv6.IdentityOptions{Options: []dhcpv6.Option{
					&dhcpv6.OptIAAddress{IPv6Addr: address.AsSlice(), PreferredLifetime: time.Hour, ValidLifetime: time.Hour}}}}))
			if err != nil {
				t.Error(err)
				return
			}
			reply.AddOption(&dhcpv6.OptionGeneric{OptionCode: dhcpv6.OptionRapidCommit})
			_, _ = conn.WriteTo(reply.ToBytes(), from)
		}
	}()
	t.Cleanup(func() { conn.Close(); <-done })
}

func (l *lan6) udp6() (dhcpc.Transport[[]byte], error) {
	return transport.DialUDP6(&transport.Config{NetNS: l.pod, Link: l.eth0})
}

// A pod's own server gives it the router's address. A client that hears in the pod believes it.
func TestAPodThatAnswersItselfByDHCPv6IsNotBelieved(t *testing.T) {
	t.Parallel()
	for _, way := range nstest.Diversions() {
		nstest.RunParallel(t, way, func(t *testing.T) {
			l := newLAN6(t)
			hears := l.witness(t)
			rogue := nstest.Divert(t, l.pod, "eth0", way)
			l.eth0 = nstest.Index(t, l.pod, "eth0")
			nstest.Run(t, l.pod, "ip", "address", "replace", linkLocal6+"/64", "dev", "eth0", "nodad")
			nstest.Run(t, rogue, "ip", "address", "add", "fe80::66/64", "dev", "eth0", "nodad")
			forged := netip.MustParseAddr("fd00:9::66")
			serve6(t, rogue, "eth0", forged)
			conn := must.Of(l.udp6()).Get(t)
			lease := l.lease6(t, conn)
			must.That(t, lease != nil && lease.Address == forged, "the pod's server did not answer: %v", lease)
			must.Succeed(t, conn.Close())
			witness := must.Of(transport.DialWitness6(hears, l.udp6)).Get(t)
			defer witness.Close()
			lease = l.lease6(t, witness)
			expect.That(t, lease == nil, "the pod leased %v by its own word", lease)
		})
	}
}

func TestAWitnessOfIPv6HearsWhatIsForItsClientAlone(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	w, err := transport.DialWitness6(l.witness(t), l.udp6)
	must.Succeed(t, err)
	t.Cleanup(func() { w.Close() })
	say := func(ns *netns.NS, to string, port int, text string) {
		t.Helper()
		must.Succeed(t, ns.Do(func() error {
			// By number: package net remembers the names of one namespace.
			link, err := net.InterfaceByName("eth0")
			if err != nil {
				return err
			}
			conn, err := net.DialUDP("udp6", nil, &net.UDPAddr{IP: net.ParseIP(to), Port: port, Zone: strconv.Itoa(link.Index)})
			if err != nil {
				return err
			}
			defer conn.Close()
			_, err = conn.Write([]byte(text))
			return err
		}))
	}
	say(l.server, dhcpv6.AllDHCPRelayAgentsAndServers.String(), dhcpv6.DefaultClientPort, "to all")
	say(l.server, linkLocal6, dhcpv6.DefaultServerPort, "to another port")
	say(l.pod, dhcpv6.AllDHCPRelayAgentsAndServers.String(), dhcpv6.DefaultClientPort, "by the pod")
	say(l.server, linkLocal6, dhcpv6.DefaultClientPort, "to the client")
	got, err := w.Receive(soon(t), time.Time{})
	expect.That(t, err == nil && string(got) == "to the client", "%q, %v", got, err)
	if got, err := w.Receive(soon(t), time.Now()); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%q, %v", got, err)
	}
}

func TestDialingIPv6SaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	for name, err := range map[string]error{
		"no configuration": second6(transport.DialUDP6(nil)), "no link": second6(transport.DialUDP6(&transport.Config{})),
		"a message without a link":   transport.Send6(nil, nil),
		"a message that is too long": transport.Send6(&transport.Config{NetNS: l.pod, Link: l.eth0}, make([]byte, 1<<16)),
		"a witness of nothing":       second6(transport.DialWitness6(nil, l.udp6)),
	} {
		expect.Is(t, err, tombolo.ErrInvalid, "%s", name)
	}
	expect.Failure(t, expect.Err(transport.DialWitness6(&transport.Config{Link: 1}, l.udp6)), "a witness without the client's MAC address")
	// A program of the pod's has the port, and shares it with nobody.
	var conn *net.UDPConn
	must.Succeed(t, l.pod.Do(func() error {
		var err error
		conn, err = net.ListenUDP("udp6", &net.UDPAddr{Port: dhcpv6.DefaultClientPort})
		return err
	}))
	defer conn.Close()
	expect.Is(t, expect.Err(transport.DialUDP6(&transport.Config{NetNS: l.pod, Link: l.eth0})), unix.EADDRINUSE, "of a port that is in use")
}

func second6[T any](_ T, err error) error { return err }
