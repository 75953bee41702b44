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

// Ensure builds what a network needs, or mends what is missing, different or does
// not belong there: the tables, the sets, the chains and all their rules, in one
// transaction. Elements of sets are left as they are where the set can stay, and so
// are other networks. It is safe with any number of other programs at it at once.
//
// Where a set had to be made anew, or another program had emptied it or loaded an older save of it, elements of all
// networks' endpoints are gone.
// back are those that Ensure then puts back, as Replace does: all that the caller knows. Where it is stopped before
// they are back, Ready and Check say that there is something to do. Of endpoints that are not in back they say nothing:
// CheckEndpoint does.
//
// The rules that all networks share come with the first network; a change of the
// Config's Mark changes them for all.
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
	// Another flush shows only from here on.
	return changed, c.Replace(ctx, back...)
}

// Prepare does all that Ensure does, but leaves out the sentinels of sets that another program emptied or loaded. So
// Ready stays false, for every network that has a part in such a set, until Ensure is called. Prepare is for a caller
// that has more to put back than endpoints, or several networks that share sets: if the caller is stopped in between,
// the next one finds the sets as they were.
func (c *Conn) Prepare(ctx context.Context, n Network) (changed bool, _ error) {
	changed, _, err := c.ensure(ctx, n, false)
	return changed, err
}

// ensure implements Ensure, with sentinels, and Prepare. It reports whether elements of endpoints may be missing: a set
// was made, also for the first time, or another program emptied or loaded one.
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

// Ready says whether the network can do without Ensure, by single gets of the table and its chains, for a caller
// that asks before each pod: whether they are there, not dormant, and hooked in, made for this network and this
// mark by this version, with as many rules as then, and whether each set has its sentinel, which it lacks after another
// program emptied it or loaded an older save. Ready sees neither single elements nor that a rule was replaced by
// another: see Check.
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
	// All that is read from here on is of this generation, or of a later one.
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

// explainKernel tells why something that is only added is not there.
func explainKernel(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the kernel lacks a part of nf_tables, or could not load it (CONFIG_NFT_FIB_INET, CONFIG_NFT_NAT, CONFIG_NFT_MASQ and CONFIG_NFT_CT are needed, and CONFIG_NF_TABLES_NETDEV, CONFIG_NFT_FWD_NETDEV and CONFIG_NFT_DUP_NETDEV for a shared NIC): %w", err)
	}
	return err
}

// explainBusy tells why a chain or a set cannot be deleted.
func explainBusy(err error) error {
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("a rule that is not ours refers to it (see: nft list ruleset): %w", err)
	}
	return err
}
