// Package view shows an operator what there is on a node: its networks with their pools, its pods
// as a table, and all of it as a picture, in a terminal or as SVG. It looks at records and at what
// package network finds, and changes nothing.
//
// Names come from configurations and from pods, so whatever is drawn is made printable first.
package view

import (
	"fmt"
	"html"
	"strings"

	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/network"
)

const nameMost = 40 // columns of a name

// Map draws a node for a terminal, or for what is none. All text of others is printable, and in ASCII.
func (n *Node) Map(s Screen) string {
	p := &painter{Screen: s}
	if len(n.Bridges) == 0 {
		p.line("no network is on record")
	}
	for i := range n.Bridges {
		p.bridge(&n.Bridges[i])
	}
	if len(n.Bridges) > 0 {
		p.line()
	}
	if len(n.Wrong) == 0 {
		p.line("nothing is wrong")
		return p.String()
	}
	p.line(p.in(bold, "wrong:"))
	for _, text := range n.Wrong {
		for i, line := range fold(label(text, 2000), s.Width-4) {
			p.line([]string{"  ", "    "}[min(i, 1)], p.in(red, line))
		}
	}
	return p.String()
}

func (p *painter) bridge(b *Bridge) {
	uplink, name := "", "no bridge"
	if b.Uplink != "" {
		uplink = p.in(markOf(b.Wrong), "uplink "+label(b.Uplink, nameMost)) + p.glyph(" ── ", " -- ")
	}
	if b.Name != "" {
		name = "bridge " + label(b.Name, nameMost)
	}
	p.line(uplink, p.in(bold, name), b.title())
	for i := range b.Networks {
		first, rest := p.glyph("├─ ", "|- "), p.glyph("│  ", "|  ")
		if i == len(b.Networks)-1 {
			first, rest = p.glyph("└─ ", "`- "), "   "
		}
		p.network(&b.Networks[i], first, rest)
	}
}

// indent is how many columns stand before what belongs to a network.
const indent = 3

func (p *painter) network(d *Drawn, first, rest string) {
	name := "network " + label(d.Name, nameMost)
	for i, line := range fold(d.title(), max(p.Width-indent-len(name)-2, narrowest/2)) {
		if i == 0 {
			p.line(first, p.in(markOf(d.Wrong), name), ": ", line)
		} else {
			p.line(rest, strings.Repeat(" ", len(name)+2), line)
		}
	}
	for _, pod := range d.Pods {
		p.pod(pod, rest)
	}
}

// pod draws a pod, and its host ports behind it, or below where there are more than fit.
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
	ports, arrow := fold(strings.Join(hostPorts(pod.Attachment), " "), p.Width-indent-6), p.glyph(" ← ", " < ")
	behind := ""
	if len(ports) == 1 && 2+len(text)+3+len(ports[0]) <= p.Width-indent {
		behind, ports = arrow+ports[0], nil
	}
	p.line(rest, p.in(how, mark+text), behind)
	for _, list := range ports {
		p.line(rest, "  ", arrow, list)
	}
}

// SVG is the map as an image that needs nothing else. A line of it has one style.
func (n *Node) SVG() string {
	lines := strings.Split(strings.TrimSpace(n.Map(Screen{Width: 150, Colour: true, Unicode: true})), "\n")
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="1130" height="%d" font-family="monospace" font-size="12">
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
