package nft

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// cached is a Conn that goes by what was seen, and counts what it sends.
type cached struct {
	*Conn
	rec *nltest.Recorder
}

func newCached(t *testing.T, ns *netns.NS, text string) *cached {
	t.Helper()
	transport := must.Of(nl.Open(unix.NETLINK_NETFILTER, ns)).Get(t)
	rec := nltest.Record(transport)
	c := &cached{On(nl.New(rec), nil), rec}
	t.Cleanup(func() { c.Close() })
	c.verified.Use(text)
	return c
}

// wantLooks has a network ready, by one look at the generation or by a look at all.
func (c *cached) wantLooks(t *testing.T, when string, n Network, one bool) {
	t.Helper()
	c.rec.Sent()
	expect.Of(c.Ready(context.Background(), n)).Is(t, true, "%s: Ready", when)
	sent := len(c.rec.Sent())
	expect.That(t, (sent == 1) == one, "%s: Ready sends %d datagrams", when, sent)
}

func TestReadyGoesByItsCache(t *testing.T) {
	t.Parallel()
	others, ns := dialNew(t)
	n, second := podnet(), Network{Name: "second", Bridge: "cbr0"}
	mustEnsure(t, others, n)
	mustEnsure(t, others, second)
	c := newCached(t, ns, "")
	c.wantLooks(t, "at first", n, false)
	c.wantLooks(t, "then", n, true)
	c.wantLooks(t, "another network", second, false)
	c.wantLooks(t, "then", second, true)
	c.wantLooks(t, "the first one again", n, true)
	changed := n
	changed.NonMasquerade = nstest.Prefixes("192.0.2.0/24")
	mustBeReady(t, c.Conn, changed, false)
	c.wantLooks(t, "after one that is not ready", n, true)

	// What anybody changes may be ours.
	nft(t, ns, "add table ip others")
	c.wantLooks(t, "after others' change", n, false)
	c.wantLooks(t, "then", n, true)
	c.wantLooks(t, "the other network", second, false)

	// The next one learns it.
	heir := newCached(t, ns, c.verified.Text())
	heir.wantLooks(t, "with another's cache", n, true)
	heir.wantLooks(t, "with another's cache", second, true)
	nft(t, ns, "delete table ip others")
	heir = newCached(t, ns, c.verified.Text())
	heir.wantLooks(t, "with an old cache", n, false)
}

func TestCacheFollowsWhatBecomesOfEndpoints(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	others, ns := dialNew(t)
	n := podnet()
	mustEnsure(t, others, n)
	c := newCached(t, ns, "")
	c.wantLooks(t, "at first", n, false)
	a, b := pod("00000000001", "10.22.0.5"), publisher(2, tcpPort("", 8080), tcpPort("192.0.2.1", 8081))
	moved := pod("00000000001", "10.22.0.6")
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"Add", func() error { return c.Add(ctx, a) }},
		{"Add with ports", func() error { return c.Add(ctx, b) }},
		{"Replace", func() error { return c.Replace(ctx, a, b) }},
		{"Move", func() error { return c.Move(ctx, a, moved) }},
		{"Remove", func() error { return c.Remove(ctx, b) }},
		{"RemoveOwners", func() error { return c.RemoveOwners(ctx, moved.Owner) }},
	} {
		must.Succeed(t, step.do(), "%s", step.name)
		c.wantLooks(t, step.name, n, true)
	}
	// Another's change is not the Conn's own, of the same kind as it may be.
	mustAdd(t, others, a)
	c.wantLooks(t, "another's Add", n, false)
	mustAdd(t, others, b)
	must.Succeed(t, c.Remove(ctx, a))
	c.wantLooks(t, "Remove after another's Add", n, false)
}

func TestCacheDoesNotHideDamage(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	by := func(command string) func(*testing.T, *cached, *netns.NS) {
		return func(t *testing.T, _ *cached, ns *netns.NS) { nft(t, ns, command) }
	}
	for name, damage := range map[string]func(*testing.T, *cached, *netns.NS){
		"flushed ruleset":       by("flush ruleset"),
		"flushed set":           by("flush set inet tombolo pods4"),
		"flushed map":           by("flush map inet tombolo hostports6"),
		"flushed guard":         by("flush set bridge tombolo guarded"),
		"flushed chain":         by("flush chain inet tombolo unmark"),
		"an element of bridges": by(`delete element inet tombolo bridges { "cbr0" . "cbr0" }`),
		"its own RemoveNetwork": func(t *testing.T, c *cached, _ *netns.NS) {
			expect.Success(t, c.RemoveNetwork(ctx, guardNet().Name))
		},
		"its own RemoveNetwork, while there are others": func(t *testing.T, c *cached, _ *netns.NS) {
			mustEnsure(t, c.Conn, Network{Name: "other", Masquerade: true})
			mustBeReady(t, c.Conn, guardNet(), true)
			expect.Success(t, c.RemoveNetwork(ctx, guardNet().Name))
		},
		"its own Prepare": func(t *testing.T, c *cached, ns *netns.NS) {
			nft(t, ns, "flush set inet tombolo pods4")
			expect.Success(t, expect.Err(c.Prepare(ctx, guardNet())))
		},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			others, ns := dialNew(t)
			n := guardNet()
			n.Bridge = "cbr0"
			mustEnsure(t, others, n)
			c := newCached(t, ns, "")
			c.wantLooks(t, "at first", n, false)
			c.wantLooks(t, "then", n, true)
			damage(t, c, ns)
			mustBeReady(t, c.Conn, n, false)
		})
	}
}

// What it takes of a network that is nothing but a bridge's name is elements alone.
func TestCacheEndsWithTheNetwork(t *testing.T) {
	t.Parallel()
	others, ns := dialNew(t)
	n := Network{Name: "plain", Bridge: "cbr0"}
	mustEnsure(t, others, podnet())
	mustEnsure(t, others, n)
	c := newCached(t, ns, "")
	c.wantLooks(t, "at first", n, false)
	must.Succeed(t, c.RemoveNetwork(context.Background(), n.Name))
	mustBeReady(t, c.Conn, n, false)
}

// Each Add says which generation it is for, and others are not held up by that.
func TestAddsWithCachesOvertakeEachOther(t *testing.T) {
	t.Parallel()
	const many, each = 8, 20
	others, ns := dialNew(t)
	n := podnet()
	mustEnsure(t, others, n)
	before := newCached(t, ns, "")
	before.wantLooks(t, "at first", n, false)
	conns := make([]*cached, many)
	for i := range conns {
		conns[i] = newCached(t, ns, before.verified.Text())
	}
	var wg sync.WaitGroup
	for i, c := range conns {
		wg.Go(func() {
			for j := range each {
				expect.Of(c.Ready(context.Background(), n)).Is(t, true, "Ready")
				ep := pod(Owner(fmt.Sprintf("%011x", i*each+j)), fmt.Sprintf("10.22.%d.%d", i, j+1))
				expect.Success(t, c.Add(context.Background(), ep))
			}
		})
	}
	wg.Wait()
	eps, err := others.Endpoints(context.Background(), "")
	expect.That(t, err == nil && len(eps) == many*each, "%d endpoints, %v", len(eps), err)
}

// Whatever a network is made of is part of its sum.
func TestSumsTellNetworksApart(t *testing.T) {
	t.Parallel()
	c := On(nil, nil)
	sums := map[uint64]string{}
	for _, n := range []Network{
		{Name: "a"}, {Name: "b"}, {Name: "a", Masquerade: true}, {Name: "a", Guard: true},
		{Name: "a", Masquerade: true, Prefixes: nstest.Prefixes("10.0.0.0/8")},
		{Name: "a", Bridge: "br0"}, {Name: "a", Bridge: "br1"}, {Name: "a", Bridge: "br0", NFCall: true},
		{Name: "a", Bridge: "br0", LAN: true}, {Name: "a", Bridge: "br0", Policy: SameBridge}, {Name: "a", Bridge: "br0", Policy: Isolated},
		{Name: "a", Dedup: dedups()},
	} {
		rs := must.Of(c.ruleset(&n)).Get(t)
		same, ok := sums[rs.Sum()]
		expect.That(t, !ok, "%+v has the sum of %s", n, same)
		sums[rs.Sum()] = fmt.Sprintf("%+v", n)
	}
	rs := must.Of(On(nil, &Config{Mark: 0x20000}).ruleset(&Network{Name: "a"})).Get(t)
	same, ok := sums[rs.Sum()]
	expect.That(t, !ok, "another mark has the sum of %s", same)
}
