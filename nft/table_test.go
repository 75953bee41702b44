package nft

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/nft/foreign"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// Two programs on one node, each with a table of its own and a pod on the same bridge.
func TestTwoTablesLeaveEachOtherAlone(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	s := newSite(t)
	embedder := &Config{NetNS: s.host, Table: "embedder", Mark: 0x2000}
	other, err := Dial(embedder)
	must.Succeed(t, err)
	t.Cleanup(func() { other.Close() })
	admission := foreign.On(s.c.Socket(), nil)
	otherAdmission := foreign.On(other.Socket(), &foreign.Config{Table: embedder.Table, Mark: embedder.Mark})

	ours, theirs := podnet(), podnet()
	ours.Bridge, theirs.Bridge = "cbr0", "cbr0"
	theirs.Name, theirs.Guard = "theirs", true
	pod := pod("0123456789a", pod4, pod6)
	pod.Masquerade = false
	second := Endpoint{Owner: "b", Network: "theirs", Bridge: "cbr0", Addrs: nstest.Addrs(other4), MAC: []byte{2, 0, 0, 0, 0, 6}, Guard: GuardAddresses, GuardedPort: "veth2"}
	nstest.Run(t, s.other, "ip", "link", "set", "eth0", "address", "02:00:00:00:00:06")
	tables := func(name string) string {
		var all []string
		for _, family := range []string{"inet", "bridge"} {
			if list, err := nstest.Try(s.host, "nft", "list", "table", family, name); err == nil {
				all = append(all, normal(list))
			}
		}
		return strings.Join(all, "")
	}
	inOrder := func(c *Conn, a *foreign.Conn, n Network, ep Endpoint) {
		t.Helper()
		wantReady(t, c, n, ep)
		wantEndpoints(t, c, Endpoint{Owner: ep.Owner, Network: ep.Network, Bridge: ep.Bridge, Addrs: ep.Addrs, MAC: ep.MAC, Guard: ep.Guard, GuardedPort: ep.GuardedPort})
		expect.Of(a.Check(ctx)).Len(t, 0, "Check of the rule in FORWARD")
	}

	mustEnsure(t, s.c, ours)
	must.Succeed(t, s.c.SetHost(ctx, []string{"up0"}, nil, nil))
	mustAdd(t, s.c, pod)
	alone := tables(nftnl.DefaultTable)
	mustEnsure(t, other, theirs)
	must.Succeed(t, other.SetHost(ctx, []string{"up0"}, nil, nil))
	mustAdd(t, other, second)
	nstest.Script(t, s.host, "iptables -P FORWARD DROP")
	for _, from := range []*foreign.Conn{admission, otherAdmission} {
		changed, err := from.Ensure(ctx)
		must.That(t, err == nil && changed, "Ensure of the rule in FORWARD: %v, %v", changed, err)
	}
	both := func() {
		t.Helper()
		inOrder(s.c, admission, ours, pod)
		inOrder(other, otherAdmission, theirs, second)
		nstest.Reaches(t, s.pod, far4, true)
		nstest.Reaches(t, s.other, far4, true)
	}
	both()
	expect.NoDiff(t, cmp.Diff(alone, tables(nftnl.DefaultTable)), "the default table changed")
	for _, c := range []*Conn{s.c, other} {
		list, err := foreign.On(c.Socket(), &foreign.Config{Table: string(c.tables.Name), Mark: c.mark}).Obstacles(ctx, foreign.Path{Bridge: "cbr0"})
		expect.That(t, err == nil && len(list) == 0, "obstacles to table %s: %v, %v", c.tables.Name, list, err)
	}

	// What is emptied of one is mended by its own.
	was := tables("embedder")
	nft(t, s.host, "flush", "set", "inet", nftnl.DefaultTable, ruleset.Pods4Set)
	expect.Of(other.Ready(ctx, theirs)).Is(t, true, "Ready of the other")
	out := mustEnsure(t, other, theirs)
	expect.That(t, !out.Changed, "the other mended something: %+v", out)
	out = mustEnsure(t, s.c, ours)
	expect.That(t, out.Emptied, "not mended: %+v", out)
	must.Succeed(t, s.c.Replace(ctx, pod))
	both()
	// What is removed of one stays with the other.
	must.Succeed(t, s.c.RemoveOwners(ctx, pod.Owner, second.Owner))
	for _, n := range []Network{ours, theirs} {
		must.Succeed(t, s.c.RemoveNetwork(ctx, n.Name))
	}
	must.Succeed(t, admission.Remove(ctx))
	expect.Equal(t, tables(nftnl.DefaultTable), "", "left of the default table")
	expect.NoDiff(t, cmp.Diff(was, tables("embedder")), "the other table changed")
	inOrder(other, otherAdmission, theirs, second)
	nstest.Reaches(t, s.other, far4, true)
	nstest.Reaches(t, s.pod, far4, false)
}

func TestTablesThatCannotBe(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	for _, cfg := range []Config{
		{Table: "other"}, {Table: "a b", Mark: 1}, {Table: "7up", Mark: 1}, {Table: "-", Mark: 1}, {Table: "a/b", Mark: 1}, {Table: strings.Repeat("a", 33), Mark: 1},
	} {
		cfg.NetNS = ns
		c, err := Dial(&cfg)
		expect.That(t, errors.Is(err, tombolo.ErrInvalid) && c == nil, "%+v: %v", cfg, err)
		expect.Is(t, expect.Err(On(nil, &cfg).Ready(context.Background(), podnet())), tombolo.ErrInvalid, "On of %+v", cfg)
		_, err = foreign.On(nil, &foreign.Config{Table: cfg.Table, Mark: cfg.Mark}).Ready(context.Background())
		expect.That(t, errors.Is(err, tombolo.ErrInvalid), "foreign: %+v: %v", cfg, err)
	}
	c := must.Of(Dial(&Config{NetNS: ns, Table: nftnl.DefaultTable})).Get(t)
	c.Close()
}
