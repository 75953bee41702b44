package nft

import (
	"context"
	"errors"
	"io/fs"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

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
		t.Run(name, func(t *testing.T) {
			t.Parallel()
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
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, ns := dialNew(t)
			mustEnsure(t, c, guardNet())
			mustAdd(t, c, old, tc.others)
			before := nft(t, ns, "list", "ruleset")
			err := c.Update(ctx, old, tc.new)
			var conflict *ConflictError
			if !errors.As(err, &conflict) || !errors.Is(err, fs.ErrExist) || conflict.Owner != tc.others.Owner || conflict.Port != tc.port {
				t.Errorf("%v (%+v), want a conflict about port %q", err, conflict, tc.port)
			}
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
