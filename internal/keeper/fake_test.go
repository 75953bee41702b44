package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv("TOMBOLO_TEST_KEEPER"); dir != "" {
		os.Exit(keeperProcess(dir))
	}
	nstest.Main(m)
}

// keeperProcess is a keeper in a process of its own, for what signals do to one.
func keeperProcess(dir string) int {
	d, err := lease.Open(dir)
	if err == nil {
		var k *Keeper
		k, err = New(&Config{Leases: d, Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), Ready: func() { fmt.Println("ready") }})
		if err == nil {
			err = k.Run(context.Background())
		}
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}

const thisBoot, lastBoot = "this boot", "the last boot"

// world is a node with pods, and a DHCP server, that are not there. Time in it is the
// bubble's (testing/synctest).
type world struct {
	t    *testing.T
	dir  *lease.Store
	keep *Keeper
	stop func()

	boot  string       // changed while no keeper runs
	slept atomic.Int64 // for how many nanoseconds the machine slept

	changes chan change
	atEnter func(*lease.Record) // if not nil: called when a pod was looked for, before the answer
	with    func(*loop)         // if not nil: adds sources
	atBeat  func(*loop)         // if not nil: called by the loop with each heartbeat, before it looks at the clock

	mu       sync.Mutex
	pods     map[string]*fakePod // by record hash
	heard    []string            // "REQUEST 192.0.2.9", in order
	entered  int                 // how often a pod was looked for
	releases []netip.Addr
	// answer is the server; nil does not answer.
	answer     func(d *dhcpv4.DHCPv4) *dhcpv4.DHCPv4
	delay      time.Duration // of its answers
	releaseErr error
	// conflictErr is the answer of checkConflict. It is set before start.
	conflictErr error
	open        int // transports
	mostOpen    int
}

// inMemory gives a directory without a disk, where there is such a place: leases as
// short as the tests' are not to wait for other people's writes.
func inMemory(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "tombolo")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func newWorld(t *testing.T) *world {
	t.Helper()
	dir := must.Of(lease.Open(filepath.Join(inMemory(t), "leases"))).Get(t)
	w := &world{t: t, dir: dir, pods: map[string]*fakePod{}, changes: make(chan change, 16), boot: thisBoot}
	began := time.Now()
	dir.Clock = func() (string, time.Duration, error) {
		return w.boot, time.Since(began) + time.Duration(w.slept.Load()), nil
	}
	w.answer = w.grant
	return w
}

func (w *world) checkConflict(string, netip.Addr, netip.Addr) error { return w.conflictErr }

func (w *world) follow(context.Context, *lease.Record) (from, to []netip.Prefix, _ error) {
	return nil, nil, nil
}

// start runs a keeper until the test's end, or stop.
func (w *world) start() {
	w.t.Helper()
	k, err := New(&Config{Leases: w.dir, Log: slog.New(slog.NewTextHandler(w.t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))})
	if err != nil {
		w.t.Fatal(err)
	}
	k.node, k.workers = w, 4
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	l := k.newLoop(ctx)
	if w.with != nil {
		w.with(l)
	}
	go func() {
		done <- l.run(w.changes, func() error {
			if w.atBeat != nil {
				w.atBeat(l)
			}
			return nil
		})
	}()
	w.keep = k
	w.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Errorf("the keeper ended with %v", err)
		}
	})
	w.t.Cleanup(w.stop)
	synctest.Wait()
}

func (w *world) later(d time.Duration) { pass(d, &w.mu) }

// tell has the keeper hear of a record.
func (w *world) tell(hash string) {
	w.changes <- change{hash}
	synctest.Wait()
}

// record makes a pod's record, with a lease of an hour from now on.
func (w *world) record(i int) *lease.Record {
	mac := dhcpc.Hex{2, 0, 0, 0, byte(i >> 8), byte(i)}
	t := now()
	r := &lease.Record{
		State: lease.Bound, Network: "lan", ContainerID: fmt.Sprintf("c%d", i), IfName: "eth0", Boot: thisBoot, Bridge: "br0", NetNS: "/run/netns/c",
		Client: lease.Client{MAC: mac, Config: dhcpc.Config{ClientID: dhcpc.Hex{0, byte(i >> 8), byte(i)}}},
		Lease: &dhcpc.Lease{
			Address: netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), 24), MAC: mac, ClientID: dhcpc.Hex{0, byte(i >> 8), byte(i)},
			Routes: []dhcpc.Route{{Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("192.0.2.254")}},
			Server: netip.MustParseAddr("192.0.2.254"), Obtained: t, Renew: t.Add(30 * time.Minute), Rebind: t.Add(52 * time.Minute), Expire: t.Add(time.Hour),
		},
	}
	r.Applied = r.Policy.Apply(r.Lease)
	return r
}

// add puts a record into the directory, and its pod into the world.
func (w *world) add(r *lease.Record) *fakePod {
	w.t.Helper()
	w.lock(r, func(h *lease.LockedRecord) error { return h.Create(r) })
	p := &fakePod{world: w, has: r.Applied}
	w.mu.Lock()
	w.pods[r.Hash()] = p
	w.mu.Unlock()
	return p
}

func (w *world) lock(r *lease.Record, fn func(*lease.LockedRecord) error) {
	w.t.Helper()
	h, err := w.dir.Lock(context.Background(), r.Hash())
	if err == nil {
		err = errors.Join(fn(h), h.Close())
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// del is what a DEL does to the record.
func (w *world) del(r *lease.Record) {
	w.t.Helper()
	w.lock(r, func(h *lease.LockedRecord) error { return h.Remove() })
}

// load gives a record as it is now, nil if it is gone.
func (w *world) load(r *lease.Record) *lease.Record {
	w.t.Helper()
	got, err := w.dir.Load(r.Hash())
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return got
}

// said gives what clients sent, and forgets it.
func (w *world) said() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	list := w.heard
	w.heard = nil
	return list
}

func (w *world) released() []netip.Addr {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.releases)
}

// counted reads a counter of the keeper's metrics.
func (w *world) counted(name string) int {
	w.t.Helper()
	_, body := get(w.t, w.keep, "/metrics")
	name = map[bool]string{true: `tombolo_errors_total{kind="lease"}`, false: "tombolo_lease_" + name + "_total"}[name == "errors"]
	found := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(name) + ` (\d+)$`).FindStringSubmatch(body)
	if found == nil {
		w.t.Fatalf("no counter %s in\n%s", name, body)
	}
	n, _ := strconv.Atoi(found[1])
	return n
}

// serve sets what the server answers.
func (w *world) serve(answer func(*dhcpv4.DHCPv4) *dhcpv4.DHCPv4) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.answer = answer
}

func (w *world) kill(r *lease.Record) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.pods, r.Hash())
}

func (w *world) enter(r *lease.Record) (pod, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.entered++
	p := w.pods[r.Hash()]
	if enter := w.atEnter; enter != nil {
		w.mu.Unlock()
		enter(r)
		w.mu.Lock()
	}
	switch {
	case p == nil:
		return nil, errGone
	case p.outOfReach != nil:
		return nil, p.outOfReach
	}
	return p, nil
}

func (w *world) release(_ context.Context, r *lease.Record, six bool) error {
	if six {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.releaseErr != nil {
		return w.releaseErr
	}
	w.releases = append(w.releases, r.Lease.Address.Addr())
	return nil
}

// grant is a server that gives everyone what they ask for, and else 192.0.2.200.
func (w *world) grant(d *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
	want := d.RequestedIPAddress()
	if want == nil {
		want = d.ClientIPAddr
	}
	if want == nil || want.IsUnspecified() {
		want = net.IPv4(192, 0, 2, 200)
	}
	kind := dhcpv4.MessageTypeAck
	if d.MessageType() == dhcpv4.MessageTypeDiscover {
		kind = dhcpv4.MessageTypeOffer
	}
	return reply(d, kind, want)
}

func nak(d *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 { return reply(d, dhcpv4.MessageTypeNak, net.IPv4zero) }

func silent(*dhcpv4.DHCPv4) *dhcpv4.DHCPv4 { return nil }

func reply(d *dhcpv4.DHCPv4, kind dhcpv4.MessageType, address net.IP) *dhcpv4.DHCPv4 {
	server := net.IPv4(192, 0, 2, 254)
	r, err := dhcpv4.NewReplyFromRequest(d, dhcpv4.WithMessageType(kind), dhcpv4.WithYourIP(address),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(server)))
	if err != nil {
		panic(err)
	}
	if kind != dhcpv4.MessageTypeNak {
		r.UpdateOption(dhcpv4.OptSubnetMask(net.CIDRMask(24, 32)))
		r.UpdateOption(dhcpv4.OptRouter(server))
		r.UpdateOption(dhcpv4.OptIPAddressLeaseTime(time.Hour))
	}
	return r
}

// fakePod is a pod that remembers what was done to it.
type fakePod struct {
	*world
	pod        // of IPv6 there is nothing
	has        lease.Applied
	left       time.Duration
	applied    int
	applyErr   error
	slow       time.Duration // what apply takes
	dialErr    error
	outOfReach error
}

func (p *fakePod) dial(_ context.Context, local netip.Addr) (dhcpc.Transport[*dhcpc.Packet], error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dialErr != nil {
		return nil, p.dialErr
	}
	if local.IsValid() && !slices.ContainsFunc(p.has.Addresses, func(a netip.Prefix) bool { return a.Addr() == local }) {
		return nil, errors.New("cannot assign requested address")
	}
	p.open++
	p.mostOpen = max(p.mostOpen, p.open)
	c := &fakeConn{world: p.world, answers: make(chan *dhcpc.Packet, 8)}
	return c, nil
}

func (p *fakePod) keeps(a lease.Applied) (lease.Applied, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	has := a.Without(a.Without(p.has))
	has.MTU = a.MTU
	return has, nil
}

func (p *fakePod) apply(a lease.Applied, left, _ time.Duration) error {
	time.Sleep(p.slow)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.applyErr != nil {
		return p.applyErr
	}
	rest := p.has.Without(a)
	p.has = lease.Applied{Addresses: slices.Concat(rest.Addresses, a.Addresses), Routes: slices.Concat(rest.Routes, a.Routes), MTU: a.MTU}
	p.left = left
	p.applied++
	return nil
}

func (p *fakePod) withdraw(a lease.Applied) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	mtu := p.has.MTU
	p.has = p.has.Without(a)
	p.has.MTU = mtu
	return nil
}

func (p *fakePod) close() error { return nil }

// addresses gives what the pod has.
func (p *fakePod) addresses() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return fmt.Sprint(p.has.Addresses)
}

// fakeConn is a transport to the world's server.
type fakeConn struct {
	*world
	answers chan *dhcpc.Packet
}

func (c *fakeConn) Send(_ context.Context, p *dhcpc.Packet) error {
	d, err := dhcpv4.FromBytes(p.Payload)
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.heard = append(c.heard, fmt.Sprintf("%s %d", d.MessageType(), d.ClientHWAddr[5]))
	answer := c.answer
	c.mu.Unlock()
	r := answer(d)
	if r == nil {
		return nil
	}
	packet := &dhcpc.Packet{Src: netip.MustParseAddrPort("192.0.2.254:67"), Payload: r.ToBytes()}
	time.AfterFunc(c.delay, func() { c.answers <- packet })
	return nil
}

func (c *fakeConn) Receive(ctx context.Context, until time.Time) (*dhcpc.Packet, error) {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case p := <-c.answers:
		return p, nil
	case <-timer.C:
		return nil, os.ErrDeadlineExceeded
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (c *fakeConn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open--
	return nil
}
