package nft

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// Ensure creates the firewall of a network, or repairs it. In one transaction, it adds the missing tables, sets,
// chains and rules. It keeps elements if their set can stay, and does not change other networks. Several programs may
// call it at the same time.
//
// Elements of endpoints of all networks are missing if Ensure creates a set again, or if another program has emptied
// or reloaded one. In these cases, Ensure calls Replace for the endpoints in back. So back must contain all endpoints
// that the caller knows, of all networks. If Ensure is interrupted before it has added them, Ready and Check still
// report differences. They do not notice missing endpoints that are not in back. CheckEndpoint does.
//
// The first Ensure also creates the rules that all networks share. A different Config.Mark changes these rules for
// all networks.
func (c *Conn) Ensure(ctx context.Context, n Network, back ...Endpoint) (changed bool, _ error) {
	changed, emptied, err := c.ensure(ctx, n, len(back) == 0)
	if err != nil || !emptied || len(back) == 0 {
		return changed, err
	}

	if err := c.Replace(ctx, back...); err != nil {
		return changed, err
	}

	if _, _, err := c.ensure(ctx, n, true); err != nil {
		return changed, err
	}

	// Another program may have emptied a set in the meantime, so restore the endpoints again.
	return changed, c.Replace(ctx, back...)
}

// Prepare works like Ensure, but adds no sentinels, neither to new sets nor to sets that another program emptied or
// loaded. So Ready stays false for every network that uses such a set, until Ensure is called. Prepare is for callers
// that restore more than endpoints, or several networks that share sets. If such a caller is interrupted, Ready still
// returns false for the next caller.
func (c *Conn) Prepare(ctx context.Context, n Network) (changed bool, _ error) {
	changed, _, err := c.ensure(ctx, n, false)
	return changed, err
}

// ensure implements Ensure (with sentinels) and Prepare (without). emptied reports whether elements of endpoints may
// be missing, because ensure created a set or because another program emptied or loaded a set. emptied is also true
// if ensure created a set for the first time.
func (c *Conn) ensure(ctx context.Context, n Network, sentinels bool) (changed, emptied bool, _ error) {
	want, err := c.ruleset(&n)
	if err != nil {
		return false, false, err
	}

	err = nftnl.Retry(ctx, func() error {
		have, err := c.tables.Read(want)
		if err != nil {
			return err
		}

		p := ruleset.Plan(want, have)
		differs, lost := !p.IsEmpty(), len(p.Sets)+len(p.Unmarked) > 0
		if !sentinels {
			p.Unmarked = nil
		}

		if !p.IsEmpty() {
			if err := p.Transaction(have, sentinels).Commit(c.tables.Conn); err != nil {
				return explainKernel(explainBusy(err))
			}
		}

		changed, emptied = differs, lost
		return nil
	})

	return changed, emptied, err
}

// Ready reports whether the network is complete, so that the caller does not need Ensure. It is cheap enough to be
// called for each new pod. Ready checks that the tables and chains exist, are active and hooked in, and were created
// for this network and mark by this version. It also checks the number of rules in each chain, and the sentinel of
// each set. After another program emptied a set or loaded an older copy, its sentinel is missing or different. Ready
// does not notice rules that were replaced (see Check), or missing elements of endpoints (see CheckEndpoint).
func (c *Conn) Ready(ctx context.Context, n Network) (bool, error) {
	want, err := c.ruleset(&n)
	if err = errors.Join(ctx.Err(), err); err != nil {
		return false, err
	}

	if !c.verified.IsOn() {
		have, err := c.tables.Outline(want)
		return err == nil && have.IsComplete(want), err
	}

	generation, err := nftnl.Generation(c.tables.Conn)
	if err != nil {
		return false, err
	}

	sum := want.Sum()
	if c.verified.Covers(generation, sum) {
		return true, nil
	}

	// Wait until the changes of this generation are visible. The following answers then belong to this generation or
	// to a later one.
	settled := nftnl.Unchanged(c.tables.Conn, generation)
	if settled != nil && !nftnl.IsOvertaken(settled) {
		return false, settled
	}

	have, err := c.tables.Outline(want)
	if err != nil || !have.IsComplete(want) {
		return false, err
	}

	if settled == nil {
		c.verified.Add(generation, sum)
	}

	return true, nil
}

// explainKernel adds an explanation if the kernel returns "not found" although the transaction only adds objects.
// Such an error means that the kernel lacks an nf_tables module.
func explainKernel(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf(
			"the kernel lacks a part of nf_tables, or could not load it (CONFIG_NFT_FIB_INET, CONFIG_NFT_NAT, "+
				"CONFIG_NFT_MASQ and CONFIG_NFT_CT are needed, and CONFIG_NF_TABLES_NETDEV, CONFIG_NFT_FWD_NETDEV "+
				"and CONFIG_NFT_DUP_NETDEV for a shared NIC): %w", err)
	}
	return err
}

// explainBusy adds an explanation to the EBUSY that the kernel returns if a rule still uses a chain or set.
func explainBusy(err error) error {
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("a rule that is not ours refers to it (see: nft list ruleset): %w", err)
	}
	return err
}
