package nft

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// Outcome says what Ensure did.
type Outcome struct {
	// Changed says that something was built or mended.
	Changed bool
	// Emptied says that a set had to be made anew, the first time too, or that somebody
	// had emptied it. What any endpoint of any network had in it is gone: Replace all
	// that are known.
	Emptied bool
}

// Ensure builds what a network needs, or mends what is missing, different or does
// not belong there: the tables, the sets, the chains and all their rules, in one
// transaction. Elements of sets are left as they are where the set can stay, and so
// are other networks. It is safe with any number of other programs at it at once.
//
// The rules that all networks share come with the first network; a change of the
// Config's Mark changes them for all.
//
// From then on Ready says that all is there, the elements of sets that were emptied
// included. Whoever has many of them to put back should use Prepare first.
func (c *Conn) Ensure(ctx context.Context, n Network) (Outcome, error) {
	if err := c.usable(ctx); err != nil {
		return Outcome{}, err
	}

	return c.ensure(ctx, n, true)
}

// Prepare does all that Ensure does, but for what says that no set has been emptied.
// So Ready stays false, for every network that has a part in an emptied set, until
// Ensure is called: after endpoints have been put back with Replace. If somebody is
// stopped in between, the next caller finds it as it was.
func (c *Conn) Prepare(ctx context.Context, n Network) (Outcome, error) {
	if err := c.usable(ctx); err != nil {
		return Outcome{}, err
	}

	return c.ensure(ctx, n, false)
}

// ensure is both, the one with sentinels.
func (c *Conn) ensure(ctx context.Context, n Network, sentinels bool) (Outcome, error) {
	want, err := c.ruleset(&n)
	if err != nil {
		return Outcome{}, err
	}
	var out Outcome
	err = nftnl.Retry(ctx, func() error {
		have, err := c.read(want)
		if err != nil {
			return err
		}
		p := plan(want, have)
		found := Outcome{Changed: !p.nothing(), Emptied: len(p.sets)+len(p.emptied) > 0}
		if !sentinels {
			p.emptied = nil
		}
		if !p.nothing() {
			if err := p.transaction(have, sentinels).Commit(c.nl); err != nil {
				return explainKernel(explainBusy(err))
			}
		}
		out = found
		return nil
	})
	return out, err
}

// Ready says whether the network can do without Ensure, by single gets of the
// table and its chains: whether they are there, awake and hooked in, made for this
// network and this mark by this version, and with as many rules as then, and whether
// nobody has emptied a set. It sees neither single elements nor what a rule was replaced
// by: see Check.
func (c *Conn) Ready(ctx context.Context, n Network) (bool, error) {
	if err := c.usable(ctx); err != nil {
		return false, err
	}

	want, err := c.ruleset(&n)
	if err != nil {
		return false, err
	}
	if err := ctx.Err(); err != nil {
		return false, err
	}
	if !c.cache.IsOn() {
		have, err := c.outline(want)
		return err == nil && have.looksRight(want), err
	}
	generation, err := c.generation()
	if err != nil {
		return false, err
	}
	sum := want.sum()
	if c.cache.Covers(generation, sum) {
		return true, nil
	}
	// What is seen from here on is of this generation, or of a later one.
	settled := c.unchanged(generation)
	if settled != nil && !nftnl.IsOvertaken(settled) {
		return false, settled
	}
	have, err := c.outline(want)
	if err != nil || !have.looksRight(want) {
		return false, err
	}
	if settled == nil {
		c.cache.Add(generation, sum)
	}
	return true, nil
}

// changes are what makes a ruleset of what is there.
type changes struct {
	tables    []uint8 // make or wake them, by family
	sets      []set
	emptied   []set // those that are there, and lack their sentinels
	chains    []*chain
	oldSets   []place // to be deleted, and most of them made anew
	oldChains []place
	// What to change in the sets of bridges, and the comment of what is added.
	add, del []element
	comment  string
}

func (p *changes) nothing() bool {
	return len(p.tables)+len(p.sets)+len(p.emptied)+len(p.chains)+len(p.oldChains)+len(p.add)+len(p.del) == 0
}

// plan finds the changes. A chain is never mended, but made anew: so it is all as
// it should be, and carries the comment that says so, which cannot be changed.
func plan(want *ruleset, have *state) *changes {
	p := &changes{emptied: have.emptied(want)}
	for _, family := range want.tables {
		if t, ok := have.tables[family]; !ok || t.IsDormant() {
			p.tables = append(p.tables, family)
		}
	}
	for _, s := range want.sets() {
		got, ok := have.sets[s.place]
		if ok && s.matches(got) {
			continue
		}
		p.sets = append(p.sets, s)
		if ok {
			p.oldSets = append(p.oldSets, s.place)
		}
	}
	for i := range want.chains {
		ch := &want.chains[i]
		got, ok := have.chains[ch.place]
		// Rules hold on to the sets that they look into.
		if ok && ch.matches(got) && have.hasRules(ch) && len(p.oldSets) == 0 {
			continue
		}
		p.chains = append(p.chains, ch)
		if ok {
			p.oldChains = append(p.oldChains, ch.place)
		}
	}
	for _, at := range want.gone {
		if have.hasChain(at) {
			p.oldChains = append(p.oldChains, at)
		}
	}
	p.comment = want.bridgeComment
	p.add, p.del = have.bridgeChanges(want)
	return p
}

// transaction makes the changes to what was seen in a state, with or without sentinels
// in new sets.
func (p *changes) transaction(seen *state, sentinels bool) *transaction {
	t := seen.table.begin(&seen.generation)
	for _, family := range p.tables {
		t.newTable(family)
	}
	for _, at := range p.oldChains {
		t.delChain(at)
	}
	for _, at := range p.oldSets {
		t.delSet(at)
	}
	for i, s := range p.sets {
		t.newSet(s, uint32(i+1))
		if sentinels {
			t.newElement(s.sentinel(), sentinelComment)
		}
	}
	for _, s := range p.emptied {
		t.newElement(s.sentinel(), sentinelComment)
	}
	for _, ch := range p.chains {
		list := ch.rules()
		t.newChain(ch, len(list))
		for _, r := range list {
			t.newRule(ch.place, r)
		}
	}
	for _, el := range p.del {
		t.delElement(el)
	}
	for _, el := range p.add {
		t.newElement(el, p.comment)
	}
	return t
}

// explainKernel tells why something that is only added is not there.
func explainKernel(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the kernel lacks a part of nf_tables, or could not load it (CONFIG_NFT_FIB_INET, CONFIG_NFT_NAT, CONFIG_NFT_MASQ and CONFIG_NFT_CT are needed): %w", err)
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
