// Package view shows an operator what there is on a node: its networks with their pools, its pods
// as a table, and all of it as a picture, in a terminal or as SVG. It looks at records and at what
// package network finds, and changes nothing.
//
// Names come from configurations and from pods, so whatever is drawn is made printable first.
package view

import (
	"encoding/xml"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/tombolo-cni/tombolo/network"
)

const nameMost = 40 // columns of a name

// Map draws a node for a terminal, or for what is none. All text of others is printable, and in ASCII.
func (n *Node) Map(s Screen) string { return n.paint(s).text() }

func (n *Node) paint(s Screen) *painter {
	p := &painter{Screen: s}
	if len(n.Bridges) == 0 {
		p.line(piece{"no network is on record", plain})
	}
	for i := range n.Bridges {
		p.bridge(&n.Bridges[i])
	}
	if len(n.Bridges) > 0 {
		p.line()
	}
	if len(n.Wrong) == 0 {
		p.line(piece{"nothing is wrong", plain})
		return p
	}
	p.line(piece{"wrong:", bold})
	for _, text := range n.Wrong {
		for i, line := range fold(label(text, 2000), s.Width-4) {
			p.line(piece{[]string{"  ", "    "}[min(i, 1)], plain}, piece{line, red})
		}
	}
	return p
}

func (p *painter) bridge(b *Bridge) {
	var head []piece
	if b.Uplink != "" {
		how := bold
		if b.Wrong {
			how = red
		}
		head = append(head, piece{"uplink " + label(b.Uplink, nameMost), how}, piece{p.glyph(" ── ", " -- "), plain})
	}
	p.line(append(head, piece{b.name(), bold}, piece{b.title(), plain})...)
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
	how := bold
	if d.Wrong {
		how = red
	}
	name := "network " + label(d.Name, nameMost)
	for i, line := range fold(d.title(), max(p.Width-indent-len(name)-2, narrowest/2)) {
		if i == 0 {
			p.line(piece{first, plain}, piece{name, how}, piece{": " + line, plain})
		} else {
			p.line(piece{rest + strings.Repeat(" ", len(name)+2) + line, plain})
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
	text := strings.TrimRight(label(nameOf(pod), min(nameMost, p.Width/2-4))+"  "+Addresses(pod.Attachment, " "), " ")
	line := []piece{{rest, plain}, {mark + text, how}}
	ports, arrow := fold(strings.Join(hostPorts(pod.Attachment), " "), p.Width-indent-6), p.glyph(" ← ", " < ")
	if len(ports) == 1 && 2+len(text)+3+len(ports[0]) <= p.Width-indent {
		line, ports = append(line, piece{arrow + ports[0], plain}), nil
	}
	p.line(line...)
	for _, list := range ports {
		p.line(piece{rest + "  " + arrow + list, plain})
	}
}

// Of the picture, in columns and in pixels.
const (
	svgColumns = 150
	svgWidth   = 1130
	svgChar    = 7.3
	svgLine    = 16
)

// SVG is the map as an image that needs nothing else.
func (n *Node) SVG() string {
	p := n.paint(Screen{Width: svgColumns, Unicode: true})
	var b strings.Builder
	height := (len(p.lines) + 2) * svgLine
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="monospace" font-size="12">
<style>text{fill:#123;white-space:pre}.bold{font-weight:bold}.red{fill:#c00}</style>
<rect width="100%%" height="100%%" fill="#fff"/>
<g>
`, svgWidth, height)
	for i, line := range p.lines {
		column := 2
		for _, one := range line {
			class := map[style]string{bold: "bold", red: "red"}[one.style]
			fmt.Fprintf(&b, `<text class="%s" x="%.1f" y="%d">`, class, float64(column)*svgChar, (i+2)*svgLine)
			_ = xml.EscapeText(&b, []byte(one.text)) // a Builder takes all
			b.WriteString("</text>\n")
			column += utf8.RuneCountInString(one.text)
		}
	}
	return b.String() + "</g>\n</svg>\n"
}
