package nft

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// sentinelNet has a part in every set that there is.
func sentinelNet() Network {
	n := guardNet()
	n.Masquerade = true
	return n
}

// sentinelPods have something in most.
func sentinelPods() []Endpoint {
	a := guardedPod("00000000001", "veth1", podMAC, pod4, pod6)
	a.Masquerade = true
	a.Ports = []Port{tcpPort("", 8080), tcpPort("192.0.2.1", 8081), tcpPort("2001:db8::1", 8081)}
	return []Endpoint{a, guardedPod("00000000002", "veth2", otherMAC)}
}

func allSets(t *testing.T, c *Conn, n Network) []ruleset.Set {
	t.Helper()
	rs := must.Of(c.ruleset(&n)).Get(t)
	return rs.Sets()
}

func flushCommand(s ruleset.Set) string {
	kind := "set"
	if s.DataLen > 0 {
		kind = "map"
	}
	return fmt.Sprintf("flush %s %s tombolo %s", kind, nftnl.FamilyName(s.Family), s.Name)
}

func TestEmptiedSetIsFoundAndMended(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c, ns := dialNew(t)
	n, pods := sentinelNet(), sentinelPods()
	other := Network{Name: "other", Guard: true}
	mustEnsure(t, c, n)
	mustEnsure(t, c, other)
	mustAdd(t, c, pods...)
	before := normal(nft(t, ns, "list", "ruleset"))
	for _, s := range allSets(t, c, n) {
		nft(t, ns, flushCommand(s))
		expect.Of(c.Ready(ctx, n)).Is(t, false, "%s: Ready", s.Name)
		// Those of masquerade are one network's own.
		expect.Of(c.Ready(ctx, other)).Is(t, ruleset.IsMasqueradeSet(s.Name), "%s: Ready of another network", s.Name)
		diffs, err := c.Check(ctx, n)
		expect.That(t, err == nil && names(diffs, s.Name), "%s: Check: %v, %v", s.Name, diffs, err)
		expect.Equal(t, ensured(t, c, n, false), outcome{true, true}, "%s: Prepare", s.Name)
		must.Succeed(t, c.Replace(ctx, pods...))
		expect.Of(c.Ready(ctx, n)).Is(t, false, "%s: Ready before Ensure", s.Name)
		out := mustEnsure(t, c, n)
		expect.That(t, out.Emptied, "%s: Ensure: %+v", s.Name, out)
		wantReady(t, c, n, pods...)
		wantReady(t, c, other)
		expect.NoDiff(t, cmp.Diff(before, normal(nft(t, ns, "list", "ruleset"))), "%s", s.Name)

		nft(t, ns, flushCommand(s))
		expect.Of(c.Ensure(ctx, n, pods...)).Is(t, true, "%s: Ensure of all that is known", s.Name)
		wantReady(t, c, n, pods...)
	}
}

// Each way leaves the same chains with the same comments as before, and sets with all of their elements.
func TestAnOlderSaveIsFoundAndMended(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c, ns := dialNew(t)
	n, pods := sentinelNet(), sentinelPods()
	mustEnsure(t, c, n)
	mustAdd(t, c, pods[0])
	save := nft(t, ns, "list", "ruleset")
	element := regexp.MustCompile(`(?s)elements = (\{.*? \})`).FindStringSubmatch(nft(t, ns, "list", "set", "inet", "tombolo", "pods4"))[1]
	mustAdd(t, c, pods[1])
	now := normal(nft(t, ns, "list", "ruleset"))
	for _, loaded := range []string{
		"flush ruleset\n" + save,
		"delete table inet tombolo\ndelete table bridge tombolo\n" + save,
		"flush set inet tombolo pods4\nadd element inet tombolo pods4 " + element,
	} {
		path := filepath.Join(t.TempDir(), "save")
		must.Succeed(t, os.WriteFile(path, []byte(loaded), 0o600))
		nft(t, ns, "-f", path)
		mustBeReady(t, c, n, false)
		diffs, err := c.Check(ctx, n)
		expect.That(t, err == nil && names(diffs, "loaded elements from a save"), "%.40q: Check: %v, %v", loaded, diffs, err)
		expect.Of(c.Ensure(ctx, n, pods...)).Is(t, true, "%.40q: Ensure", loaded)
		wantReady(t, c, n, pods...)
		expect.NoDiff(t, cmp.Diff(now, normal(nft(t, ns, "list", "ruleset"))), "%.40q", loaded)
	}
}

func names(diffs []tombolo.Difference, what string) bool {
	for _, d := range diffs {
		if strings.Contains(d.String(), what) {
			return true
		}
	}
	return false
}

// A call that is stopped between the two leaves it to the next.
func TestPrepareIsNotTheEnd(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, damage := range []string{"", "flush ruleset", "delete table bridge tombolo", "flush set inet tombolo pods4"} {
		c, ns := dialNew(t)
		n, pods := sentinelNet(), sentinelPods()
		if damage != "" {
			mustEnsure(t, c, n)
			mustAdd(t, c, pods...)
			nft(t, ns, damage)
		}
		for range 2 {
			expect.Equal(t, ensured(t, c, n, false), outcome{true, true}, "%q: Prepare", damage)
			expect.Of(c.Ready(ctx, n)).Is(t, false, "%q: Ready", damage)
		}
		must.Succeed(t, c.Replace(ctx, pods...))
		mustEnsure(t, c, n)
		wantReady(t, c, n, pods...)
		expect.Of(c.Prepare(ctx, n)).Is(t, false, "%q: Prepare of what is there", damage)
	}
}

func TestSentinelsAreNobodys(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c, ns := dialNew(t)
	n, pods := sentinelNet(), sentinelPods()
	mustEnsure(t, c, n)
	mustAdd(t, c, pods...)
	must.Succeed(t, c.Remove(ctx, pods[0]))
	must.Succeed(t, c.RemoveOwners(ctx, pods[1].Owner))
	wantEndpoints(t, c)
	wantNoElements(t, c)
	wantReady(t, c, n)
	must.Succeed(t, c.RemoveNetwork(ctx, n.Name))
	expect.Equal(t, nft(t, ns, "list", "ruleset"), "", "the last network leaves")
}

// No endpoint has a key that is a sentinel's.
func TestEndpointOfNoAddressIsInvalid(t *testing.T) {
	t.Parallel()
	for _, a := range []string{"0.0.0.0", "::"} {
		ep := pod("00000000001", a)
		expect.Is(t, ep.check(), tombolo.ErrInvalid, "%s", a)
	}
	ep := pod("00000000001", "10.22.0.5")
	ep.Bridge = ruleset.SentinelLink
	expect.Is(t, ep.check(), tombolo.ErrInvalid, "%s", ep.Bridge)
}

func mustGeneration(t *testing.T, c *Conn) uint32 {
	t.Helper()
	return must.Of(nftnl.Generation(c.tables.Conn)).Get(t)
}

func mustBeReady(t *testing.T, c *Conn, n Network, want bool) {
	t.Helper()
	expect.Of(c.Ready(context.Background(), n)).Is(t, want, "Ready of %s", n.Name)
}
