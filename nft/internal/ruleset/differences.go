package ruleset

import (
	"fmt"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/diff"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// Differences compares the tables, sets and chains in the kernel with the intended ones. If a table does not exist,
// its sets and chains are not listed.
func (rs *Ruleset) Differences(have *State) []tombolo.Difference {
	var list diff.List
	for _, family := range rs.tables {
		table := rs.table.Of(family).String()
		if t, ok := have.Tables[family]; !ok {
			list.Add("nf_tables", "table", table, "")
		} else if t.IsDormant() {
			list.Add("table "+table, "flag", "", "dormant")
		}
	}

	for _, s := range rs.Sets() {
		if !have.hasTable(s.Family) {
			continue
		}
		// If a program loaded a table from a save, all its sets have the same difference. List it once.
		if d, differs := s.difference(have); differs && !slices.Contains(list, d) {
			list = append(list, d)
		}
	}

	for i := range rs.Chains {
		if ch := &rs.Chains[i]; have.hasTable(ch.Family) {
			ch.addDifferences(&list, have)
		}
	}

	for _, at := range rs.gone {
		if have.hasChain(at) {
			list.Add("table "+rs.table.Of(at.Family).String(), "chain", "", at.Name)
		}
	}

	// Leave out elements of missing sets, since the sets themselves are listed above.
	add, del := have.bridgeChanges(rs)
	for _, el := range add {
		if _, ok := have.sets[el.Set]; ok {
			list.Add(rs.table.Label("set", el.Set).String(), "element", el.KeyText(), "")
		}
	}

	for _, el := range del {
		list.Add(rs.table.Label("set", el.Set).String(), "element", "", el.KeyText())
	}
	return list
}

func (st *State) hasTable(family uint8) bool {
	_, ok := st.Tables[family]
	return ok
}

func (s *Set) difference(have *State) (d tombolo.Difference, differs bool) {
	table, set := "table "+have.table.Of(s.Family).String(), have.table.Label("set", s.Place).String()
	got, ok := have.sets[s.Place]
	isSaved, isLoaded := have.sentinels[s.Place]
	switch {
	case !ok:
		return tombolo.Difference{Object: table, What: "set", Want: s.Name}, true
	case !s.matches(got):
		return tombolo.Difference{Object: set, What: "type", Want: s.state().describe(), Have: got.describe()}, true
	case isSaved:
		return d, false
	case isLoaded:
		d.Text = table + ": another program has loaded elements from a save, which may be old"
		return d, true
	}
	return tombolo.Difference{Object: set, What: "element", Want: s.Sentinel().KeyText()}, true
}

func (s setState) describe() string {
	text := fmt.Sprintf("key type %#x of %d bytes with flags %#x", s.keyType, s.keyLen, s.flags)
	if s.dataLen > 0 {
		text += fmt.Sprintf(" to data type %#x of %d bytes", s.dataType, s.dataLen)
	}
	return text
}

// addDifferences adds the differences of a chain and of its rules. It compares rules by their comments.
func (ch *Chain) addDifferences(list *diff.List, have *State) {
	got, ok := have.Chains[ch.Place]
	if !ok {
		list.Add("table "+have.table.Of(ch.Family).String(), "chain", ch.Name, "")
		return
	}

	object := have.table.Label("chain", ch.Place).String()
	list.Add(object, "hook", ch.describe(), describeHook(got))
	if got.Kind != "" && got.Policy != PolicyAccept {
		list.Add(object, "policy", "accept", "drop")
	}

	rules, comments := ch.Rules(), have.rules[ch.Place]
	list.Add(object, "comment (version and settings)", strconv.Quote(ch.Comment(len(rules))),
		strconv.Quote(got.Comment))

	before, rest := len(*list), slices.Clone(comments)
	for _, want := range rules {
		if i := slices.Index(rest, want.Comment); i >= 0 {
			rest = slices.Delete(rest, i, i+1)
		} else {
			list.Add(object, "rule", strconv.Quote(want.Comment), "")
		}
	}

	for _, comment := range rest {
		list.Add(object, "rule", "", strconv.Quote(comment))
	}

	inOrder := slices.EqualFunc(comments, rules, func(is string, want Rule) bool { return is == want.Comment })
	if len(*list) == before && !inOrder {
		list.Add(object, "order of the rules", "as they were made", "another")
	}
}

func (ch *Chain) describe() string {
	return describeHook(nftnl.Chain{Kind: ch.Kind, Hook: ch.Hook, Device: ch.Device, Priority: ch.Priority})
}

func describeHook(ch nftnl.Chain) string {
	hook := strconv.Itoa(int(ch.Hook))

	// The names of enum nf_inet_hooks, in the kernel's order.
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
