// Package report words what Node.Inspect finds for an operator: one line for each cause, each
// with what mends it.
package report

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/network"
)

// Line is one cause.
type Line struct {
	Text   string
	Remedy tombolo.Remedy
}

// String ends in the remedy: "table inet tombolo is missing (110 pods affected) [repair]".
func (l Line) String() string {
	if l.Remedy == "" {
		return l.Text
	}
	return fmt.Sprintf("%s [%s]", l.Text, l.Remedy)
}

// finding is a difference, and whose it is.
type finding struct {
	tombolo.Difference
	network string // empty: nobody's
	pod     string // empty: the network's own
}

func (f *finding) where() string {
	switch {
	case f.pod != "":
		return f.pod + " of network " + f.network + ": "
	case f.network != "":
		return "network " + f.network + ": "
	}
	return ""
}

// findings lists all that was found.
func findings(in *network.Inspection) []finding {
	var list []finding
	if in == nil {
		return nil
	}
	for _, n := range in.Networks {
		for _, d := range n.Differences {
			list = append(list, finding{d, n.Network, ""})
		}
	}
	for _, d := range slices.Concat(in.Uplinks, in.Stray, in.Damaged) {
		list = append(list, finding{d, "", ""})
	}
	for _, r := range in.Attachments {
		for _, d := range r.Differences {
			list = append(list, finding{d, r.Network, PodName(r.Pod, r.ContainerID) + ", " + r.IfName})
		}
	}
	return list
}

// Each gives a line for each difference.
func Each(in *network.Inspection) []Line {
	var list []Line
	for _, f := range findings(in) {
		list = append(list, Line{f.where() + f.String(), f.Remedy})
	}
	return list
}

// Causes gives a line for each cause: what is missing stands for all that was in it, and what
// several pods or networks share is said once, with their number.
func Causes(in *network.Inspection) []Line { return causes(findings(in)) }

// CausesOf is Causes of some of the differences.
func CausesOf(in *network.Inspection, which func(tombolo.Difference) bool) []Line {
	return causes(slices.DeleteFunc(findings(in), func(f finding) bool { return !which(f.Difference) }))
}

// Apart gives lines for what belongs to no pod, and OfPods for what does.
func Apart(in *network.Inspection) []Line {
	lines := causes(slices.DeleteFunc(findings(in), func(f finding) bool { return f.pod != "" }))
	if in != nil {
		for _, text := range in.Others {
			lines = append(lines, Line{Text: text})
		}
	}
	return lines
}

// OfPods gives lines for what belongs to pods.
func OfPods(in *network.Inspection) []Line {
	return causes(slices.DeleteFunc(findings(in), func(f finding) bool { return f.pod == "" }))
}

func causes(found []finding) []Line {
	var groups []*group
	for i := range found {
		if text, covers := rootOf(&found[i]); covers != nil && !slices.ContainsFunc(groups, func(g *group) bool { return g.text == text }) {
			groups = append(groups, &group{text: text, covers: covers, remedy: found[i].Remedy})
		}
	}
	for i := range found {
		f := &found[i]
		k := keyOf(f)
		at := slices.IndexFunc(groups, func(g *group) bool { return g.covers != nil && g.covers(f) || g.covers == nil && g.key == k })
		if at < 0 {
			at, groups = len(groups), append(groups, &group{key: k, remedy: f.Remedy})
		}
		groups[at].list = append(groups[at].list, f)
	}
	list := make([]Line, len(groups))
	for i, g := range groups {
		list[i] = Line{g.String(), g.remedy}
	}
	return list
}

// group is what has one cause.
type group struct {
	text   string
	covers func(*finding) bool // nil: what has the key
	key    key
	remedy tombolo.Remedy
	list   []*finding
}

func (g *group) String() string {
	if g.covers == nil && len(g.list) == 1 {
		return g.list[0].where() + g.list[0].String()
	}
	text := g.text
	if text == "" {
		text = g.list[0].String()
		if other := slices.IndexFunc(g.list, func(f *finding) bool { return f.String() != text }); other >= 0 {
			text += ", and so on"
			if g.key.what == "rule" {
				text = fmt.Sprintf("%s: %d rules are missing", g.key.object, g.wants())
			}
		}
	}
	pods, networks := map[string]bool{}, map[string]bool{}
	for _, f := range g.list {
		if networks[f.network] = true; f.pod != "" {
			pods[f.where()] = true
		}
	}
	switch {
	case len(pods) > 0:
		return fmt.Sprintf("%s (%s affected)", text, printable.Count(len(pods), "pod", "pods"))
	case len(networks) > 1:
		return fmt.Sprintf("%s (%s affected)", text, printable.Count(len(networks), "network", "networks"))
	}
	return g.list[0].where() + text
}

// wants is how many different things are missing: networks share rules.
func (g *group) wants() int {
	all := map[string]bool{}
	for _, f := range g.list {
		all[f.Want] = true
	}
	return len(all)
}

// Summary says in a line how many things an inspection found.
func Summary(in *network.Inspection) string {
	differing := 0
	for _, r := range in.Attachments {
		differing += min(len(r.Differences), 1)
	}
	text := printable.Count(len(in.Attachments), "attachment", "attachments")
	for _, part := range []struct {
		n         int
		one, many string
	}{
		{differing, "of them differs", "of them differ"},
		{len(in.Networks), "network differs", "networks differ"},
		{len(in.Uplinks), "difference of uplinks", "differences of uplinks"},
		{len(in.Stray), "stray object", "stray objects"},
		{len(in.Damaged), "damaged record", "damaged records"},
	} {
		switch part.n {
		case 0:
		case 1:
			text += ", 1 " + part.one
		default:
			text += fmt.Sprintf(", %d %s", part.n, part.many)
		}
	}
	return text
}

// rootOf says what a difference is the cause of: a table, a set, or a bridge is missing.
func rootOf(f *finding) (text string, covers func(*finding) bool) {
	if f.Want == "" || f.Have != "" {
		return "", nil
	}
	switch {
	case f.Object == "nf_tables" && f.What == "table":
		table := "table " + f.Want
		return table + " is missing", func(o *finding) bool {
			return o.Difference == f.Difference || o.Object == table || strings.HasSuffix(o.Object, " of "+table)
		}
	case strings.HasPrefix(f.Object, "table ") && f.What == "set":
		of := " " + f.Want + " of " + f.Object
		return f.Difference.String(), func(o *finding) bool {
			return o.Difference == f.Difference || strings.HasSuffix(o.Object, of)
		}
	case strings.HasPrefix(f.Object, "bridge ") && f.What == "link" && f.Object == "bridge "+f.Want:
		text := f.Text
		if text == "" {
			text = f.Object + " is missing"
		}
		return text, func(o *finding) bool {
			return o.Difference == f.Difference || o.What == "bridge" && o.Want == f.Want || strings.HasPrefix(o.Text, f.Object+": ")
		}
	}
	return "", nil
}

// key is what differences of one cause have in common.
type key struct {
	object, what, want, have, text string
	remedy                         tombolo.Remedy
}

func keyOf(f *finding) key {
	k := key{object: f.Object, what: f.What, want: f.Want, have: f.Have, text: f.Text, remedy: f.Remedy}
	if f.pod == "" {
		if f.What == "rule" && f.Have == "" {
			k.want = "some" // somebody flushed the chain
		}
		return k
	}
	kind, _, _ := strings.Cut(f.Object, " ")
	switch {
	case kind == "port" || kind == "link":
		k.object = kind // the rest is one pod's
	case f.What == "element", strings.HasPrefix(f.What, "data of"), strings.HasPrefix(f.What, "owner of"):
		k.what, _, _ = strings.Cut(f.What, " ")
	}
	switch {
	case f.Text != "":
	case f.Have == "":
		k.want = "some" // addresses and keys are a pod's own
	case f.Want == "":
		k.have = "some"
	case strings.Contains(f.What, "alias"), strings.Contains(f.What, "MAC"), k.what != f.What:
		k.want, k.have = "some", "some"
	}
	return k
}
