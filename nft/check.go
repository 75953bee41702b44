package nft

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// Check compares what is there with what the network needs and, unless it is nil,
// with what the endpoint needs, and lists the differences; none is what should be.
//
// Rules are known by their comments, and chains by theirs: a rule that someone put
// in place of ours under the same comment is not found out. More elements than the
// endpoint's are no difference, but for what a guard would let it do as another one. What Check finds of chains, rules and sets, Ensure
// mends; what it finds of elements, Replace.
func (c *Conn) Check(ctx context.Context, n Network, ep *Endpoint) ([]tombolo.Difference, error) {
	if err := c.usable(ctx); err != nil {
		return nil, err
	}

	want, err := c.ruleset(&n)
	if err != nil {
		return nil, err
	}
	if ep != nil {
		if err := ep.check(); err != nil {
			return nil, err
		}
	}
	var diffs []tombolo.Difference
	err = nftnl.Retry(ctx, func() error {
		have, err := c.read(want)
		if err != nil {
			return err
		}
		diffs = want.differences(have)
		if ep != nil && len(have.tables) == len(want.tables) {
			more, err := c.checkEndpoint(ep)
			if err != nil {
				return err
			}
			diffs = append(diffs, more...)
		}
		if len(diffs) == 0 {
			return nil
		}
		// What was read in several requests may never have been so at any one time.
		return c.unchanged(have.generation)
	})
	return diffs, err
}

// differences lists those of the tables, the sets and the chains. Of a table that
// is not there, nothing else is said.
func (rs *ruleset) differences(have *state) []tombolo.Difference {
	var list []tombolo.Difference
	for _, family := range rs.tables {
		t, ok := have.tables[family]
		switch {
		case !ok:
			list = append(list, tombolo.Difference{Object: "nf_tables", What: "table", Want: rs.table.of(family).String()})
		case t.IsDormant():
			list = append(list, tombolo.Difference{Object: "table " + rs.table.of(family).String(), What: "flag", Have: "dormant"})
		}
	}
	for _, s := range rs.sets() {
		if have.hasTable(s.family) {
			list = append(list, s.differences(have)...)
		}
	}
	for i := range rs.chains {
		if ch := &rs.chains[i]; have.hasTable(ch.family) {
			list = append(list, ch.differences(have)...)
		}
	}
	for _, at := range rs.gone {
		if have.hasChain(at) {
			list = append(list, tombolo.Difference{Object: "table " + rs.table.of(at.family).String(), What: "chain", Have: at.name})
		}
	}
	return append(list, rs.bridgeDifferences(have)...)
}

// bridgeDifferences lists those of the sets of bridges, as far as the sets are there.
func (rs *ruleset) bridgeDifferences(have *state) []tombolo.Difference {
	var list []tombolo.Difference
	add, del := have.bridgeChanges(rs)
	for _, el := range add {
		if _, ok := have.sets[el.set]; ok {
			list = append(list, tombolo.Difference{Object: rs.table.label("set", el.set).String(), What: "element", Want: el.keyText()})
		}
	}
	for _, el := range del {
		list = append(list, tombolo.Difference{Object: rs.table.label("set", el.set).String(), What: "element", Have: el.keyText()})
	}
	return list
}

func (st *state) hasTable(family uint8) bool {
	_, ok := st.tables[family]
	return ok
}

func (s *set) differences(have *state) []tombolo.Difference {
	got, ok := have.sets[s.place]
	switch {
	case !ok:
		return []tombolo.Difference{{Object: "table " + have.table.of(s.family).String(), What: "set", Want: s.name}}
	case !s.matches(got):
		return []tombolo.Difference{{
			Object: have.table.label("set", s.place).String(), What: "type", Want: s.state().describe(), Have: got.describe(),
		}}
	case !have.sentinels[s.place]:
		return []tombolo.Difference{{Object: have.table.label("set", s.place).String(), What: "element", Want: s.sentinel().keyText()}}
	}
	return nil
}

func (s setState) describe() string {
	text := fmt.Sprintf("key type %#x of %d bytes with flags %#x", s.keyType, s.keyLen, s.flags)
	if s.dataLen > 0 {
		text += fmt.Sprintf(" to data type %#x of %d bytes", s.dataType, s.dataLen)
	}
	return text
}

func (ch *chain) differences(have *state) []tombolo.Difference {
	got, ok := have.chains[ch.place]
	if !ok {
		return []tombolo.Difference{{Object: "table " + have.table.of(ch.family).String(), What: "chain", Want: ch.name}}
	}
	object := have.table.label("chain", ch.place).String()
	var list []tombolo.Difference
	differs := func(what, want, have string) {
		if want != have {
			list = append(list, tombolo.Difference{Object: object, What: what, Want: want, Have: have})
		}
	}
	differs("hook", ch.describe(), describeHook(got))
	if got.Kind != "" {
		differs("policy", "accept", policyName(got.Policy))
	}
	want := ch.rules()
	differs("comment (version and settings)", strconv.Quote(ch.comment(len(want))), strconv.Quote(got.Comment))
	return append(list, ruleDifferences(object, want, have.rules[ch.place])...)
}

// ruleDifferences tells by their comments which rules are missing, and which are
// too many.
func ruleDifferences(object string, rules []rule, comments []string) []tombolo.Difference {
	rest := slices.Clone(comments)
	var list []tombolo.Difference
	for _, want := range rules {
		i := slices.Index(rest, want.comment)
		if i < 0 {
			list = append(list, tombolo.Difference{Object: object, What: "rule", Want: strconv.Quote(want.comment)})
			continue
		}
		rest = slices.Delete(rest, i, i+1)
	}
	for _, comment := range rest {
		list = append(list, tombolo.Difference{Object: object, What: "rule", Have: strconv.Quote(comment)})
	}
	return list
}

func policyName(policy uint32) string {
	if policy == policyAccept {
		return "accept"
	}
	return "drop"
}

func (ch *chain) describe() string {
	return describeHook(nftnl.Chain{Kind: ch.kind, Hook: ch.hook, Priority: ch.priority})
}

func describeHook(ch nftnl.Chain) string {
	if ch.Kind == "" {
		return "none"
	}
	hook := strconv.Itoa(int(ch.Hook))
	// enum nf_inet_hooks
	if names := [...]string{"prerouting", "input", "forward", "output", "postrouting"}; int(ch.Hook) < len(names) {
		hook = names[ch.Hook]
	}
	return fmt.Sprintf("type %s hook %s priority %d", ch.Kind, hook, ch.Priority)
}

// CheckEndpoint compares what is there with what an endpoint needs, and lists the
// differences, as Check does. It looks at its elements alone.
func (c *Conn) CheckEndpoint(ctx context.Context, ep Endpoint) ([]tombolo.Difference, error) {
	if err := c.usable(ctx); err != nil {
		return nil, err
	}

	if err := ep.check(); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return c.checkEndpoint(&ep)
}

// checkEndpoint compares an endpoint's elements, and whose they are.
func (c *Conn) checkEndpoint(ep *Endpoint) ([]tombolo.Difference, error) {
	want := ep.elements()
	have, err := c.lookup(append(want, ep.leftovers()...))
	if err != nil {
		return nil, err
	}
	var list []tombolo.Difference
	comment := ownerComment(ep.Owner, networkKey(ep.Network))
	for i, el := range want {
		object := c.table.label("set", el.set).String()
		switch {
		case have[i] == nil:
			list = append(list, tombolo.Difference{Object: object, What: "element", Want: el.keyText()})
		case !bytes.Equal(have[i].data, el.data):
			list = append(list, tombolo.Difference{
				Object: object, What: "data of element " + el.keyText(),
				Want: el.dataText(), Have: have[i].dataText(),
			})
		case have[i].comment != comment:
			list = append(list, tombolo.Difference{
				Object: object, What: "owner of element " + el.keyText(),
				Want: strconv.Quote(comment), Have: strconv.Quote(have[i].comment),
			})
		}
	}
	missing, err := c.unclaimed(want)
	if err != nil {
		return nil, err
	}
	for _, claim := range missing {
		list = append(list, tombolo.Difference{Object: c.table.label("set", claim.set).String(), What: "element", Want: claim.keyText()})
	}
	for _, el := range have[len(want):] {
		if el != nil && el.comment == comment {
			list = append(list, tombolo.Difference{Object: c.table.label("set", el.set).String(), What: "element", Have: el.keyText()})
		}
	}
	return list, nil
}
