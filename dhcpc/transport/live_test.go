package transport_test

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestRawLeasesAnAddress(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	heard := listening(serve(t, l.host, l.link, nil))
	lease, err := l.client(t, nil).Acquire(soon(t))
	must.Succeed(t, err)
	expect.That(t, lease.Address.String() == clientIP+"/24" && lease.Server == addr(serverIP),
		"lease of %s by %s", lease.Address, lease.Server)
	var mac string
	nsErr := l.host.Do(func() error {
		link, err := net.InterfaceByName(l.link)
		if err == nil {
			mac = link.HardwareAddr.String()
		}
		return err
	})
	expect.That(t, nsErr == nil && lease.ServerMAC.String() == mac,
		"the server is at %s, want %s (%v)", lease.ServerMAC, mac, nsErr)
	for _, want := range []dhcpv4.MessageType{dhcpv4.MessageTypeDiscover, dhcpv4.MessageTypeRequest} {
		s := heard.next(t)
		expect.That(t, s.peer == nobody && s.kind == want, "the server heard a %s from %s, want a %s", s.kind, s.peer, want)
	}
}

func TestRawNeedsNoMACInItsConfig(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	serve(t, l.host, l.link, nil)
	cfg := l.config()
	cfg.MAC = nil
	expect.Success(t, expect.Err(l.client(t, func(c *dhcpc.Config) { c.Dial = transport.Dialer(cfg) }).Acquire(soon(t))))
}

func raw(t testing.TB, cfg *transport.Config) dhcpc.Transport[*dhcpc.Packet] {
	t.Helper()
	r := must.Of(transport.DialRaw(cfg)).Get(t)
	t.Cleanup(func() { r.Close() })
	return r
}

// packet is an answer to the client, sent as from another host's packet socket.
func packet(mac net.HardwareAddr) *dhcpc.Packet {
	m := &dhcpv4.DHCPv4{OpCode: dhcpv4.OpcodeBootReply, HWType: 1, ClientHWAddr: mac, Options: dhcpv4.Options{53: {2}}}
	return &dhcpc.Packet{
		Src: netip.MustParseAddrPort("10.9.0.1:67"), Dst: netip.MustParseAddrPort("255.255.255.255:68"), Payload: m.ToBytes(),
	}
}

func TestRawHearsNothingButAnswersToIts(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	client := raw(t, l.config())
	other := raw(t, &transport.Config{NetNS: l.host, Link: l.index})
	ctx := soon(t)
	mine := packet(clientMAC())
	for _, p := range []*dhcpc.Packet{
		packet(net.HardwareAddr{2, 0, 10, 9, 0, 8}),
		{ARP: &dhcpc.ARP{SenderMAC: dhcpc.Hex(clientMAC()), SenderIP: addr(serverIP), TargetIP: addr(clientIP)}},
		// For another host by its MAC, as on an interface in promiscuous mode.
		{Src: mine.Src, Dst: mine.Dst, DstMAC: dhcpc.Hex{2, 0, 10, 9, 0, 9}, Payload: mine.Payload},
		mine,
	} {
		must.Succeed(t, other.Send(ctx, p))
	}
	// And what the client's own namespace sends.
	must.Succeed(t, raw(t, l.config()).Send(ctx, mine))
	got, err := client.Receive(ctx, time.Time{})
	must.That(t, err == nil && string(got.Payload) == string(mine.Payload) && got.DstMAC.String() == "ff:ff:ff:ff:ff:ff",
		"received %v, %v", got, err)
	p, err := client.Receive(ctx, time.Now())
	expect.That(t, errors.Is(err, os.ErrDeadlineExceeded), "received %v, %v", p, err)
}

func TestRawHearsARPWhereItIsTold(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	cfg := l.config()
	cfg.ARP = true
	client := raw(t, cfg)
	ctx := soon(t)
	// A real host's answer to a probe.
	must.Succeed(t, client.Send(ctx, &dhcpc.Packet{ARP: &dhcpc.ARP{SenderMAC: dhcpc.Hex(clientMAC()), SenderIP: netip.IPv4Unspecified(), TargetIP: addr(serverIP)}}))
	p, err := client.Receive(ctx, time.Time{})
	expect.That(t, err == nil && p.ARP != nil && p.ARP.Reply && p.ARP.SenderIP == addr(serverIP),
		"received %+v, %v", p, err)
}

func TestWaitsEndWithTheirContext(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	udp := must.Of(transport.DialUDP(l.config())).Get(t)
	defer udp.Close()
	for _, conn := range []dhcpc.Transport[*dhcpc.Packet]{raw(t, l.config()), udp} {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Millisecond, cancel)
		expect.Is(t, expect.Err(conn.Receive(ctx, time.Time{})), context.Canceled, "%T", conn)
		_, err := conn.Receive(ctx, time.Time{})
		expect.That(t, errors.Is(err, context.Canceled), "%T: %v with a context that is done", conn, err)
		// The context of before has no hold on what comes after.
		expect.Is(t, expect.Err(conn.Receive(t.Context(), time.Now().Add(time.Millisecond))), os.ErrDeadlineExceeded, "%T", conn)
	}
}

func TestWhatIsClosedNeitherSendsNorReceives(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	udp := must.Of(transport.DialUDP(l.config())).Get(t)
	raw := must.Of(transport.DialRaw(l.config())).Get(t)
	for _, conn := range []dhcpc.Transport[*dhcpc.Packet]{raw, udp} {
		must.Succeed(t, conn.Close())
		expect.Failure(t, conn.Send(t.Context(), packet(clientMAC())), "%T sends", conn)
		p, err := conn.Receive(t.Context(), time.Time{})
		expect.That(t, err != nil, "%T receives %v, %v", conn, p, err)
	}
}

func TestErrorsOfOpening(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	for name, tt := range map[string]struct {
		cfg  transport.Config
		want error
	}{
		"no such link":            {transport.Config{NetNS: l.pod, Link: 4711, MAC: clientMAC()}, fs.ErrNotExist},
		"no such link and no MAC": {transport.Config{NetNS: l.pod, Link: 4711}, nil},
		"no link":                 {transport.Config{NetNS: l.pod, MAC: clientMAC()}, nil},
		"a MAC of 5 bytes":        {transport.Config{NetNS: l.pod, Link: l.eth0, MAC: clientMAC()[:5]}, nil},
	} {
		r, err := transport.DialRaw(&tt.cfg)
		expect.That(t, err != nil && (tt.want == nil || errors.Is(err, tt.want)), "%s: %v, %v", name, r, err)
		// A UDP socket binds to an index that is none's, and fails when it sends.
		if u, err := transport.DialUDP(&tt.cfg); err == nil {
			expect.Failure(t, u.Send(t.Context(), packet(clientMAC())), "%s: sent", name)
			u.Close()
		}
	}
	for _, local := range []netip.Addr{{}, addr(clientIP)} {
		dial := transport.Dialer(&transport.Config{NetNS: l.pod, Link: 4711})
		conn, err := dial(t.Context(), local)
		expect.That(t, err != nil && conn == nil, "dialled %v, %v", conn, err)
	}
}

func TestALinkThatIsDownIsAnErrorAtOnce(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	nstest.Run(t, l.pod, "ip", "link", "set", "eth0", "down")
	expect.Is(t, expect.Err(l.client(t, nil).Acquire(soon(t))), unix.ENETDOWN)
}

func TestUDPLeasesAnAddress(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	nstest.Sysctl(t, l.pod, "net/ipv4/conf/all/rp_filter", "0")
	nstest.Sysctl(t, l.pod, "net/ipv4/conf/eth0/rp_filter", "0")
	heard := serve(t, l.host, l.link, nil)
	lease, err := l.client(t, func(c *dhcpc.Config) {
		c.Broadcast = true
		c.Dial = func(ctx context.Context, _ netip.Addr) (dhcpc.Transport[*dhcpc.Packet], error) {
			return transport.DialUDP(l.config())
		}
	}).Acquire(soon(t))
	must.Succeed(t, err)
	if s := <-heard; s.peer != nobody || !s.m.IsBroadcast() {
		t.Errorf("the server heard %s, broadcast %v", s.peer, s.m.IsBroadcast())
	}
	expect.Equal(t, len(lease.ServerMAC), 0, "a UDP socket gave the MAC address %s", lease.ServerMAC)
	if u, _ := transport.DialUDP(l.config()); u != nil {
		defer u.Close()
		expect.Is(t, u.Send(t.Context(), &dhcpc.Packet{ARP: &dhcpc.ARP{}}), unix.EOPNOTSUPP, "sent ARP")
	}
}

func TestAProgramThatHasThePortToItself(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	var other net.PacketConn
	must.Succeed(t, l.pod.Do(func() error {
		var err error
		other, err = net.ListenPacket("udp4", "0.0.0.0:68")
		return err
	}))
	defer other.Close()
	u, err := transport.DialUDP(l.config())
	expect.That(t, errors.Is(err, unix.EADDRINUSE), "%v, %v, want %v", u, err, unix.EADDRINUSE)
}

// The whole of it over real sockets and in real time, if a short one.
func TestRunRenews(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	// As often as a client follows, and for an hour, since what lasts for seconds runs out
	// on a slow machine.
	heard := listening(serve(t, l.host, l.link, func(_, resp *dhcpv4.DHCPv4) {
		resp.UpdateOption(dhcpv4.OptRenewTimeValue(2 * time.Second))
		resp.UpdateOption(dhcpv4.OptRebindingTimeValue(4 * time.Second))
	}))
	c := l.client(t, nil)
	first := leased(t, l, c, heard)
	enough := errors.New("enough")
	renewals := 0
	err := c.Run(soon(t), first, func(old, next *dhcpc.Lease) error {
		expect.That(t, old != nil && next != nil && next.Address == first.Address && next.Obtained.After(old.Obtained),
			"from %+v to %+v", old, next)
		if renewals++; renewals == 2 {
			return enough
		}
		return nil
	})
	must.That(t, errors.Is(err, enough), "%v", err)
	for range renewals {
		s := heard.next(t)
		expect.That(t, s.kind == dhcpv4.MessageTypeRequest && s.peer != nobody, "the server heard a %s from %s", s.kind, s.peer)
	}
}

// Several clients on one link, all but one with a MAC address that the link does not have, each hear their own answers:
// the server sends unicast to chaddr, and renewals to the leased address.
func TestClientsOnOneLinkHearTheirOwn(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	at := func(mac net.HardwareAddr) string { return netip.AddrFrom4([4]byte{10, 9, 0, mac[5]}).String() }
	var unbound atomic.Int32
	var all sync.WaitGroup // the renewals: no answer leaves before each client has sent one
	all.Add(3)
	serve(t, l.host, l.link, func(req, resp *dhcpv4.DHCPv4) {
		resp.YourIPAddr = net.ParseIP(at(req.ClientHWAddr))
		if !req.ClientIPAddr.IsUnspecified() {
			all.Done()
			all.Wait()
			return
		}
		// Unicast, as most servers do: the library's server would broadcast it.
		unbound.Add(1)
		p := &dhcpc.Packet{
			Src: netip.AddrPortFrom(addr(serverIP), dhcpv4.ServerPort), Dst: netip.AddrPortFrom(addr(at(req.ClientHWAddr)), dhcpv4.ClientPort),
			DstMAC: dhcpc.Hex(req.ClientHWAddr), Payload: resp.ToBytes(),
		}
		expect.Success(t, raw(t, &transport.Config{NetNS: l.host, Link: l.index}).Send(t.Context(), p))
		deaf(nil, resp)
	})
	var clients []*dhcpc.Client
	var leases []*dhcpc.Lease
	for i := range byte(3) {
		mac := net.HardwareAddr{2, 0, 10, 9, 0, 7 + i}
		c := l.client(t, func(cfg *dhcpc.Config) {
			cfg.MAC, cfg.ClientID = mac, nil
			cfg.Dial = transport.Dialer(&transport.Config{NetNS: l.pod, Link: l.eth0, MAC: mac})
		})
		lease := must.Of(c.Acquire(soon(t))).Get(t)
		expect.Equal(t, lease.Address.Addr().String(), at(mac), "leased address")
		l.apply(t, lease)
		clients, leases = append(clients, c), append(leases, lease)
	}
	// All renew at once, each by its first REQUEST, which goes to the server alone.
	nstest.NoErrors(t, "renewal", nstest.AtOnce(clients, func(i int, c *dhcpc.Client) error {
		ctx, cancel := context.WithTimeout(t.Context(), 9*time.Second)
		defer cancel()
		enough := errors.New("enough")
		err := c.Run(ctx, shifted(leases[i], leases[i].Renew), func(_, next *dhcpc.Lease) error {
			expect.That(t, next != nil && next.Address == leases[i].Address, "client %d has %+v", i, next)
			return enough
		})
		if errors.Is(err, enough) {
			return nil
		}
		return err
	}))
	expect.That(t, unbound.Load() >= 6, "%d answers went to clients without an address", unbound.Load())
	// The membership ends with the socket.
	must.Until(t, "no promiscuous mode", func() bool {
		return !strings.Contains(nstest.Run(t, l.pod, "ip", "-d", "link", "show", "eth0"), "promiscuity 1")
	})
}

// leased gives the pod an address by DHCP, and empties what the server has heard.
func leased(t *testing.T, l *lan, c *dhcpc.Client, heard *hearing) *dhcpc.Lease {
	t.Helper()
	lease := must.Of(c.Acquire(soon(t))).Get(t)
	l.apply(t, lease)
	heard.forget()
	return lease
}

// shifted makes a lease that is as old as one of its times.
func shifted(l *dhcpc.Lease, at time.Time) *dhcpc.Lease {
	old := *l
	by := time.Since(at)
	old.Obtained, old.Renew, old.Rebind, old.Expire = l.Obtained.Add(by), l.Renew.Add(by), l.Rebind.Add(by), l.Expire.Add(by)
	return &old
}

// renewed is the lease that a client has of the first thing that happens to one.
func renewed(t *testing.T, c *dhcpc.Client, l *dhcpc.Lease) *dhcpc.Lease {
	t.Helper()
	ctx, cancel := context.WithCancel(soon(t))
	defer cancel()
	var got *dhcpc.Lease
	err := c.Run(ctx, l, func(_, next *dhcpc.Lease) error {
		got = next
		cancel()
		return nil
	})
	must.That(t, errors.Is(err, context.Canceled) && got != nil, "%v, %v", got, err)
	return got
}

func TestRenewalsComeFromTheLeasedAddress(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	heard := listening(serve(t, l.host, l.link, nil))
	c := l.client(t, nil)
	lease := leased(t, l, c, heard)
	// Another address, which the kernel would prefer as a source.
	nstest.Run(t, l.pod, "ip", "address", "add", "10.9.0.2/28", "dev", "eth0")
	for name, at := range map[string]time.Time{"renew": lease.Renew, "rebind": lease.Rebind} {
		got := renewed(t, c, shifted(lease, at))
		expect.That(t, got.Obtained.After(lease.Obtained) && got.ServerMAC.String() == lease.ServerMAC.String(),
			"%s: got %+v", name, got)
		s := heard.next(t)
		if s.peer != clientIP+":68" || !s.m.ClientIPAddr.Equal(net.ParseIP(clientIP)) {
			t.Errorf("%s: the server heard %s from %s", name, s.m.Summary(), s.peer)
		}
	}
}

func TestReleaseFromTheNamespace(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	heard := listening(serve(t, l.host, l.link, nil))
	c := l.client(t, nil)
	lease := leased(t, l, c, heard)
	must.Succeed(t, c.Release(t.Context(), lease))
	s := heard.next(t)
	expect.That(t, s.kind == dhcpv4.MessageTypeRelease && s.peer == clientIP+":68", "the server heard %s from %s", s.kind, s.peer)
	nstest.Run(t, l.pod, "ip", "address", "flush", "dev", "eth0")
	expect.Failure(t, c.Release(t.Context(), lease), "sent from an address that is gone")
}

func TestAnotherHostHasTheAddress(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	heard := serve(t, l.host, l.link, nil)
	nstest.Run(t, l.host, "ip", "address", "add", clientIP+"/32", "dev", l.link)
	cfg := l.config()
	cfg.ARP = true
	ctx, cancel := context.WithCancel(soon(t))
	go func() {
		defer cancel()
		for {
			select {
			case s := <-heard:
				if s.kind == dhcpv4.MessageTypeDecline {
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	_, err := l.client(t, func(c *dhcpc.Config) {
		c.DetectConflicts, c.Dial = true, transport.Dialer(cfg)
	}).Acquire(ctx)
	expect.That(t, errors.Is(err, dhcpc.ErrDeclined) && errors.Is(err, context.Canceled),
		"error %v, want %v until the context ended", err, dhcpc.ErrDeclined)
}

// Answers that are as long as a packet may be arrive; longer ones come in fragments,
// which a packet socket does not put together.
func TestLongAnswers(t *testing.T) {
	t.Parallel()
	for size, ok := range map[int]bool{1472: true, 1473: false} {
		l := newLAN(t)
		serve(t, l.host, l.link, func(_, resp *dhcpv4.DHCPv4) {
			for code := uint8(224); len(resp.ToBytes()) < size; code++ {
				missing := size - len(resp.ToBytes()) - 2
				resp.Options[code] = make([]byte, min(max(missing, 0), 250))
			}
			if got := len(resp.ToBytes()); got != size {
				resp.Options[224] = resp.Options[224][:250-(got-size)]
			}
		})
		_, err := l.client(t, func(c *dhcpc.Config) {
			if !ok {
				c.Timeout = 2 * time.Second
			}
		}).Acquire(soon(t))
		expect.That(t, ok == (err == nil) && (ok || errors.Is(err, dhcpc.ErrTimeout)),
			"answers of %d bytes: %v", size, err)
	}
}

func TestServerThatIsAway(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	var sent atomic.Int32
	ctx, cancel := context.WithCancel(soon(t))
	serve(t, l.host, l.link, func(_, resp *dhcpv4.DHCPv4) {
		deaf(nil, resp)
		if sent.Add(1) > 3 {
			cancel()
		}
	})
	_, err := l.client(t, func(c *dhcpc.Config) { c.Timeout, c.Retransmit = 300*time.Millisecond, 20*time.Millisecond }).Acquire(soon(t))
	expect.That(t, errors.Is(err, dhcpc.ErrTimeout) && strings.Contains(err.Error(), "no answer to "), "error %v", err)
	// Again and again, however long that takes.
	_, err = l.client(t, func(c *dhcpc.Config) { c.Retransmit = 20 * time.Millisecond }).Acquire(ctx)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, the server heard %d messages", err, sent.Load())
	}
}
