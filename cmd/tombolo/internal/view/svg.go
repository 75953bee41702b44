package view

import (
	"encoding/xml"
	"fmt"
	"strings"
	"unicode/utf8"
)

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
