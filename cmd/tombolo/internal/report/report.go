// Package report describes the findings of Node.Inspect for an operator: one line for each cause, with its remedy.
package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/network"
)

// Line describes one cause of differences between the records and the kernel.
type Line struct {
	Text   string // the description, without the affected pod or network
	Remedy tombolo.Remedy
	First  tombolo.Difference // the cause itself, or the first of several equal differences
	Pods   []string           // names of the affected pods

	before, behind string // parts of the line before and after Text, which name the affected pods or networks
}

// String returns the line with the remedy at its end, such as "table inet tombolo is missing (affects default/web-0,
// default/web-1) [repair]". A command in the text follows the names of the pods.
func (l Line) String() string {
	evidence, advice := Advice(l.Text)
	text := l.before + evidence + l.behind + advice
	if l.Remedy != "" {
		text += fmt.Sprintf(" [%s]", l.Remedy)
	}
	return text
}

// Advice splits the advice off a text. The advice begins with "; " and has an optional condition, "this helps: " and
// a command. If there is none, evidence is the whole text.
func Advice(text string) (evidence, advice string) {
	before, _, ok := strings.Cut(text, "this helps: ")
	if at := strings.LastIndex(before, "; "); ok && at >= 0 {
		return text[:at], text[at:]
	}
	return text, ""
}

// Help returns the command, or the instruction, that applies a remedy.
func Help(r tombolo.Remedy) string {
	commands := map[tombolo.Remedy]string{
		tombolo.RemedyRepair:   "tombolo repair",
		tombolo.RemedyCollect:  "tombolo gc",
		tombolo.RemedyRecreate: "delete the pod and create it again",
		tombolo.RemedyKeeper:   "systemctl start tombolod",
	}
	return cmp.Or(commands[r], "change what is named here: the network's configuration, or the host's")
}

// Helps returns the commands or instructions for several causes, each once.
func Helps(lines []Line) string {
	var texts []string
	for _, l := range lines {
		if text := Help(l.Remedy); !slices.Contains(texts, text) {
			texts = append(texts, text)
		}
	}
	return strings.Join(texts, "; ")
}

// finding is a difference with the affected network and pod.
type finding struct {
	tombolo.Difference
	network string // empty if the finding concerns no network
	pod     string // empty if the finding concerns the network itself
	ifName  string
}

// line returns a Line for this finding alone.
func (f *finding) line() Line {
	l := Line{Text: f.String(), Remedy: f.Remedy, First: f.Difference}
	switch {
	case f.pod != "":
		l.before, l.Pods = f.pod+", "+f.ifName+" of network "+f.network+": ", []string{f.pod}
	case f.network != "":
		l.before = "network " + f.network + ": "
	}
	return l
}

// findings returns all differences that an inspection found on the host.
func findings(inspection *network.Inspection) []finding {
	var list []finding
	for _, n := range inspection.Networks {
		for _, d := range n.Differences {
			list = append(list, finding{Difference: d, network: n.Network})
		}
	}
	for _, d := range slices.Concat(inspection.Uplinks, inspection.Stray, inspection.Damaged) {
		list = append(list, finding{Difference: d})
	}
	for _, r := range inspection.Attachments {
		for _, d := range r.Differences {
			list = append(list, finding{d, r.Network, PodName(r.Pod, r.ContainerID), r.IfName})
		}
	}
	return list
}

// Notes returns a line for each kind of change inside pods. Such a change is no fault.
func Notes(inspection *network.Inspection) []Line {
	pods := slices.Clone(inspection.Attachments)
	for i := range pods {
		pods[i].Differences = pods[i].Inside
	}
	return Causes(&network.Inspection{Attachments: pods})
}

// Each returns a line for each difference.
func Each(inspection *network.Inspection) []Line {
	var list []Line
	for _, f := range findings(inspection) {
		list = append(list, f.line())
	}
	return list
}

// Causes returns a line for each cause. A missing object is the cause of all differences of its contents. Equal
// differences of several pods or networks share one line with their names.
func Causes(inspection *network.Inspection) []Line { return causes(findings(inspection)) }

// causes groups findings by their causes, and returns a line for each group.
func causes(found []finding) []Line {
	var groups []*group
	tables := missingTables(found)
	for i := range found {
		if text, covers := rootOf(&found[i], tables); covers != nil &&
			!slices.ContainsFunc(groups, func(g *group) bool { return g.text == text }) {
			groups = append(groups, &group{text: text, covers: covers, first: &found[i]})
		}
	}

	for i := range found {
		f := &found[i]
		at := slices.IndexFunc(groups, func(g *group) bool { return g.covers(f) })
		if at < 0 {
			k := keyOf(f)
			alike := func(o *finding) bool { return keyOf(o) == k }
			at, groups = len(groups), append(groups, &group{covers: alike, first: f})
		}
		groups[at].list = append(groups[at].list, f)
	}

	list := make([]Line, len(groups))
	for i, g := range groups {
		list[i] = g.line()
	}

	return list
}

// group is a set of findings with one cause.
type group struct {
	text   string              // the cause, if it is a missing object: see rootOf
	covers func(*finding) bool // reports whether a finding belongs to the group
	first  *finding
	list   []*finding
}

// line returns a Line for the group.
func (g *group) line() Line {
	l := g.first.line()
	if g.text == "" && len(g.list) == 1 {
		return l
	}

	if g.text != "" {
		l.Text = g.text
	} else if slices.ContainsFunc(g.list, func(f *finding) bool { return f.String() != l.Text }) {
		l.behind = ", and so on"
	}

	var networks []string
	l.Pods = nil
	for _, f := range g.list {
		if f.pod != "" && !slices.Contains(l.Pods, f.pod) {
			l.Pods = append(l.Pods, f.pod)
		}
		if name := "network " + f.network; !slices.Contains(networks, name) {
			networks = append(networks, name)
		}
	}

	slices.Sort(l.Pods)
	if len(l.Pods) > 0 {
		networks = l.Pods
	} else if len(networks) == 1 {
		return l
	}

	l.before, l.behind = "", l.behind+affects(networks)
	return l
}

// affects returns a text with a list of names, shortened if there are many.
func affects(names []string) string {
	const most = 8
	more := ""
	if n := len(names) - most; n > 0 {
		names, more = names[:most], fmt.Sprintf(" and %d more", n)
	}
	return " (affects " + strings.Join(names, ", ") + more + ")"
}

// Summary returns a line with the number of attachments and how many of them differ.
func Summary(inspection *network.Inspection) string {
	text, differing := printable.Count(len(inspection.Attachments), "attachment", "attachments"), 0
	for _, r := range inspection.Attachments {
		differing += min(len(r.Differences), 1)
	}
	if !inspection.Differs() {
		return text + ": nothing differs"
	}
	if differing == 0 {
		return text + ", none of them differs"
	}
	return fmt.Sprintf("%s, %d of them differ%s", text, differing, map[bool]string{true: "s"}[differing == 1])
}

// isTable reports whether the difference is a missing nf_tables table of Tombolo's.
func isTable(f *finding) bool {
	return f.Object == "nf_tables" && f.What == "table" && f.Want != "" && f.Have == ""
}

// missingTables returns the names of Tombolo's missing tables. A flush deletes all tables, so together they count as
// one cause.
func missingTables(found []finding) []string {
	var tables []string
	for i := range found {
		if name := "table " + found[i].Want; isTable(&found[i]) && !slices.Contains(tables, name) {
			tables = append(tables, name)
		}
	}
	return tables
}

// rootOf reports whether a finding is a cause by itself: a missing table, set or bridge. If so, it returns the text
// of the cause, and the function covers, which reports whether another finding follows from it. Otherwise covers is
// nil.
func rootOf(f *finding, tables []string) (text string, covers func(*finding) bool) {
	if f.Want == "" || f.Have != "" {
		return "", nil
	}

	switch {
	case isTable(f):
		verb := " is missing"
		if len(tables) > 1 {
			verb = " are missing"
		}
		return strings.Join(tables, " and ") + verb, func(o *finding) bool {
			return isTable(o) || slices.ContainsFunc(tables,
				func(table string) bool { return strings.HasSuffix(" of "+o.Object, " of "+table) })
		}
	case strings.HasPrefix(f.Object, "table ") && f.What == "set":
		prefix := " " + f.Want + " of " + f.Object
		return f.Difference.String(), func(o *finding) bool {
			return o.Difference == f.Difference || strings.HasSuffix(o.Object, prefix)
		}
	case strings.HasPrefix(f.Object, "bridge ") && f.What == "link" && f.Object == "bridge "+f.Want:
		return cmp.Or(f.Text, f.Object+" is missing"), func(o *finding) bool {
			element := o.What == "element" && strings.HasPrefix(o.Want+o.Have+" ", f.Want+" ")
			return o.Difference == f.Difference || element || o.What == "bridge" && o.Want == f.Want ||
				strings.HasPrefix(o.Text, f.Object+": ")
		}
	}

	return "", nil
}

// keyOf returns the difference of a finding without the details in which findings with the same cause differ.
func keyOf(f *finding) tombolo.Difference {
	k := f.Difference
	if f.pod == "" {
		if f.What == "rule" && f.Have == "" {
			k.Want = "some" // count all missing rules as one: the chain was flushed
		}
		return k
	}

	kind, _, _ := strings.Cut(f.Object, " ")
	switch {
	case kind == "port" || kind == "link":
		k.Object = kind // omit the name, which only one pod has
	case f.What == "element", strings.HasPrefix(f.What, "data of"), strings.HasPrefix(f.What, "owner of"):
		k.What, _, _ = strings.Cut(f.What, " ")
	}

	switch {
	case f.Text != "":
	case f.Have == "":
		k.Want = "some" // omit the address or key, which only one pod has
	case f.Want == "":
		k.Have = "some"
	case strings.Contains(f.What, "alias"), strings.Contains(f.What, "MAC"), k.What != f.What:
		k.Want, k.Have = "some", "some"
	}

	return k
}
