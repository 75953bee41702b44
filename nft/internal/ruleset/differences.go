package ruleset

import (
	"fmt"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// Differences returns the differences of the tables, the sets and the chains. If a table does not exist, it lists
// nothing else about that table.
func (rs *Ruleset) Differences(have *State) []tombolo.Difference {
	var list []tombolo.Difference
	for _, family := range rs.tables {
		t, ok := have.Tables[family]
		switch {
		case !ok:
			list = append(list,
				tombolo.Difference{Object: "nf_tables", What: "table", Want: rs.table.Of(family).String()})
		case t.IsDormant():
			list = append(list,
				tombolo.Difference{Object: "table " + rs.table.Of(family).String(), What: "flag", Have: "dormant"})
		}
	}

	for _, s := range rs.Sets() {
		if !have.hasTable(s.Family) {
			continue
		}
		for _, d := range s.differences(have) {
			if !slices.Contains(list, d) { // all sets of a table that was loaded give one difference
				list = append(list, d)
			}
		}
	}

	for i := range rs.Chains {
		if ch := &rs.Chains[i]; have.hasTable(ch.Family) {
			list = append(list, ch.differences(have)...)
		}
	}

	for _, at := range rs.gone {
		if have.hasChain(at) {
			list = append(list,
				tombolo.Difference{Object: "table " + rs.table.Of(at.Family).String(), What: "chain", Have: at.Name})
		}
	}

	return append(list, rs.bridgeDifferences(have)...)
}

// bridgeDifferences returns the differences of those sets of bridges that exist.
func (rs *Ruleset) bridgeDifferences(have *State) []tombolo.Difference {
	var list []tombolo.Difference
	add, del := have.bridgeChanges(rs)
	for _, el := range add {
		if _, ok := have.sets[el.Set]; ok {
			list = append(list, tombolo.Difference{Object: rs.table.Label("set", el.Set).String(), What: "element",
				Want: el.KeyText()})
		}
	}

	for _, el := range del {
		list = append(list,
			tombolo.Difference{Object: rs.table.Label("set", el.Set).String(), What: "element", Have: el.KeyText()})
	}
	return list
}

func (st *State) hasTable(family uint8) bool {
	_, ok := st.Tables[family]
	return ok
}

func (s *Set) differences(have *State) []tombolo.Difference {
	got, ok := have.sets[s.Place]
	switch {
	case !ok:
		return []tombolo.Difference{{Object: "table " + have.table.Of(s.Family).String(), What: "set", Want: s.Name}}
	case !s.matches(got):
		return []tombolo.Difference{{
			Object: have.table.Label("set", s.Place).String(), What: "type",
			Want: s.state().describe(), Have: got.describe(),
		}}
	case !have.sentinels[s.Place]:
		if _, loaded := have.sentinels[s.Place]; loaded {
			text := "table " + have.table.Of(s.Family).String() +
				": another program has loaded elements from a save, which may be old"
			return []tombolo.Difference{{Text: text}}
		}
		return []tombolo.Difference{{Object: have.table.Label("set", s.Place).String(), What: "element",
			Want: s.Sentinel().KeyText()}}
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

func (ch *Chain) differences(have *State) []tombolo.Difference {
	got, ok := have.Chains[ch.Place]
	if !ok {
		return []tombolo.Difference{{Object: "table " + have.table.Of(ch.Family).String(), What: "chain",
			Want: ch.Name}}
	}

	object := have.table.Label("chain", ch.Place).String()
	var list []tombolo.Difference
	differs := func(what, want, have string) {
		if want != have {
			list = append(list, tombolo.Difference{Object: object, What: what, Want: want, Have: have})
		}
	}
	differs("hook", ch.describe(), describeHook(got))
	if got.Kind != "" && got.Policy != PolicyAccept {
		differs("policy", "accept", "drop")
	}

	want := ch.Rules()
	differs("comment (version and settings)", strconv.Quote(ch.Comment(len(want))), strconv.Quote(got.Comment))
	return append(list, ruleDifferences(object, want, have.rules[ch.Place])...)
}

// ruleDifferences compares rules with comments. It returns the missing rules and the surplus ones, or that the order
// is wrong.
func ruleDifferences(object string, rules []Rule, comments []string) []tombolo.Difference {
	rest := slices.Clone(comments)
	var list []tombolo.Difference
	for _, want := range rules {
		i := slices.Index(rest, want.Comment)
		if i < 0 {
			list = append(list, tombolo.Difference{Object: object, What: "rule", Want: strconv.Quote(want.Comment)})
			continue
		}
		rest = slices.Delete(rest, i, i+1)
	}

	for _, comment := range rest {
		list = append(list, tombolo.Difference{Object: object, What: "rule", Have: strconv.Quote(comment)})
	}

	if len(list) == 0 &&
		!slices.EqualFunc(comments, rules, func(comment string, want Rule) bool { return comment == want.Comment }) {
		list = append(list,
			tombolo.Difference{Object: object, What: "order of the rules", Want: "as they were made", Have: "another"})
	}

	return list
}

func (ch *Chain) describe() string {
	return describeHook(nftnl.Chain{Kind: ch.Kind, Hook: ch.Hook, Device: ch.Device, Priority: ch.Priority})
}

func describeHook(ch nftnl.Chain) string {
	hook := strconv.Itoa(int(ch.Hook))

	// enum nf_inet_hooks
	if names := [...]string{"prerouting", "input", "forward", "output", "postrouting"}; int(ch.Hook) < len(names) {
		hook = names[ch.Hook]
	}

	if ch.Kind == "" {
		return "none"
	}

	if ch.Device != "" {
		hook = [...]string{"ingress", "egress"}[ch.Hook&unix.NF_NETDEV_EGRESS] + " device " + ch.Device
	}

	return fmt.Sprintf("type %s hook %s priority %d", ch.Kind, hook, ch.Priority)
}
