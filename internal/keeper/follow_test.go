package keeper

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
)

const (
	firstAddress = "10.9.1.1"
	nextAddress  = "10.9.2.1"
	hostAddress  = "10.9.0.2"
	clientsHost  = "192.0.2.1" // the host's, to the client
	clientsOwn   = "192.0.2.2"
)

// movable is a LAN with a pod that the plugin attached, published, masquerades and
// guards, and a client elsewhere.
type movable struct {
	*lan
	pod    *testPod
	client *netns.NS
	fw     *nft.Conn
	before *state.Attachment // see half
}

func newMovable(t *testing.T, length time.Duration) (*movable, *server) {
	t.Helper()
	l := newLAN(t)
	var err error
	if l.state, err = state.Open(inMemory(t) + "/state"); err != nil {
		t.Fatal(err)
	}
	m := &movable{lan: l, client: nstest.New(t)}
	nstest.Run(t, l.host, "ip", "address", "add", hostAddress+"/16", "dev", l.bridge)
	nstest.Veth(t, l.host, "client0", m.client, "eth0")
	nstest.Run(t, l.host, "ip", "address", "add", clientsHost+"/24", "dev", "client0")
	nstest.Run(t, m.client, "ip", "address", "add", clientsOwn+"/24", "dev", "eth0")
	nstest.Sysctl(t, l.host, "net/ipv4/ip_forward", "1")
	s := l.serve(length)
	p := l.connect(1)
	p.record.Policy.Gateway = netip.MustParseAddr(hostAddress)
	l.lease(p)
	m.pod = p
	m.attach()
	nstest.Serve(t, p.ns, "tcp4", netip.MustParseAddrPort("0.0.0.0:80"))
	nstest.Serve(t, m.client, "tcp4", netip.MustParseAddrPort(clientsOwn+":99"))
	return m, s
}

// attach does what an ADD does besides the lease.
func (m *movable) attach() {
	m.Helper()
	r := m.pod.record
	a := &state.Attachment{
		Network: r.Network, ContainerID: r.ContainerID, IfName: r.IfName, NetNSCookie: r.NetNSCookie, HostIf: r.HostIf, Bridge: r.Bridge,
		MAC: state.MAC(r.Client.MAC), Addresses: []ipam.Address{{Prefix: r.Lease.Address, Gateway: r.Policy.Gateway}},
		Up: true, Masquerade: true, Guard: nft.GuardAddresses, Published: []state.Published{{Port: nft.Port{Protocol: nft.TCP, HostPort: 8080, PodPort: 80}}},
		IPAMType: endpoint.Leased, DataDir: m.dir.Path(),
	}
	n := &state.Network{Name: r.Network, Bridge: r.Bridge, Masquerade: true, Guard: true}
	err := m.host.Do(func() error {
		lock, epoch, err := m.state.Enter(m.Context())
		if err != nil {
			return err
		}
		n.Epoch = epoch.Token()
		p, err := m.state.Create(a)
		if err == nil {
			err = errors.Join(p.Commit(a), lock.Upgrade(m.Context()), m.state.SaveNetwork(n))
		}
		return errors.Join(err, lock.Close())
	})
	must.Succeed(m, err)
	nstest.Run(m, m.host, "ip", "link", "set", r.HostIf, "alias", endpoint.AliasOf(a))
	if m.fw, err = nft.Dial(&nft.Config{NetNS: m.host}); err != nil {
		m.Fatal(err)
	}
	m.Cleanup(func() { m.fw.Close() })
	must.Succeed(m, expect.Err(m.fw.Ensure(m.Context(), m.network())))
	must.Succeed(m, m.fw.Add(m.Context(), endpoint.In(a, n)))
}

// network keeps pods' addresses within the LAN: what is bridged there passes the
// firewall too, since a new namespace has bridge-nf-call-iptables.
func (m *movable) network() nft.Network {
	return nft.Network{Name: "lan", Bridge: m.bridge, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}, Masquerade: true, Guard: true}
}

func (m *movable) attachment() *state.Attachment {
	m.Helper()
	a := must.Of(m.state.Load(m.pod.record.Network, m.pod.record.Hash())).Get(m)
	return a
}

// settled waits until the attachment has an address on record, or none, for good.
func (m *movable) settled(address string) {
	m.Helper()
	want := []netip.Prefix{}
	if address != "" {
		want = append(want, netip.MustParsePrefix(address+"/16"))
	}
	until(m.T, "the attachment has "+address, func() bool {
		a := m.attachment()
		return !a.Moving && slices.EqualFunc(a.Addresses, want, func(a ipam.Address, want netip.Prefix) bool { return a.Prefix == want })
	})
}

// worksAt checks, by packets and by listings, that all of it goes by one address and
// nothing by the other.
func (m *movable) worksAt(address, other string) {
	m.Helper()
	if _, err := nstest.Ask(m, m.client, "tcp", netip.MustParseAddrPort(clientsHost+":8080")); err != nil {
		m.Errorf("the published port: %v", err)
	}
	seen, err := nstest.Ask(m, m.pod.ns, "tcp", netip.MustParseAddrPort(clientsOwn+":99"))
	if err != nil || seen.Addr() != netip.MustParseAddr(clientsHost) {
		m.Errorf("a server elsewhere sees the pod as %v, %v; want it masqueraded", seen, err)
	}
	ruleset := nstest.Run(m, m.host, "nft", "list", "ruleset")
	if !strings.Contains(ruleset, address+" ") || strings.Contains(ruleset, other+" ") {
		m.Errorf("the firewall has not %s alone:\n%s", address, ruleset)
	}
	a := m.attachment()
	want := fmt.Sprintf("tombolo:1:%s:lan:%s", a.Hash(), address)
	if got := nstest.Run(m, m.host, "ip", "link", "show", a.HostIf); !strings.Contains(got, "alias "+want+"\n") {
		m.Errorf("the port has not alias %s:\n%s", want, got)
	}
	if gw := a.Addresses[0].Gateway; gw != netip.MustParseAddr(hostAddress) {
		m.Errorf("the attachment's gateway: %v", gw)
	}
	if first := m.firstHeard(other, address); first != address {
		m.Errorf("the guard lets the pod send from %s", first)
	}
}

// firstHeard has the pod send from one address, then from another until something
// arrives, and gives the one whose datagram came first: they take one way, so what did
// not come before is lost. The last is sent again for the sake of ARP, whose requests the
// guard may have dropped on behalf of the one before.
func (m *movable) firstHeard(not, last string) string {
	m.Helper()
	var in net.PacketConn
	err := m.remote.Do(func() error {
		var err error
		in, err = net.ListenPacket("udp4", "10.9.0.1:0")
		return err
	})
	must.Succeed(m, err)
	defer in.Close()
	m.sayFrom(not, in.LocalAddr())
	for deadline := time.Now().Add(longEnough); time.Now().Before(deadline); {
		m.sayFrom(last, in.LocalAddr())
		must.Succeed(m, in.SetReadDeadline(time.Now().Add(time.Second)))
		_, from, err := in.ReadFrom(make([]byte, 16))
		if err == nil {
			return from.(*net.UDPAddr).IP.String()
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			m.Fatal(err)
		}
	}
	m.Fatal("nothing arrived")
	return ""
}

// sayFrom has the pod send a datagram from an address. If it has not that one, it gets it
// for as long as it takes to send.
func (m *movable) sayFrom(a string, to net.Addr) {
	m.Helper()
	_, has := m.addresses(m.pod)[netip.MustParsePrefix(a+"/16")]
	if !has {
		nstest.Run(m, m.pod.ns, "ip", "address", "add", a+"/32", "dev", "eth0")
	}
	err := m.pod.ns.Do(func() error {
		out, err := (&net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(a), 0))}).Dial("udp4", to.String())
		if err == nil {
			_, err = out.Write([]byte("?"))
			err = errors.Join(err, out.Close())
		}
		return err
	})
	must.Succeed(m, err)
	if !has {
		nstest.Run(m, m.pod.ns, "ip", "address", "del", a+"/32", "dev", "eth0")
	}
}

func TestWhatGoesByAPodsAddressFollowsItsLease(t *testing.T) {
	t.Parallel()
	m, s := newMovable(t, time.Hour)
	m.worksAt(firstAddress, nextAddress)
	due(m.pod.record)
	m.write(m.pod.record)
	s.set(func(s *server) { s.refuse, s.base = true, netip.MustParseAddr(nextAddress) })
	m.keeper()
	m.settled(nextAddress)
	m.worksAt(nextAddress, firstAddress)
}

// Of a lease that is lost the address may be another's: nothing may lead there.
func TestNothingLeadsToAnAddressThatWasLost(t *testing.T) {
	t.Parallel()
	m, s := newMovable(t, 10*time.Second)
	m.keeper()
	s.set(func(s *server) { s.silence = true })
	m.settled("")
	if ruleset := nstest.Run(t, m.host, "nft", "list", "ruleset"); strings.Contains(ruleset, firstAddress+" ") {
		t.Errorf("the firewall has the lost address:\n%s", ruleset)
	}
	// For an hour, so that it does not end while it is looked at.
	s.set(func(s *server) { s.silence, s.lease = false, time.Hour })
	m.settled(firstAddress)
	m.worksAt(firstAddress, nextAddress)
}

// A keeper that is killed in between leaves one of these, and its successor goes on.
func TestAMoveThatWasCutShortIsFinished(t *testing.T) {
	for cut := range 4 {
		t.Run(fmt.Sprintf("after %d parts", cut), func(t *testing.T) {
			t.Parallel()
			m, s := newMovable(t, time.Hour)
			both, next := m.half(s)
			now := endpoint.In(next, &state.Network{Name: "lan", Bridge: m.bridge, Masquerade: true, Guard: true})
			parts := []func() error{
				func() error { return m.update(both) },
				func() error { return m.fw.Move(t.Context(), endpoint.Of(m.before), now) },
				func() error {
					nstest.Run(t, m.host, "ip", "link", "set", next.HostIf, "alias", endpoint.AliasOf(next))
					return nil
				},
			}
			for _, part := range parts[:cut] {
				must.Succeed(t, part())
			}
			// By this a DEL knows what to look for.
			if a := m.attachment(); a.Moving != (cut > 0) || !a.Moving && a.Addresses[0].Prefix.Addr() != netip.MustParseAddr(firstAddress) {
				t.Errorf("the record has %v, moving %t", a.Addresses, a.Moving)
			}
			m.keeper()
			m.settled(nextAddress)
			m.worksAt(nextAddress, firstAddress)
		})
	}
}

// half has the pod and the lease's record at the next address, and the rest at the
// first, and gives the attachment as it is on the way and at the end.
func (m *movable) half(s *server) (both, next *state.Attachment) {
	m.Helper()
	p := m.pod
	s.set(func(s *server) { s.given[string(p.record.Client.ClientID)] = netip.MustParseAddr(nextAddress) })
	moved := *p.record.Lease
	moved.Address = netip.MustParsePrefix(nextAddress + "/16")
	moved.Expire = moved.Expire.Add(time.Hour)
	moved.Renew, moved.Rebind = moved.Renew.Add(time.Hour), moved.Rebind.Add(time.Hour)
	pod := m.enter(p)
	defer pod.close()
	a := p.record.Policy.Apply(&moved)
	must.Succeed(m, errors.Join(pod.withdraw(p.record.Applied), pod.apply(a, time.Hour, time.Hour)))
	p.record.Lease, p.record.Applied = &moved, a
	m.write(p.record)
	m.before = m.attachment()
	b, n := *m.before, *m.before
	n.Addresses = []ipam.Address{{Prefix: moved.Address, Gateway: p.record.Policy.Gateway}}
	b.Addresses, b.Moving = append(slices.Clone(n.Addresses), b.Addresses...), true
	return &b, &n
}

func (m *movable) update(a *state.Attachment) error {
	return m.host.Do(func() error {
		lock, err := m.state.Lock(m.Context(), state.Exclusive)
		if err != nil {
			return err
		}
		return errors.Join(m.state.Update(a), lock.Close())
	})
}

// following gives a visit that has nothing else to do.
func (m *movable) following(ctx context.Context) *visit {
	m.Helper()
	k := must.Of(New(&Config{Leases: m.dir, State: m.state})).Get(m)
	k.node, k.host = m.kernel(), m.host
	return &visit{Keeper: k, ctx: ctx, r: m.load(m.pod)}
}

func TestAMoveWaitsForThePluginAndNotForEver(t *testing.T) {
	t.Parallel()
	m, s := newMovable(t, time.Hour)
	m.half(s)
	var lock *state.Lock
	var err error
	plugin := make(chan struct{}) // somebody else's goroutine, as to the order of locks
	go func() {
		defer close(plugin)
		lock, err = m.state.Lock(t.Context(), state.Shared)
	}()
	if <-plugin; err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := m.following(ctx).follow(); !errors.Is(err, state.ErrLocked) {
		t.Errorf("while an ADD works: %v", err)
	}
	if got := m.attachment().Addresses; got[0].Prefix.Addr() != netip.MustParseAddr(firstAddress) {
		t.Errorf("meanwhile the record has %v", got)
	}
	must.Succeed(t, lock.Close())
	expect.Success(t, m.following(t.Context()).follow())
	m.worksAt(nextAddress, firstAddress)
}

func TestAMoveOutlivesAFlushedFirewall(t *testing.T) {
	t.Parallel()
	m, s := newMovable(t, time.Hour)
	m.half(s)
	nstest.Run(t, m.host, "nft", "flush", "ruleset")
	expect.Success(t, m.following(t.Context()).follow())
	m.settled(nextAddress)
	// What a repair does then.
	a := m.attachment()
	must.Succeed(t, expect.Err(m.fw.Ensure(t.Context(), m.network())))
	must.Succeed(t, m.fw.Replace(t.Context(), endpoint.Of(a)))
	m.worksAt(nextAddress, firstAddress)
}

func TestOnlyItsOwnAttachmentFollowsALease(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*state.Attachment){
		"of another IPAM":      func(a *state.Attachment) { a.IPAMType = "host-local" },
		"of another directory": func(a *state.Attachment) { a.DataDir = "/elsewhere" },
		"of another namespace": func(a *state.Attachment) { a.NetNSCookie++ },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, s := newMovable(t, time.Hour)
			m.half(s)
			a := m.attachment()
			change(a)
			must.Succeed(t, m.update(a))
			expect.Success(t, m.following(t.Context()).follow())
			if got := m.attachment(); got.Addresses[0] != a.Addresses[0] || got.Moving {
				t.Errorf("it followed to %v", got.Addresses)
			}
		})
	}
}

func TestALeaseWithoutAnAttachmentIsNoError(t *testing.T) {
	t.Parallel()
	dir := must.Of(lease.Open(t.TempDir() + "/leases")).Get(t)
	st := must.Of(state.Open(t.TempDir() + "/state")).Get(t)
	for _, s := range []*state.Dir{nil, st} {
		k := must.Of(New(&Config{Leases: dir, State: s})).Get(t)
		for _, network := range []string{"lan", "(host)"} { // the host's own is of no network
			v := &visit{Keeper: k, ctx: t.Context(), r: &lease.Record{State: lease.Bound, Network: network, ContainerID: "c", IfName: "eth0", Lease: &dhcpc.Lease{}}}
			if err := v.follow(); err != nil {
				t.Errorf("%s: %v", network, err)
			}
		}
	}
}
