package nft

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

func many(t *testing.T, n int) []*Conn {
	t.Helper()
	ns := nstest.New(t)
	conns := make([]*Conn, n)
	for i := range conns {
		conns[i] = dial(t, ns)
	}
	return conns
}

// ensureAndAdd is what a plugin does, in short.
func ensureAndAdd(c *Conn, n Network, ep Endpoint) error {
	ctx := context.Background()
	for range 10 {
		if ready, err := c.Ready(ctx, n); err != nil {
			return err
		} else if !ready {
			if _, err := c.Ensure(ctx, n); err != nil {
				return err
			}
		}
		if err := c.Add(ctx, ep); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return errors.New("the table went away ten times")
}

func numbered(i int) Endpoint {
	return pod(Owner(fmt.Sprintf("%011x", i)), fmt.Sprintf("10.22.%d.%d", i>>8, i&255), fmt.Sprintf("fd00:22::%x", i))
}

func TestFirstAddsOf64AtOnce(t *testing.T) {
	t.Parallel()
	conns := many(t, 64)
	ctx := context.Background()
	var want []Endpoint
	for i := range conns {
		want = append(want, numbered(i))
	}
	nstest.NoErrors(t, "first adds", nstest.AtOnce(conns, func(i int, c *Conn) error { return ensureAndAdd(c, podnet(), want[i]) }))
	wantEndpoints(t, conns[0], want...)
	wantReady(t, conns[0], podnet(), want...)
	nstest.NoErrors(t, "removes", nstest.AtOnce(conns, func(i int, c *Conn) error {
		if i%2 == 0 {
			return c.RemoveOwners(ctx, want[i].Owner)
		}
		return c.Remove(ctx, want[i])
	}))
	wantEndpoints(t, conns[0])
	nstest.NoErrors(t, "removals of the network", nstest.AtOnce(conns, func(_ int, c *Conn) error { return c.RemoveNetwork(ctx, "podnet") }))
}

func TestNetworksOf32AtOnce(t *testing.T) {
	t.Parallel()
	conns := many(t, 32)
	network := func(i int) Network {
		n := podnet()
		n.Name = fmt.Sprintf("net%d", i%4)
		return n
	}
	ctx := context.Background()
	nstest.NoErrors(t, "ensures", nstest.AtOnce(conns, func(i int, c *Conn) error { _, err := c.Ensure(ctx, network(i)); return err }))
	for i := range 4 {
		wantReady(t, conns[0], network(i))
	}
	nstest.NoErrors(t, "removals", nstest.AtOnce(conns, func(i int, c *Conn) error { return c.RemoveNetwork(ctx, network(i).Name) }))
	for _, family := range ruleset.OurFamilies() {
		inv, err := conns[0].tables.Inventory(family)
		expect.That(t, err == nil && !inv.Table, "left over: %+v, %v", inv, err)
	}
}

func TestAddressWantedBy16HasOneOwner(t *testing.T) {
	t.Parallel()
	conns := many(t, 16)
	mustEnsure(t, conns[0], podnet())
	ctx := context.Background()
	owner := func(i int) Owner { return Owner(fmt.Sprintf("%011x", i)) }

	errs := nstest.AtOnce(conns, func(i int, c *Conn) error { return c.Add(ctx, pod(owner(i), "10.22.0.5", "fd00:22::5")) })
	winner := -1
	for i, err := range errs {
		if err == nil && winner >= 0 {
			t.Errorf("%d and %d both got it", winner, i)
		} else if err == nil {
			winner = i
		}
	}
	for i, err := range errs {
		var conflict *ConflictError
		expect.That(t, i == winner || errors.As(err, &conflict) && conflict.Owner == owner(winner),
			"%d, and %d has it: %v", i, winner, err)
	}
	// Now each takes it, and removes what it had unless it has been taken: what is
	// left is one owner's, and whole.
	nstest.NoErrors(t, "replaces", nstest.AtOnce(conns, func(i int, c *Conn) error {
		ep := pod(owner(i), "10.22.0.5", "fd00:22::5")
		if err := c.Replace(ctx, ep); err != nil || i == 0 {
			return err
		}
		return c.Remove(ctx, ep)
	}))
	got, err := conns[0].Endpoints(ctx, "")
	must.That(t, err == nil && len(got) <= 1, "%+v, %v", got, err)
	expect.That(t, len(got) != 1 || got[0].Owner == owner(0) && len(got[0].Addrs) == 2, "left over: %+v", got)
}

// Removing from a table that others change all the time has to come to an end.
func TestChurnStarvesNobody(t *testing.T) {
	t.Parallel()
	conns := many(t, 24)
	mustEnsure(t, conns[0], podnet())
	ctx := context.Background()
	nstest.NoErrors(t, "churn", nstest.AtOnce(conns, func(i int, c *Conn) error {
		for range 20 {
			ep := numbered(i)
			if err := ensureAndAdd(c, podnet(), ep); err != nil {
				return err
			}
			if _, err := c.Endpoints(ctx, "podnet"); err != nil {
				return err
			}
			if diffs, err := checkAll(c, podnet(), ep); err != nil || len(diffs) > 0 {
				return errors.Join(err, fmt.Errorf("differences: %v", diffs))
			}
			if err := c.Remove(ctx, ep); err != nil {
				return err
			}
		}
		return nil
	}))
	wantEndpoints(t, conns[0])
}
