package nft

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

func TestPolicyNamesItself(t *testing.T) {
	t.Parallel()
	for want, p := range map[string]Policy{"open": Open, "same-bridge": SameBridge, "isolated": Isolated, "policy 7": 7} {
		expect.Equal(t, p.String(), want)
	}
}

func TestImpossiblePoliciesAreRefused(t *testing.T) {
	t.Parallel()
	c, _ := dialNew(t)
	for _, n := range []Network{
		{Name: "x", Bridge: "no/link"},
		{Name: "x", Bridge: "cbr0", Policy: 3},
		{Name: "x", Policy: Isolated},
	} {
		expect.Is(t, expect.Err(c.Ensure(context.Background(), n)), tombolo.ErrInvalid, "%+v", n)
	}
}

// Of two bridges: what a pod of each may send to one of the other, and to another
// of its own. It goes the same both ways, whatever the policies.
func TestPolicyDropsWhatItShould(t *testing.T) {
	t.Parallel()
	p := newPublished(t, true, tcpAndUDP(Port{HostPort: hostPort, PodPort: podPort})...)
	p.serve(t)
	for _, tc := range []struct {
		near, far           Policy
		within, between, by bool // by way of the port on the host
		internal            bool // the near one
	}{
		{Open, Open, true, true, true, false},
		{SameBridge, Open, true, true, true, false},
		{Isolated, Open, false, true, true, false},
		{SameBridge, SameBridge, true, false, false, false},
		{Isolated, SameBridge, false, false, false, false},
		{SameBridge, Isolated, true, false, false, false},
		{Isolated, Isolated, false, false, false, false},
		{Open, Open, true, false, false, true},
		{Isolated, Open, false, false, false, true},
		{Open, Isolated, true, true, true, false},
	} {
		t.Run(fmt.Sprintf("%s and %s, internal %t", tc.near, tc.far, tc.internal), func(t *testing.T) {
			p.network.Policy, p.network.Internal = tc.near, tc.internal
			mustEnsure(t, p.c, p.network)
			mustEnsure(t, p.c, Network{
				Name: "away", Bridge: "cbr1", Masquerade: true, Prefixes: nstest.Prefixes("10.23.0.0/16", "fd00:23::/64"), Policy: tc.far,
			})
			wantReady(t, p.c, p.network, p.ep)
			for _, way := range []struct {
				from, to string
				open     bool
			}{
				{"pod", other4, tc.within}, {"pod", other6, tc.within}, {"other pod", pod4, tc.within},
				{"pod", remote4, tc.between}, {"pod", remote6, tc.between},
				{"pod of another bridge", pod4, tc.between}, {"pod of another bridge", pod6, tc.between},
				{"host", pod4, true}, {"host", remote6, true},
				{"pod", bridge4, true}, {"pod", host6, true}, {"pod", far4, !tc.internal}, {"pod", far6, !tc.internal},
				{"pod of another bridge", far6, true},
			} {
				wait := briefly / 2
				if way.open {
					wait = patience
				}
				err := nstest.PingWith(t, p.where(way.from), nstest.Addr(way.to), nstest.Echo{Wait: wait})
				expect.That(t, (!way.open || err == nil) && (way.open || errors.Is(err, nstest.ErrNoEcho)),
					"%s to %s: %v, want it open: %v", way.from, way.to, err, way.open)
			}
			at := netip.AddrPortFrom(nstest.Addr(host4), hostPort)
			for from, open := range map[string]bool{"pod of another bridge": tc.by, "other pod": tc.within, "outside": !tc.internal, "host": true} {
				wait := briefly / 2
				if open {
					wait = patience
				}
				if err := call(p.where(from), "tcp", at.String(), wait); (err == nil) != open {
					t.Errorf("a published port, from a %s: %v, want it open: %v", from, err, open)
				}
			}
		})
	}
}

// bridgeEntries gives what the sets of bridges have, and of which network.
func bridgeEntries(tb testing.TB, c *Conn) map[string]string {
	tb.Helper()
	all := must.Of(c.elements(context.Background())).Get(tb)
	got := map[string]string{}
	for _, el := range all {
		for _, s := range ruleset.BridgeSets() {
			if s.Place == el.Set || strings.HasPrefix(el.Comment, ruleset.OwnerPrefix+":") {
				owner, _, _ := strings.Cut(strings.TrimPrefix(el.Comment, ruleset.OwnerPrefix), ",")
				got[el.String()] = owner
			}
		}
	}
	return got
}

func TestSetsOfBridgesFollowTheNetwork(t *testing.T) {
	t.Parallel()
	c, _ := dialNew(t)
	const pair, one, ours = "cbr0 . cbr0 of set ", "cbr0 of set ", "cbr0 of set ours"
	n := Network{Name: "podnet"}
	for _, tc := range []struct {
		name   string
		change func()
		want   map[string]string
	}{
		{"no bridge", func() {}, map[string]string{}},
		{"a bridge", func() { n.Bridge = "cbr0" }, map[string]string{pair + "bridges": ":podnet", ours: ":podnet", one + "bypass": ":podnet"}},
		{"NF call", func() { n.NFCall = true }, map[string]string{pair + "bridges": ":podnet", ours: ":podnet"}},
		{"same-bridge", func() { n.Policy = SameBridge }, map[string]string{pair + "bridges": ":podnet", ours: ":podnet", one + "policies": ":podnet"}},
		{"isolated", func() { n.Policy = Isolated }, map[string]string{
			pair + "bridges": ":podnet", ours: ":podnet", one + "policies": ":podnet", pair + "isolated": ":podnet",
		}},
		{"another bridge", func() { n.Bridge = "cbr1" }, map[string]string{
			"cbr1 . cbr1 of set bridges": ":podnet", "cbr1 of set ours": ":podnet", "cbr1 of set policies": ":podnet", "cbr1 . cbr1 of set isolated": ":podnet",
		}},
		{"internal", func() { n.Bridge, n.Policy, n.Internal = "cbr0", Open, true }, map[string]string{
			pair + "bridges": ":podnet", ours: ":podnet", one + "internal": ":podnet",
		}},
		{"open", func() { n.NFCall, n.Internal = false, false }, map[string]string{
			pair + "bridges": ":podnet", ours: ":podnet", one + "bypass": ":podnet",
		}},
	} {
		tc.change()
		expect.Of(c.Ready(context.Background(), n)).Is(t, false, "%s: Ready before Ensure", tc.name)
		mustEnsure(t, c, n)
		wantReady(t, c, n)
		expect.NoDiff(t, cmp.Diff(tc.want, bridgeEntries(t, c)), "%s", tc.name)
	}
}

// A policy is the bridge's: the strictest of its networks'.
func TestNetworksOfOneBridgeShareItsPolicy(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c, ns := dialNew(t)
	a := Network{Name: "a", Bridge: "cbr0", NFCall: true, Policy: SameBridge}
	b := Network{Name: "b", Bridge: "cbr0", NFCall: true, Policy: Isolated}
	open := Network{Name: "open", Bridge: "cbr0", NFCall: true}
	for _, n := range []Network{a, b, open} {
		mustEnsure(t, c, n)
	}
	for _, n := range []Network{a, b, open} {
		wantReady(t, c, n)
	}
	want := map[string]string{"cbr0 . cbr0 of set bridges": ":a", "cbr0 of set ours": ":a", "cbr0 of set policies": ":a", "cbr0 . cbr0 of set isolated": ":b"}
	expect.NoDiff(t, cmp.Diff(want, bridgeEntries(t, c)))
	must.Succeed(t, c.RemoveNetwork(ctx, "a"))
	expect.Of(c.Ready(ctx, b)).Is(t, false, "Ready without what the other network had for both")
	mustEnsure(t, c, b)
	want = map[string]string{"cbr0 . cbr0 of set bridges": ":b", "cbr0 of set ours": ":b", "cbr0 of set policies": ":b", "cbr0 . cbr0 of set isolated": ":b"}
	expect.NoDiff(t, cmp.Diff(want, bridgeEntries(t, c)), "afterwards")
	for _, name := range []string{"open", "b"} {
		must.Succeed(t, c.RemoveNetwork(ctx, name))
	}
	expect.Equal(t, nft(t, ns, "list", "ruleset"), "", "left")
}

func TestDamagedSetsOfBridgesAreMended(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	n := Network{Name: "podnet", Bridge: "cbr0", Policy: Isolated}
	for _, tc := range []struct{ damage, want string }{
		{"flush set inet tombolo bridges", "set bridges of table inet tombolo: element cbr0 . cbr0 is missing"},
		{"flush set inet tombolo policies", "set policies of table inet tombolo: element cbr0 is missing"},
		{"flush set inet tombolo isolated", "set isolated of table inet tombolo: element cbr0 . cbr0 is missing"},
		{"delete element inet tombolo bypass { cbr0 }", "set bypass of table inet tombolo: element cbr0 is missing"},
		{`add element inet tombolo policies { cbr7 comment "tombolo:1::podnet" }`, "set policies of table inet tombolo: element cbr7"},
	} {
		c, ns := dialNew(t)
		mustEnsure(t, c, n)
		before := bridgeEntries(t, c)
		nft(t, ns, tc.damage)
		diffs, err := c.Check(ctx, n)
		emptied := strings.HasPrefix(tc.damage, "flush")
		if emptied && len(diffs) > 0 {
			if !strings.Contains(diffs[0].String(), ruleset.SentinelLink) {
				t.Errorf("%s: %v comes before the set's sentinel", tc.damage, diffs[0])
			}
			diffs = diffs[1:]
		}
		expect.That(t, err == nil && len(diffs) == 1 && strings.HasPrefix(fmt.Sprint(diffs[0]), tc.want),
			"%s: %v, %v; want %s", tc.damage, diffs, err, tc.want)
		expect.Of(c.Ready(ctx, n)).Is(t, strings.HasPrefix(tc.damage, "add"), "%s: Ready", tc.damage)
		out := mustEnsure(t, c, n)
		expect.That(t, out.Changed && out.Emptied == emptied, "%s: Ensure says %+v", tc.damage, out)
		wantReady(t, c, n)
		expect.NoDiff(t, cmp.Diff(before, bridgeEntries(t, c)), "%s", tc.damage)
	}
	// A set that has to be made anew takes its elements along.
	c, ns := dialNew(t)
	nft(t, ns, "add table inet tombolo; add set inet tombolo policies { type ether_addr; }; "+
		"add set inet tombolo bridges { type ifname; }; add element inet tombolo bridges { cbr0 }")
	expect.Of(c.Ready(ctx, n)).Is(t, false, "Ready with foreign sets")
	out := mustEnsure(t, c, n)
	expect.That(t, out.Emptied, "Ensure says %+v", out)
	wantReady(t, c, n)
}
