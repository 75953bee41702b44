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

// Ensure builds the firewall of a network, or repairs differences: the tables, the sets, the chains and all their
// rules, in one transaction. Elements of sets stay if the set can stay, and other networks are not changed. Any
// number of programs may call it at once.
//
// If a set was created again, or another program emptied it or loaded an older copy of it, elements of all networks'
// endpoints are missing. Ensure then adds those of back, as Replace does. So back must be all endpoints that the
// caller knows. If Ensure is interrupted before they are added, Ready and Check still find something to do. They do
// not notice endpoints that are not in back; CheckEndpoint does.
//
// The rules that all networks share are created with the first network. A change of the Config's Mark changes them
// for all.
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

	// Another flush is not noticed before this point.
	return changed, c.Replace(ctx, back...)
}

// Prepare does the work of Ensure, except for the sentinels of sets that another program emptied or loaded. So Ready
// stays false, for every network that uses such a set, until Ensure is called. Prepare is for a caller that restores
// more than endpoints, or several networks that share sets. If it is interrupted, the next caller finds the sets as
// they were.
func (c *Conn) Prepare(ctx context.Context, n Network) (changed bool, _ error) {
	changed, _, err := c.ensure(ctx, n, false)
	return changed, err
}

// ensure implements Ensure, with sentinels, and Prepare. It reports whether elements of endpoints may be missing,
// because a set was created (also for the first time), or because another program emptied or loaded one.
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
		differs, lost := !p.Nothing(), len(p.Sets)+len(p.Touched) > 0
		if !sentinels {
			p.Touched = nil
		}

		if !p.Nothing() {
			if err := p.Transaction(have, sentinels).Commit(c.tables.Conn); err != nil {
				return explainKernel(explainBusy(err))
			}
		}

		changed, emptied = differs, lost
		return nil
	})

	return changed, emptied, err
}

// Ready reports whether the network can do without Ensure. It uses single requests for the table and its chains, for
// a caller that asks before each pod. It checks that they exist, are not dormant, are hooked in, and were created for
// this network and mark by this version with as many rules as then. It also checks each set's sentinel, which is
// missing after another program emptied the set or loaded an older copy. Ready does not see missing elements or
// replaced rules: see Check.
func (c *Conn) Ready(ctx context.Context, n Network) (bool, error) {
	want, err := c.ruleset(&n)
	if err = errors.Join(ctx.Err(), err); err != nil {
		return false, err
	}

	if !c.seen.IsOn() {
		have, err := c.tables.Outline(want)
		return err == nil && have.LooksRight(want), err
	}

	generation, err := nftnl.Generation(c.tables.Conn)
	if err != nil {
		return false, err
	}

	sum := want.Sum()
	if c.seen.Covers(generation, sum) {
		return true, nil
	}

	// The data read from here on belong to this generation or a later one.
	settled := nftnl.Unchanged(c.tables.Conn, generation)
	if settled != nil && !nftnl.IsOvertaken(settled) {
		return false, settled
	}

	have, err := c.tables.Outline(want)
	if err != nil || !have.LooksRight(want) {
		return false, err
	}

	if settled == nil {
		c.seen.Add(generation, sum)
	}

	return true, nil
}

// explainKernel adds an explanation if the kernel returns "not found" for an object that is only added.
func explainKernel(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf(
			"the kernel lacks a part of nf_tables, or could not load it (CONFIG_NFT_FIB_INET, CONFIG_NFT_NAT, "+
				"CONFIG_NFT_MASQ and CONFIG_NFT_CT are needed, and CONFIG_NF_TABLES_NETDEV, CONFIG_NFT_FWD_NETDEV "+
				"and CONFIG_NFT_DUP_NETDEV for a shared NIC): %w", err)
	}
	return err
}

// explainBusy adds an explanation if a chain or set cannot be deleted.
func explainBusy(err error) error {
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("a rule that is not ours refers to it (see: nft list ruleset): %w", err)
	}
	return err
}
