package nft

import (
	"context"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Where iptables over nf_tables has its rules about forwarding.
const (
	iptablesTable   = "filter"
	iptablesForward = "FORWARD"
	// dockerUser is the chain that Docker keeps for others' rules: it calls it before
	// its own, and never empties it.
	dockerUser = "DOCKER-USER"
)

// admissionComment is by what our rule is known, whatever mark it accepts. Saving
// and restoring make a match of iptables' own of it, which counts as well.
const admissionComment = "tombolo: admit what table inet tombolo marks"

// Admission is our rule in somebody else's chain: enough to find it again by one
// get. There is one for each family; without a Chain it says that there was no chain
// to put a rule into.
type Admission struct {
	IPv6   bool   `json:"ipv6,omitempty"`
	Chain  string `json:"chain,omitempty"` // of the table filter
	Handle uint64 `json:"handle,omitempty"`
	// Jump is the handle of the rule in the chain FORWARD by which packets get to
	// Chain, unless that is FORWARD itself.
	Jump uint64 `json:"jump,omitempty"`
}

func (a Admission) family() uint8 {
	if a.IPv6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

// Admit sees to it that iptables, where it works over nf_tables, lets pass what our
// forward chain marks: by one rule in the chain FORWARD of its table filter, for IPv4
// and for IPv6, where that chain is there. It makes neither table nor chain. What
// it gives is for Admitted.
//
// A new rule goes to the head of DOCKER-USER, where FORWARD is sure to call that, or
// else to the head of FORWARD. There it may stay behind what others insert later, as
// long as every packet gets to it or is accepted before: whoever has to be first
// as well would otherwise move his rule and we ours, for ever. A rule that packets no
// longer get to is moved: one in DOCKER-USER that FORWARD no longer calls, or one
// behind an unconditional drop, reject or return. Rules of ours beyond that one, and
// those for another mark, are taken out.
//
// It does all of that in one transaction, however many do the same at once.
func (c *Conn) Admit(ctx context.Context) (_ []Admission, changed bool, _ error) {
	var list []Admission
	err := retry(ctx, func() error {
		p, err := c.planAdmissions(ctx)
		if err != nil {
			return err
		}
		t := p.transaction(c.mark)
		if t.empty() {
			list = p.admissions()
			return c.unchanged(p.generation)
		}
		if err := c.commit(t); err != nil {
			return err
		}
		changed = true
		return errOvertaken // by ourselves: what handle the rule got is to be read
	})
	if err != nil {
		return nil, changed, err
	}
	return list, changed, nil
}

// Admitted says whether the rules that Admit gave are all still there, or where
// there was no chain, that there still is none: by a get of each. It sees neither
// what is put before them nor that the chain DOCKER-USER got a better place: see
// CheckAdmission.
func (c *Conn) Admitted(ctx context.Context, list []Admission) (bool, error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	if len(list) != 2 || list[0].IPv6 == list[1].IPv6 {
		return false, nil // of another version, or none yet
	}
	var b nl.Batch
	found, want, unexpected := 0, 0, false
	for _, a := range list {
		forward := foreignChain{a.family(), iptablesTable, iptablesForward}
		if a.Chain == "" {
			getForeignChain(&b, forward, func(data []byte) error {
				ch, err := decodeChain(data)
				unexpected = unexpected || ch.isForwardHook()
				return err
			})
			continue
		}
		ours := forward
		ours.name = a.Chain
		want++
		getForeignRule(&b, foreignHandle{ours, a.Handle}, func(data []byte) error {
			r, err := decodeForeignRule(a.family(), data)
			if r.admits(c.mark) {
				found++
			}
			return err
		})
		if a.Jump == 0 {
			continue
		}
		want++
		getForeignRule(&b, foreignHandle{forward, a.Jump}, func(data []byte) error {
			r, err := decodeForeignRule(a.family(), data)
			if len(r.conditions) == 0 && (r.verdict == jumps || r.verdict == goesTo) {
				found++
			}
			return err
		})
	}
	if err := c.execute(&b); err != nil {
		return false, err
	}
	return found == want && !unexpected, nil
}

// CheckAdmission lists what Admit would mend.
func (c *Conn) CheckAdmission(ctx context.Context) ([]tombolo.Difference, error) {
	var diffs []tombolo.Difference
	err := retry(ctx, func() error {
		p, err := c.planAdmissions(ctx)
		if err != nil {
			return err
		}
		if diffs = p.differences(c.mark); len(diffs) == 0 {
			return nil
		}
		return c.unchanged(p.generation)
	})
	if err != nil {
		return nil, err
	}
	return diffs, nil
}

// Withdraw takes our rules out of iptables' tables filter, for whatever mark they
// are and in whichever chain.
func (c *Conn) Withdraw(ctx context.Context) error {
	return retry(ctx, func() error {
		generation, err := c.settle()
		if err != nil {
			return err
		}
		t := begin(&generation)
		for _, f := range families() {
			chains, err := c.foreignRules(ctx, f.proto, iptablesTable)
			if err != nil {
				return err
			}
			for _, r := range oursIn(chains) {
				t.delForeignRule(r.at(f.proto))
			}
		}
		return c.commit(t)
	})
}

// isOurs says that a rule is one that Admit made, whatever it does by now.
func (r *foreignRule) isOurs() bool { return r.comment == admissionComment }

// admits says that it is ours and does what it should.
func (r *foreignRule) admits(mark uint32) bool {
	return r.isOurs() && r.verdict == accepts &&
		len(r.conditions) == 1 && r.conditions[0] == condition{on: onMark, mark: mark, mask: mark}
}

// at names a rule of the table filter.
func (r *foreignRule) at(family uint8) foreignHandle {
	return foreignHandle{foreignChain{family, iptablesTable, r.chain}, r.handle}
}

// oursIn gives our rules, those in FORWARD first.
func oursIn(chains map[string][]foreignRule) []*foreignRule {
	var first, others []*foreignRule
	for name, rules := range chains {
		for i := range rules {
			switch {
			case !rules[i].isOurs():
			case name == iptablesForward:
				first = append(first, &rules[i])
			default:
				others = append(others, &rules[i])
			}
		}
	}
	return append(first, others...)
}

// admissionPlan is what there is of our rules in both families, and what to do.
type admissionPlan struct {
	generation uint32
	families   []familyAdmission
}

// familyAdmission is that of one family. Unless there is no chain FORWARD, one of
// keep and insertInto is set.
type familyAdmission struct {
	family     uint8
	keep       *foreignRule
	jump       uint64 // by which packets get to it, if it is not in FORWARD
	insertInto string
	surplus    []*foreignRule
}

// planAdmissions reads what there is and decides what should be. It may be torn by a
// change meanwhile; a transaction with its generation is then refused.
func (c *Conn) planAdmissions(ctx context.Context) (*admissionPlan, error) {
	generation, err := c.settle()
	if err != nil {
		return nil, err
	}
	var b nl.Batch
	forwards := map[uint8]bool{}
	for _, f := range families() {
		getForeignChain(&b, foreignChain{f.proto, iptablesTable, iptablesForward}, func(data []byte) error {
			ch, err := decodeChain(data)
			forwards[f.proto] = ch.isForwardHook()
			return err
		})
	}
	if err := c.execute(&b); err != nil {
		return nil, err
	}
	p := &admissionPlan{generation: generation}
	for _, f := range families() {
		plan := familyAdmission{family: f.proto}
		if forwards[f.proto] {
			chains, err := c.foreignRules(ctx, f.proto, iptablesTable)
			if err != nil {
				return nil, err
			}
			plan.decide(chains, c.mark)
		}
		p.families = append(p.families, plan)
	}
	return p, nil
}

// decide chooses the rule to keep, or the chain that one is to be put into.
func (p *familyAdmission) decide(chains map[string][]foreignRule, mark uint32) {
	w := newWalk(&podPacket{mark: mark, family: p.family}, chains)
	f := w.chain(iptablesForward)
	ours := oursIn(chains)
	if f.how == admitted && f.by.admits(mark) {
		p.keep = f.by
		if f.via != f.by {
			p.jump = f.via.handle
		}
	} else if f.how == admitted {
		// Nothing that a rule of ours could be behind stops the packet: it need only be there.
		for _, r := range ours {
			if r.admits(mark) {
				p.keep = r
				break
			}
		}
	}
	if p.keep == nil {
		p.insertInto = iptablesForward
		if w.jumpTo(iptablesForward, dockerUser) != nil {
			p.insertInto = dockerUser
		}
	}
	for _, r := range ours {
		if r != p.keep {
			p.surplus = append(p.surplus, r)
		}
	}
}

// transaction makes of what there is what should be.
func (p *admissionPlan) transaction(mark uint32) *transaction {
	t := begin(&p.generation)
	for i := range p.families {
		f := &p.families[i]
		if f.insertInto != "" {
			t.insertAdmission(foreignChain{f.family, iptablesTable, f.insertInto}, mark)
		}
		for _, r := range f.surplus {
			t.delForeignRule(r.at(f.family))
		}
	}
	return t
}

// admissions gives the rules, once nothing is left to do.
func (p *admissionPlan) admissions() []Admission {
	var list []Admission
	for i := range p.families {
		f := &p.families[i]
		a := Admission{IPv6: f.family == unix.NFPROTO_IPV6}
		if f.keep != nil {
			a.Chain, a.Handle, a.Jump = f.keep.chain, f.keep.handle, f.jump
		}
		list = append(list, a)
	}
	return list
}

func (p *admissionPlan) differences(mark uint32) []tombolo.Difference {
	var list []tombolo.Difference
	for i := range p.families {
		f := &p.families[i]
		rule := fmt.Sprintf("%q for mark 0x%x", admissionComment, mark)
		missing := f.insertInto != ""
		for _, r := range f.surplus {
			object := r.at(f.family).foreignChain.String()
			if missing && r.admits(mark) {
				missing = false
				list = append(list, tombolo.Difference{
					Object: object, What: "place of rule " + rule,
					Want: "before what every packet is dropped or returned by", Have: "where no packet gets to it",
				})
				continue
			}
			list = append(list, tombolo.Difference{
				Object: object, What: "rule", Have: strconv.Quote(r.comment) + " with handle " + strconv.FormatUint(r.handle, 10),
			})
		}
		if missing {
			list = append(list, tombolo.Difference{
				Object: foreignChain{f.family, iptablesTable, f.insertInto}.String(), What: "rule", Want: rule,
			})
		}
	}
	return list
}
