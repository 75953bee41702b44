package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/route"
)

// lan is a host with a bridge, and another machine on it for a server: in namespaces,
// with packets.
type lan struct {
	*testing.T
	host, remote *netns.NS
	bridge       string
	dir          *lease.Store
	state        *state.Dir // nil: the keeper is used without the plugin
	node         node       // nil: the kernel
}

func newLAN(t *testing.T) *lan {
	t.Helper()
	dir := must.Of(lease.Open(inMemory(t) + "/leases")).Get(t)
	return (&lan{T: t, host: nstest.New(t), dir: dir}).another(0)
}

// another makes one more network of the same host.
func (l *lan) another(i int) *lan {
	l.Helper()
	o := &lan{T: l.T, host: l.host, remote: nstest.New(l), bridge: fmt.Sprintf("br%d", i), dir: l.dir}
	port := fmt.Sprintf("lan%d", i)
	nstest.Veth(l, o.host, port, o.remote, "eth0")
	nstest.Run(l, o.host, "ip", "link", "add", o.bridge, "type", "bridge", "forward_delay", "0")
	nstest.Run(l, o.host, "ip", "link", "set", port, "master", o.bridge)
	nstest.Run(l, o.host, "ip", "link", "set", o.bridge, "up")
	nstest.Run(l, o.remote, "ip", "address", "add", "10.9.0.1/16", "dev", "eth0")
	return o
}

// testPod is a pod that has leased its address.
type testPod struct {
	ns     *netns.NS
	record *lease.Record
	closed bool
}

// connect makes a pod without an address.
func (l *lan) connect(i int) *testPod {
	l.Helper()
	ns := must.Of(netns.New()).Get(l)
	p := &testPod{ns: ns}
	l.Cleanup(p.die)
	path := nstest.Path(l, ns)
	cookie := must.Of(ns.Cookie()).Get(l)
	mac := dhcpc.Hex{2, 0, 0, 9, byte(i >> 8), byte(i)}
	host := fmt.Sprintf("veth%d", i)
	nstest.Run(l, l.host, "ip", "link", "add", host, "up", "master", l.bridge, "type", "veth", "peer", "name", "eth0", "address", mac.String(), "netns", path)
	nstest.Run(l, l.host, "ip", "link", "set", host, "alias", endpoint.Alias(ident.Hash("lan", fmt.Sprintf("c%d", i), "eth0"), "lan", nil))
	conn := must.Of(nl.Dial(unix.NETLINK_ROUTE, ns)).Get(l)
	defer conn.Close()
	var b nl.Batch
	link.Request{Name: "eth0", Flags: unix.IFF_UP, Change: unix.IFF_UP}.Set(&b, "set link up", "eth0")
	must.Succeed(l, conn.Execute(&b))
	conn.RefreshCarrier("eth0")
	hostConn := must.Of(nl.Dial(unix.NETLINK_ROUTE, l.host)).Get(l)
	defer hostConn.Close()
	hostConn.RefreshCarrier(host)
	boot := must.Of(state.BootID()).Get(l)
	p.record = &lease.Record{
		State: lease.Adding, Network: "lan", ContainerID: fmt.Sprintf("c%d", i), IfName: "eth0", NetNS: path, NetNSCookie: cookie,
		Boot: boot, HostIf: host, Bridge: l.bridge, Client: lease.Client{MAC: mac, Config: dhcpc.Config{ClientID: append(dhcpc.Hex{0}, fmt.Sprintf("c%d", i)...)}},
	}
	return p
}

// die ends the pod's namespace, as far as the test holds it: its path is another's.
func (p *testPod) die() {
	if !p.closed {
		p.closed = true
		p.ns.Close()
	}
}

// add is what an ADD does: lease, apply, record.
func (l *lan) add(i int) *testPod {
	l.Helper()
	p := l.connect(i)
	l.lease(p)
	return p
}

// lease is the part of an ADD that comes after the link.
func (l *lan) lease(p *testPod) {
	l.Helper()
	cfg := p.record.Client.DHCPConfig(nil)
	cfg.Retransmit, cfg.Timeout = 500*time.Millisecond, longEnough
	pod := l.enter(p)
	defer pod.close()
	cfg.Dial = pod.dial
	client := must.Of(dhcpc.New(cfg)).Get(l)
	got := must.Of(client.Acquire(l.Context())).Get(l)
	r := p.record
	left := got.Left(now())
	must.Succeed(l, pod.apply(r.Policy.Apply(got), left, left))
	r.State, r.Lease, r.Applied = lease.Bound, got, r.Policy.Apply(got)
	l.write(r)
}

// kernel is the host, with the plugin's attachments if there are any.
func (l *lan) kernel() kernel {
	l.Helper()
	k := kernel{host: l.host}
	if l.state == nil {
		return k
	}
	var err error
	k.network, err = network.Open(l.Context(), &network.Config{
		NetNS: l.host, StateDir: l.state.Path(), LeaseDir: l.dir.Path(),
	})
	must.Succeed(l, err)
	return k
}

func (l *lan) enter(p *testPod) pod {
	l.Helper()
	pod := must.Of(l.kernel().enter(p.record)).Get(l)
	return pod
}

func (l *lan) write(r *lease.Record) {
	l.Helper()
	h, err := l.dir.Lock(context.Background(), r.Hash())
	if err == nil {
		err = errors.Join(h.Create(r), h.Close())
	}
	must.Succeed(l, err)
}

// due makes a record's lease one that is to be renewed.
func due(r *lease.Record) {
	ago := r.Lease.Renew.Sub(r.Lease.Obtained) + time.Second
	r.Lease.Obtained, r.Lease.Renew = r.Lease.Obtained.Add(-ago), r.Lease.Renew.Add(-ago)
}

// keeper runs a keeper on the host until the function that it returns is called.
func (l *lan) keeper() (stop func()) {
	l.Helper()
	k, err := New(&Config{Leases: l.dir, State: l.state, Log: slog.New(slog.NewTextHandler(l.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))})
	must.Succeed(l, err)
	k.node, k.host = l.kernel(), l.host
	if l.node != nil {
		k.node = l.node
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	ready := make(chan struct{})
	k.Ready = func() { close(ready) }
	go func() { done <- k.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			l.Errorf("the keeper ended with %v", err)
		}
	})
	l.Cleanup(stop)
	select {
	case <-ready:
	case err := <-done:
		l.Fatalf("the keeper ended with %v", err)
	}
	return stop
}

// longEnough is for machines of any speed: only a test that fails waits so long.
const longEnough = 3 * time.Minute

// until waits for something that is about to happen.
func until(t *testing.T, what string, happened func() bool) {
	t.Helper()
	deadline := time.Now().Add(longEnough)
	poll := time.NewTicker(5 * time.Millisecond)
	defer poll.Stop()
	for !happened() {
		if time.Now().After(deadline) {
			t.Fatalf("did not happen: %s", what)
		}
		<-poll.C
	}
}

// load gives a pod's record as it is now, nil if it is gone.
func (l *lan) load(p *testPod) *lease.Record {
	r, err := l.dir.Load(p.record.Hash())
	if err != nil {
		return nil
	}
	return r
}

// addresses gives those of a pod, with the seconds left: -1 is for ever.
func (l *lan) addresses(p *testPod) map[netip.Prefix]time.Duration {
	l.Helper()
	conn := must.Of(addr.Dial(p.ns)).Get(l)
	defer conn.Close()
	list := must.Of(conn.List(l.Context(), addr.Filter{Family: unix.AF_INET})).Get(l)
	got := map[netip.Prefix]time.Duration{}
	for _, a := range list {
		got[a.Prefix] = -1
		if a.Valid != nil {
			got[a.Prefix] = *a.Valid
		}
	}
	return got
}

func (l *lan) routes(p *testPod) string {
	l.Helper()
	conn := must.Of(route.Dial(p.ns)).Get(l)
	defer conn.Close()
	list, err := conn.List(l.Context(), route.Filter{Family: unix.AF_INET, Table: unix.RT_TABLE_MAIN, Protocol: route.ProtocolTombolo})
	must.Succeed(l, err)
	var text []string
	for _, r := range list {
		text = append(text, dhcpc.Route{Dst: r.Dst, Gateway: r.Gateway}.String())
	}
	return strings.Join(text, ", ")
}

// server is a DHCP server with leases as short as a test wants.
type server struct {
	conn net.PacketConn
	// raw answers without ARP: the kernel has room for 1,024 neighbours in all of its
	// namespaces together.
	raw  dhcpc.Transport[*dhcpc.Packet]
	done chan struct{}

	mu      sync.Mutex
	lease   time.Duration
	renew   time.Duration         // T1, so that what is renewed often does not run out on a slow machine; 0 is half of the lease
	given   map[string]netip.Addr // by client identifier
	heard   map[string]int        // by kind
	refuse  bool                  // NAK the next renewal
	early   []string              // see tooEarly
	dir     *lease.Store
	base    netip.Addr // the next address
	silence bool
	from    netip.AddrPort // not valid: its own
}

func (l *lan) serve(duration time.Duration) *server { l.Helper(); return l.serveIn(l.remote, duration) }

func (l *lan) serveIn(ns *netns.NS, duration time.Duration) *server {
	l.Helper()
	s := &server{lease: duration, dir: l.dir, given: map[string]netip.Addr{}, heard: map[string]int{}, base: netip.MustParseAddr("10.9.1.1"), done: make(chan struct{})}
	listen := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			expect.Success(l, unix.BindToDevice(int(fd), "eth0"))
		})
	}}
	err := ns.Do(func() error {
		var err error
		s.conn, err = listen.ListenPacket(l.Context(), "udp4", "0.0.0.0:67")
		return err
	})
	must.Succeed(l, err)
	s.raw, err = transport.DialRaw(&transport.Config{NetNS: ns, Link: nstest.Index(l, ns, "eth0")})
	must.Succeed(l, err)
	go s.run()
	l.Cleanup(func() { s.conn.Close(); <-s.done; s.raw.Close() })
	return s
}

func (s *server) run() {
	defer close(s.done)
	buf := make([]byte, 2048)
	for {
		n, _, err := s.conn.ReadFrom(buf)
		if err != nil {
			return
		}
		d, err := dhcpv4.FromBytes(buf[:n])
		if err != nil {
			continue
		}
		a := s.answer(d)
		if a == nil {
			continue
		}
		to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{255, 255, 255, 255}), dhcpv4.ClientPort)
		var mac dhcpc.Hex
		if ciaddr, _ := netip.AddrFromSlice(d.ClientIPAddr.To4()); !ciaddr.IsUnspecified() && a.MessageType() == dhcpv4.MessageTypeAck {
			to, mac = netip.AddrPortFrom(ciaddr, dhcpv4.ClientPort), dhcpc.Hex(d.ClientHWAddr)
		}
		from := netip.MustParseAddrPort("10.9.0.1:67")
		s.set(func(s *server) {
			if s.from.IsValid() { // no machine elsewhere can broadcast on this LAN
				pod, _ := netip.AddrFromSlice(a.YourIPAddr.To4())
				from, to, mac = s.from, netip.AddrPortFrom(pod, dhcpv4.ClientPort), dhcpc.Hex(d.ClientHWAddr)
			}
		})
		// As lossy as a network may be.
		_ = s.raw.Send(context.Background(), &dhcpc.Packet{Src: from, Dst: to, DstMAC: mac, Payload: a.ToBytes()})
	}
}

func (s *server) answer(d *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
	s.mu.Lock()
	defer s.mu.Unlock()
	kind := d.MessageType()
	s.heard[kind.String()]++
	id := string(d.Options.Get(dhcpv4.OptionClientIdentifier))
	s.watch(d)
	if kind == dhcpv4.MessageTypeRelease {
		delete(s.given, id)
	}
	if s.silence || kind != dhcpv4.MessageTypeDiscover && kind != dhcpv4.MessageTypeRequest {
		return nil
	}
	if _, ok := s.given[id]; !ok {
		s.given[id] = s.base
		s.base = s.base.Next()
	}
	own := s.given[id]
	asked := d.ClientIPAddr
	if r := d.RequestedIPAddress(); r != nil {
		asked = r
	}
	answer := dhcpv4.MessageTypeOffer
	if kind == dhcpv4.MessageTypeRequest {
		answer = dhcpv4.MessageTypeAck
		if s.refuse && d.ServerIdentifier() == nil || !slices.Equal(asked.To4(), own.AsSlice()) {
			answer = dhcpv4.MessageTypeNak
		}
	}
	me := net.IPv4(10, 9, 0, 1)
	r, err := dhcpv4.NewReplyFromRequest(d, dhcpv4.WithMessageType(answer), dhcpv4.WithOption(dhcpv4.OptServerIdentifier(me)))
	if err != nil {
		return nil
	}
	if answer == dhcpv4.MessageTypeNak {
		s.refuse = false
		delete(s.given, id)
		s.heard["sent NAK"]++
		return r
	}
	r.YourIPAddr = own.AsSlice()
	r.UpdateOption(dhcpv4.OptSubnetMask(net.CIDRMask(16, 32)))
	r.UpdateOption(dhcpv4.OptRouter(me))
	r.UpdateOption(dhcpv4.OptIPAddressLeaseTime(s.lease))
	if s.renew != 0 {
		r.UpdateOption(dhcpv4.OptRenewTimeValue(s.renew))
		r.UpdateOption(dhcpv4.OptRebindingTimeValue(3 * s.renew))
	}
	return r
}

// watch notes what only a client without a lease has any business to send: a DISCOVER,
// or a REQUEST for another address. Whether it has one is what its record says, and not a
// matter of how long anything took: a record is never ahead of what its client has sent.
func (s *server) watch(d *dhcpv4.DHCPv4) {
	id := string(d.Options.Get(dhcpv4.OptionClientIdentifier))
	hash := ident.Hash("lan", strings.TrimPrefix(id, "\x00"), "eth0")
	r, err := s.dir.Load(hash)
	if err != nil || r.State != lease.Bound || r.Lease.Left(time.Now()) == 0 {
		return
	}
	asked := d.ClientIPAddr
	if a := d.RequestedIPAddress(); a != nil {
		asked = a
	}
	kind := d.MessageType()
	other := kind == dhcpv4.MessageTypeRequest && !slices.Equal(asked.To4(), r.Lease.Address.Addr().AsSlice())
	if kind == dhcpv4.MessageTypeDiscover || other {
		s.early = append(s.early, fmt.Sprintf("%s of %q for %s, with %v left of %s", kind, id, asked, r.Lease.Left(time.Now()), r.Lease.Address))
	}
}

// tooEarly tells of clients that asked for an address while they had one.
func (s *server) tooEarly() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.early)
}

func (s *server) count(kind string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.heard[kind]
}

func (s *server) set(fn func(*server)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fn(s)
}
