// Package view shows the state of a node to an operator. It prints networks with their pools, and pods as a table. It
// also draws a map of everything, for a terminal or as SVG. It reads records and the findings of package network, and
// changes nothing.
//
// Names come from configurations and from pods, so all text is made printable before it is drawn.
package view

import (
	"cmp"
	"context"
	"fmt"
	"html"
	"net/netip"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/network"
)

// Node holds the data about a node for drawing its map.
type Node struct {
	networks   []Network
	problems   []error // errors from reading records
	inspection *network.Inspection
	uplinks    []network.UplinkReport
}

// Draw collects the data for drawing a node: the records in stateDir and, by Inspect, the state of the kernel.
func Draw(ctx context.Context, node *network.Node, stateDir string) (_ *Node, err error) {
	n := &Node{}
	if n.networks, n.problems, err = Load(ctx, node, stateDir, ""); err != nil {
		return nil, err
	}
	if n.inspection, err = node.Inspect(ctx); err != nil {
		return nil, err
	}
	n.uplinks, err = node.Uplinks().List(ctx, "")
	return n, err
}

// wrong returns everything to report as wrong: the causes that `tombolo check` prints, the differences of uplinks,
// and problems with records.
func (n *Node) wrong() []string {
	var list []string
	for _, line := range report.Causes(n.inspection) {
		list = append(list, line.String())
	}

	for _, u := range n.uplinks {
		for _, d := range u.Differences {
			list = append(list, "uplink "+u.NIC+": "+d)
		}
	}

	for _, problem := range n.problems {
		// Skip problems that Inspect has already reported.
		if text := problem.Error(); !slices.ContainsFunc(list,
			func(one string) bool { return strings.HasPrefix(one, text) }) {
			list = append(list, text)
		}
	}

	return list
}

// bridges returns the sorted names of all bridges of networks and uplinks.
func (n *Node) bridges() []string {
	var names []string
	for i := range n.networks {
		names = append(names, n.networks[i].Bridge)
	}
	for i := range n.uplinks {
		names = append(names, n.uplinks[i].Bridge)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

const nameMost = 40 // maximum width of a name, in columns

// Map draws a node for a terminal or a plain text file. Names from configurations and pods become printable ASCII.
func (n *Node) Map(s Screen) string {
	p := &painter{Screen: s, Node: n}
	bridges, wrong := n.bridges(), n.wrong()
	if len(bridges) == 0 {
		p.line("no network is on record")
	}

	for _, name := range bridges {
		p.bridge(name)
	}

	if len(bridges) > 0 {
		p.line()
	}

	if len(wrong) == 0 {
		p.line("nothing is wrong")
		return p.String()
	}

	p.line(p.in(bold, "wrong:"))
	for _, text := range wrong {
		for i, line := range printable.Fold(label(text, 2000), s.Width-4) {
			p.line([]string{"  ", "    "}[min(i, 1)], p.in(red, line))
		}
	}

	return p.String()
}

// bridge draws a bridge with its uplink and its networks.
func (p *painter) bridge(name string) {
	networks := slices.DeleteFunc(slices.Clone(p.networks), func(d Network) bool { return d.Bridge != name })
	nic, mark, mtu, gateways := "", bold, 0, []netip.Prefix{}
	for _, d := range networks {
		nic, mtu = cmp.Or(nic, d.Uplink), max(mtu, d.MTU)
		gateways = append(gateways, slices.DeleteFunc(slices.Clone(d.Gateways),
			func(a netip.Prefix) bool { return slices.Contains(gateways, a) })...)
	}

	for _, u := range p.uplinks {
		if u.Bridge == name {
			nic, mark = u.NIC, markOf(len(u.Differences) > 0)
		}
	}

	title := ifSet(mtu > 0, " (MTU %d)", mtu) + strings.TrimRight(" "+printable.List(gateways, " "), " ")
	uplink := ""
	if nic != "" {
		uplink = p.in(mark, "uplink "+label(nic, nameMost)) + p.glyph(" ── ", " -- ")
	}

	called := "no bridge"
	if name != "" {
		called = "bridge " + label(name, nameMost)
	}

	p.line(uplink, p.in(bold, called), title)
	for i := range networks {
		first, rest := p.glyph("├─ ", "|- "), p.glyph("│  ", "|  ")
		if i == len(networks)-1 {
			first, rest = p.glyph("└─ ", "`- "), "   "
		}
		p.network(&networks[i], first, rest)
	}
}

// indent is the number of columns before the lines of a network.
const indent = 3

// network draws a network with its pods. Pods with differences come first.
func (p *painter) network(d *Network, first, rest string) {
	pods := slices.DeleteFunc(slices.Clone(p.inspection.Attachments),
		func(r network.Report) bool { return r.Network != d.Name })
	slices.SortStableFunc(pods, func(a, b network.Report) int {
		return cmp.Or(min(len(b.Differences), 1)-min(len(a.Differences), 1),
			strings.Compare(report.PodName(a.Pod, a.ContainerID), report.PodName(b.Pod, b.ContainerID)))
	})
	wrong := slices.ContainsFunc(p.inspection.Networks, func(r network.NetworkReport) bool {
		return r.Network == d.Name
	})
	name := "network " + label(d.Name, nameMost)
	for i, line := range printable.Fold(d.title(len(pods)), max(p.Width-indent-len(name)-2, minWidth/2)) {
		if i == 0 {
			p.line(first, p.in(markOf(wrong), name), ": ", line)
		} else {
			p.line(rest, strings.Repeat(" ", len(name)+2), line)
		}
	}

	for i := range pods {
		p.pod(&pods[i], rest)
	}
}

// title returns a network's properties in one line.
func (d *Network) title(pods int) string {
	text := cmp.Or(d.Mode, "no record") + ifSet(d.VLAN != 0, ", VLAN %d", d.VLAN) +
		ifSet(d.DefaultRoute != "", ", default route to the %s", d.DefaultRoute) +
		ifSet(d.Masquerade, ", masquerade") +
		ifSet(d.Policy != "" && d.Policy != "open", ", %s", d.Policy) +
		ifSet(d.Guard, ", guard") + ", " + printable.Count(pods, "pod", "pods")
	for _, p := range d.Pools {
		text += fmt.Sprintf("; %s: %d of %s in use", p.Range, p.Used, number(p.Size))
	}

	return text
}

// pod draws a pod. If its host ports fit, they follow on the same line, and otherwise below.
func (p *painter) pod(pod *network.Report, rest string) {
	mark, how := p.glyph("● ", "* "), plain
	switch {
	case len(pod.Differences) > 0:
		mark, how = p.glyph("✗ ", "x "), red
	case !pod.Ready:
		mark = p.glyph("○ ", "o ")
	}

	name := label(report.PodName(pod.Pod, pod.ContainerID), min(nameMost, p.Width/2-4))
	text := strings.TrimRight(name+"  "+Addresses(pod.Attachment, " "), " ")
	ports := printable.Fold(strings.Join(hostPorts(pod.Attachment), " "), p.Width-indent-6)
	arrow, behind := p.glyph(" ← ", " < "), ""
	if len(ports) == 1 && 2+len(text)+3+len(ports[0]) <= p.Width-indent {
		behind, ports = arrow+ports[0], nil
	}

	p.line(rest, p.in(how, mark+text), behind)
	for _, list := range ports {
		p.line(rest, "  ", arrow, list)
	}
}

// SVG returns the map as a self-contained image. Each line of the image has one style.
func (n *Node) SVG() string {
	lines := strings.Split(strings.TrimSpace(n.Map(Screen{Width: 150, Colour: true, Unicode: true})), "\n")
	var b strings.Builder
	b.WriteString(`<svg xmlns="http://www.w3.org/2000/svg" width="1130" `)
	fmt.Fprintf(&b, `height="%d" font-family="monospace" font-size="12">
<style>text{fill:#123;white-space:pre}.bold{font-weight:bold}.red{fill:#c00}</style>
<rect width="100%%" height="100%%" fill="#fff"/>
<g>
`, (len(lines)+2)*16)
	for i, line := range lines {
		class := "bold"
		if strings.Contains(line, red) {
			class = "red"
		} else if !strings.Contains(line, bold) {
			class = "plain"
		}
		line = strings.NewReplacer(red, "", bold, "", reset, "").Replace(line)
		fmt.Fprintf(&b, `<text class="%s" x="15" y="%d">%s</text>`+"\n", class, (i+2)*16, html.EscapeString(line))
	}

	return b.String() + "</g>\n</svg>\n"
}
