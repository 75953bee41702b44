package nft

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

func TestMoveChangesWhatDiffers(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	at := func(ep Endpoint, ports ...Port) Endpoint {
		ep.Ports = ports
		return ep
	}
	any8080, one8080 := tcpPort("", 8080), tcpPort("192.0.2.1", 8080)
	for _, tc := range []struct {
		name     string
		old, new Endpoint
	}{
		{"nothing", guardedPod("0000000000a", "veth1", podMAC, pod4, pod6), guardedPod("0000000000a", "veth1", podMAC, pod4, pod6)},
		{"the first addresses", guardedPod("0000000000a", "veth1", podMAC), guardedPod("0000000000a", "veth1", podMAC, pod4, pod6)},
		{"no addresses any more", guardedPod("0000000000a", "veth1", podMAC, pod4, pod6), guardedPod("0000000000a", "veth1", podMAC)},
		{"one address", guardedPod("0000000000a", "veth1", podMAC, pod4, pod6), guardedPod("0000000000a", "veth1", podMAC, "10.22.0.9", pod6)},
		{"the first lease", lanPod("0000000000a", "veth1", podMAC), lanPod("0000000000a", "veth1", podMAC, pod4)},
		{"a port, and what it leads to", at(pod("0000000000a", pod4), any8080), at(pod("0000000000a", "10.22.0.9"), any8080)},
		{"a port on one address, and what it leads to", at(pod("0000000000a", pod4, pod6), one8080), at(pod("0000000000a", "10.22.0.9", pod6), one8080)},
		{"a port from all addresses to one", at(pod("0000000000a", pod4), any8080), at(pod("0000000000a", pod4), one8080)},
		{"a port from one address to all", at(pod("0000000000a", pod4), one8080), at(pod("0000000000a", pod4), any8080)},
		{"another bridge, another MAC", guardedPod("0000000000a", "veth1", podMAC, pod4), guardedPod("0000000000a", "veth9", otherMAC, pod4)},
		{"no guard", guardedPod("0000000000a", "veth1", podMAC, pod4), pod("0000000000a", pod4)},
	} {
		nstest.RunParallel(t, tc.name, func(t *testing.T) {
			want, ns := dialNew(t)
			mustEnsure(t, want, guardNet())
			bystander := at(guardedPod("0000000000b", "veth2", "02:00:00:00:00:08", "10.22.0.8"), tcpPort("192.0.2.7", 9999))
			mustAdd(t, want, bystander, tc.new)
			wanted := normal(nft(t, ns, "list", "ruleset"))

			c, ns := dialNew(t)
			mustEnsure(t, c, guardNet())
			mustAdd(t, c, bystander, tc.old)
			for range 2 { // the second time there is nothing to do
				must.Succeed(t, c.Move(ctx, tc.old, tc.new))
				expect.Equal(t, normal(nft(t, ns, "list", "ruleset")), wanted, "after the move")
			}
			// What was never there does not have to be.
			must.Succeed(t, c.Remove(ctx, tc.new))
			must.Succeed(t, c.Move(ctx, tc.old, tc.new))
			expect.Equal(t, normal(nft(t, ns, "list", "ruleset")), wanted, "with nothing there before")
		})
	}
}

// Each field of an endpoint, changed in each way by Move, leaves the kernel with the elements of the new one and no
// others. Replace does so too for a guarded endpoint that keeps port, MAC and addresses.
func TestOneFieldOfAnEndpointIsChanged(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	base := guardedPod("0000000000a", "veth1", podMAC, pod4, pod6)
	base.Ports = []Port{tcpPort("", 8080)}
	variants := map[string]Endpoint{"base": base}
	for name, change := range map[string]func(ep *Endpoint){
		"no guard":         func(ep *Endpoint) { ep.Guard, ep.GuardedPort = "", "" },
		"guarded MAC":      func(ep *Endpoint) { ep.Guard = GuardMAC },
		"untrusted":        func(ep *Endpoint) { ep.Guard = GuardUntrusted },
		"SLAAC":            func(ep *Endpoint) { ep.SLAAC = true },
		"untrusted, SLAAC": func(ep *Endpoint) { ep.SLAAC, ep.Guard = true, GuardUntrusted },
		"port":             func(ep *Endpoint) { ep.GuardedPort = "veth9" },
		"MAC":              func(ep *Endpoint) { ep.MAC = mustMAC(otherMAC) },
		"IPv4 alone":       func(ep *Endpoint) { ep.Addrs = ep.Addrs[:1] },
		"IPv6 alone":       func(ep *Endpoint) { ep.Addrs = ep.Addrs[1:] },
		"bridge":           func(ep *Endpoint) { ep.Bridge = "cbr9" },
		"no masquerade":    func(ep *Endpoint) { ep.Masquerade = false },
		"no host port":     func(ep *Endpoint) { ep.Ports = nil },
		"host port":        func(ep *Endpoint) { ep.Ports = []Port{tcpPort("", 8081)} },
		"SNAT of all":      func(ep *Endpoint) { ep.PortSNAT = SNATAll },
		"SNAT of none":     func(ep *Endpoint) { ep.PortSNAT = SNATNone },
		"callers":          func(ep *Endpoint) { ep.Callers = nstest.Addrs("10.22.9.9") },
	} {
		ep := base
		change(&ep)
		variants[name] = ep
	}
	inPlace := []string{"base", "guarded MAC", "untrusted", "SLAAC", "untrusted, SLAAC"}
	n := guardNet()
	n.PortSNAT = true
	c, ns := dialNew(t)
	mustEnsure(t, c, n)
	empty := normal(nft(t, ns, "list", "ruleset"))
	for name, to := range variants {
		mustAdd(t, c, to)
		want := normal(nft(t, ns, "list", "ruleset"))
		must.Succeed(t, c.Remove(ctx, to))
		for from, old := range variants {
			isInPlace := slices.Contains(inPlace, from) && slices.Contains(inPlace, name)
			if from != "base" && name != "base" && !isInPlace {
				continue
			}
			mustAdd(t, c, old)
			must.Succeed(t, c.Move(ctx, old, to))
			expect.NoDiff(t, cmp.Diff(want, normal(nft(t, ns, "list", "ruleset"))), "from %q to %q", from, name)
			must.Succeed(t, c.Remove(ctx, to))
			if !isInPlace {
				continue
			}
			mustAdd(t, c, old)
			must.Succeed(t, c.Replace(ctx, to))
			expect.NoDiff(t, cmp.Diff(want, normal(nft(t, ns, "list", "ruleset"))), "replaced %q by %q", from, name)
			must.Succeed(t, c.Remove(ctx, to))
			must.That(t, normal(nft(t, ns, "list", "ruleset")) == empty, "from %q to %q: something is left", from, name)
		}
	}
}

// What others have is taken over where the new endpoint needs it, and left where only
// the old one did.
func TestMoveTakesOverAndLeavesOthersAlone(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c, _ := dialNew(t)
	mustEnsure(t, c, podnet())
	a, b := pod("0000000000a", "10.22.0.5"), pod("0000000000b", "10.22.0.6")
	b.Ports = []Port{tcpPort("192.0.2.1", 8080)}
	mustAdd(t, c, a, b)
	moved := pod("0000000000a", "10.22.0.6")
	moved.Ports = []Port{tcpPort("", 8080)}
	must.Succeed(t, c.Move(ctx, a, moved))
	wantEndpoints(t, c, moved)
	must.Succeed(t, c.Move(ctx, b, pod("0000000000b", "10.22.0.5")))
	wantEndpoints(t, c, moved, pod("0000000000b", "10.22.0.5"))
}

func TestMoveIsRefused(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c, ns := dialNew(t)
	a := pod("0000000000a", pod4)
	err := c.Move(ctx, a, pod("0000000000a", other4))
	expect.That(t, errors.Is(err, fs.ErrNotExist) && strings.Contains(err.Error(), "not (or no longer) set up"), "without a table: %v", err)
	mustEnsure(t, c, podnet())
	mustAdd(t, c, a)
	before := nft(t, ns, "list", "ruleset")
	elsewhere := pod("0000000000a", other4)
	elsewhere.Network = "other"
	for name, ep := range map[string]Endpoint{
		"another owner": pod("0000000000b", other4), "another network": elsewhere, "no owner": pod("", other4), "no address": pod("0000000000a"),
	} {
		expect.Is(t, c.Move(ctx, a, ep), tombolo.ErrInvalid, "%s", name)
		expect.Is(t, c.Move(ctx, ep, a), tombolo.ErrInvalid, "from %s", name)
	}
	expect.Is(t, c.Move(ctx, a, guardedPod("0000000000a", "veth1", podMAC, other4)), fs.ErrNotExist, "to a guard that is not there")
	expect.Equal(t, nft(t, ns, "list", "ruleset"), before, "something has changed")
}

// Somebody else's change in between makes the kernel refuse the transaction.
func TestMoveIsTriedAgainWhenOvertaken(t *testing.T) {
	t.Parallel()
	setUp, ns := dialNew(t)
	mustEnsure(t, setUp, podnet())
	mustAdd(t, setUp, pod("0000000000a", pod4))
	c := dialFaulty(t, ns, &nltest.Fault{Type: messageType(unix.NFT_MSG_DELSETELEM), Times: 1, Errno: unix.ERESTART})
	must.Succeed(t, c.Move(context.Background(), pod("0000000000a", pod4), pod("0000000000a", other4)))
	wantEndpoints(t, setUp, pod("0000000000a", other4))
}

// A pod that gets its lease, and loses it, sends all the while: what it may send before
// and after always comes through, and what it may send neither before nor after never
// does. (All on one processor: of a frame that is on another just then, one rule may
// have seen the old and the next one sees the new.)
func TestMoveLeavesNoGap(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	ctx := context.Background()
	waiting, leased := s.untrusted(), s.untrusted(pod4, pod6)
	free, known := s.guarded(), s.guarded(pod4, pod6)
	arp := func(src, dst string) []byte {
		return ether(broadcastMAC, podMAC, unix.ETH_P_ARP, arpMessage(1, podMAC, src, dst))
	}
	ipv4 := ether(otherMAC, podMAC, unix.ETH_P_IP, packet4(pod4, other4, 0, 17, datagram(1024, 9)))
	foreign := ether(otherMAC, podMAC, unix.ETH_P_IP, packet4(bridge4, other4, 0, 17, datagram(1024, 9)))
	for _, tc := range []struct {
		name         string
		old, new     Endpoint
		always, none []byte
	}{
		{"a lease", waiting, leased, arp("0.0.0.0", pod4), arp(bridge4, bridge4)},
		{"addresses", free, known, ipv4, ether(otherMAC, foreignMAC, unix.ETH_P_IP, packet4(pod4, other4, 0, 17, datagram(1024, 9)))},
		{"one address", s.untrusted(pod4), s.untrusted(pod4, "10.22.0.9"), ipv4, foreign},
	} {
		mustAdd(t, s.c, tc.old)
		mover := dial(t, s.host)
		stop := make(chan struct{})
		var moves atomic.Int32
		var movers sync.WaitGroup
		movers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				for _, m := range [][2]Endpoint{{tc.old, tc.new}, {tc.new, tc.old}} {
					if err := nstest.OnOneCPU(func() error { return mover.Move(ctx, m[0], m[1]) }); err != nil {
						t.Errorf("%s: %v", tc.name, err)
						return
					}
				}
				moves.Add(1)
			}
		})
		lost, open, frames := 0, 0, 0
		for ; frames < 500 || moves.Load() == 0 && !t.Failed(); frames++ {
			if !s.arrives(tc.always) {
				lost++
			}
			if s.arrives(tc.none) {
				open++
			}
		}
		close(stop)
		movers.Wait()
		if lost+open > 0 {
			t.Errorf("%s: of %d frames, %d were lost, and %d of another's came through, with %d moves and back", tc.name, frames, lost, open, moves.Load())
		}
		must.Succeed(t, s.c.Remove(ctx, tc.old))
	}
}

// A published port leads somewhere at every moment.
func TestMoveKeepsPortsPublished(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c, ns := dialNew(t)
	mustEnsure(t, c, podnet())
	old, next := pod("0000000000a", pod4, pod6), pod("0000000000a", "10.22.0.9", "fd00:22::9")
	old.Ports = []Port{tcpPort("", 8080), tcpPort("192.0.2.1", 8081)}
	next.Ports = old.Ports
	mustAdd(t, c, old)
	var ports []ruleset.Element
	for _, el := range old.portElements() {
		if len(el.Data) > 0 {
			ports = append(ports, el)
		}
	}
	mover := dial(t, ns)
	done := make(chan error, 1)
	var looks atomic.Int32
	go func() {
		for i := 0; i < 200 || looks.Load() == 0; i++ {
			for _, m := range [][2]Endpoint{{old, next}, {next, old}} {
				if err := mover.Move(ctx, m[0], m[1]); err != nil {
					done <- err
					return
				}
			}
		}
		done <- nil
	}()
	for {
		have, err := c.tables.Lookup(ports)
		must.Succeed(t, err)
		for i, el := range have {
			if el == nil {
				t.Fatalf("at look %d, %s leads nowhere", looks.Load(), ports[i])
			}
		}
		looks.Add(1)
		select {
		case err := <-done:
			expect.Success(t, err, "after %d looks", looks.Load())
			wantEndpoints(t, c, old)
			return
		default:
		}
	}
}

// A pod is guarded before it has its port, and gets its host ports later: what it has
// then is what Add would have given it at once.
func TestUpdateAddsWhatIsMissing(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	whole := lanPod("0000000000a", "veth1", podMAC, pod4, pod6)
	whole.Ports = []Port{tcpPort("", 8080), tcpPort("192.0.2.1", 8081)}
	bare := whole
	bare.Ports = nil
	for name, old := range map[string]Endpoint{
		"nothing": whole, "its ports": bare, "its addresses and its ports": lanPod("0000000000a", "veth1", podMAC),
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			want, ns := dialNew(t)
			mustEnsure(t, want, guardNet())
			mustAdd(t, want, whole)
			wanted := normal(nft(t, ns, "list", "ruleset"))

			c, ns := dialNew(t)
			mustEnsure(t, c, guardNet())
			mustAdd(t, c, old)
			for range 2 {
				must.Succeed(t, c.Update(ctx, old, whole))
				expect.Equal(t, normal(nft(t, ns, "list", "ruleset")), wanted, "after the update")
			}
		})
	}
}

func TestUpdateTakesNothingFromOthers(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	with := func(ep Endpoint, ports ...Port) Endpoint {
		ep.Ports = ports
		return ep
	}
	old := lanPod("0000000000a", "veth1", podMAC)
	for name, tc := range map[string]struct {
		others, new Endpoint
		port        string
	}{
		"an address": {pod("0000000000b", pod4), lanPod("0000000000a", "veth1", podMAC, pod4), ""},
		"a port": {
			with(pod("0000000000b", other4), tcpPort("", 8080)), with(lanPod("0000000000a", "veth1", podMAC, pod4), tcpPort("", 8080)), "8080/tcp"},
		"a port on one address": {
			with(pod("0000000000b", other4), tcpPort("192.0.2.1", 8080)), with(lanPod("0000000000a", "veth1", podMAC, pod4), tcpPort("192.0.2.1", 8080)), "192.0.2.1:8080/tcp"},
		"a port on all addresses, of which another has one": {
			with(pod("0000000000b", other4), tcpPort("192.0.2.1", 8080)), with(lanPod("0000000000a", "veth1", podMAC, pod4), tcpPort("", 8080)), "8080/tcp"},
		"a port on one address, which another has on all": {
			with(pod("0000000000b", other4), tcpPort("", 8080)), with(lanPod("0000000000a", "veth1", podMAC, pod4), tcpPort("192.0.2.1", 8080)), "192.0.2.1:8080/tcp"},
		"a guarded port": {
			guardedPod("0000000000b", "veth9", otherMAC, other4), guardedPod("0000000000a", "veth9", otherMAC, pod4), ""},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			c, ns := dialNew(t)
			mustEnsure(t, c, guardNet())
			mustAdd(t, c, old, tc.others)
			before := nft(t, ns, "list", "ruleset")
			err := c.Update(ctx, old, tc.new)
			var conflict *ConflictError
			expect.That(t, errors.As(err, &conflict) && errors.Is(err, fs.ErrExist) && conflict.Owner == tc.others.Owner &&
				conflict.Port == tc.port,
				"%v (%+v), want a conflict about port %q", err, conflict, tc.port)
			expect.Equal(t, nft(t, ns, "list", "ruleset"), before, "something has changed")
		})
	}
	c, _ := dialNew(t)
	expect.Is(t, c.Update(ctx, old, old), fs.ErrNotExist, "without a table")
}

func TestUntouchedKnowsItsOwnChanges(t *testing.T) {
	t.Parallel()
	others, ns := dialNew(t)
	n := podnet()
	mustEnsure(t, others, n)
	want := func(c *Conn, when string, want bool) {
		t.Helper()
		expect.Of(nftnl.Of(c.Socket()).Unchanged()).Is(t, want, "%s", when)
	}
	want(others, "a Conn without a cache", false)
	c := newCached(t, ns, "")
	want(c.Conn, "at first", false)
	c.wantLooks(t, "then", n, false)
	want(c.Conn, "after a look", true)
	mustAdd(t, c.Conn, pod("00000000001", "10.22.0.5"))
	want(c.Conn, "after its own Add", true)
	nft(t, ns, "flush set inet tombolo pods4")
	want(c.Conn, "after others' change", false)
	c.wantLooks(t, "once more", mended(t, others, n), false)
}

// mended mends a network that somebody else emptied.
func mended(t *testing.T, c *Conn, n Network) Network {
	t.Helper()
	mustEnsure(t, c, n)
	return n
}

// An endpoint that is given twice is one.
func TestRemoveOfTheSameTwice(t *testing.T) {
	t.Parallel()
	c, _ := dialNew(t)
	mustEnsure(t, c, guardNet())
	bare, whole := guardedPod("0000000000a", "veth1", podMAC), guardedPod("0000000000a", "veth1", podMAC, pod4)
	mustAdd(t, c, whole)
	must.Succeed(t, c.Remove(context.Background(), bare, whole, whole))
	wantEndpoints(t, c)
}
