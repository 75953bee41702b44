package view

import (
	"fmt"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/printable"
)

// Sizes of the picture, in pixels.
const (
	svgWidth   = 1240
	svgLeft    = 20  // of uplinks
	svgBridge  = 200 // of bridges
	svgNetwork = 440 // of networks
	svgPod     = 256 // a pod's width, with the gap
	svgColumns = 3
	svgLine    = 16
	svgBox     = 2*svgLine + 10 // of two lines
	svgChars   = (svgPod - 24) * 10 / svgChar10
	svgAcross  = (svgWidth - 2*svgLeft) * 10 / svgChar10
	svgChar10  = 73 // of ten characters of the font
)

// drawing writes SVG from the top down.
type drawing struct {
	out strings.Builder
	y   int
}

// SVG draws a node as a picture that needs nothing else.
func (n *Node) SVG() string {
	d := &drawing{y: svgLeft}
	for i := range n.Bridges {
		d.bridge(&n.Bridges[i])
	}
	summary := "nothing is wrong"
	if len(n.Bridges) == 0 {
		summary = "no network is on record"
	}
	if len(n.Wrong) > 0 {
		summary = "wrong:"
	}
	d.y += svgLine
	d.text(svgLeft, d.y, "", summary)
	for _, text := range n.Wrong {
		for _, line := range fold(printable.Line(text), svgAcross) {
			d.y += svgLine
			d.text(svgLeft, d.y, "wrong", line)
		}
	}
	return fmt.Sprintf(`<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="monospace" font-size="12">
<style>rect{fill:#fff;stroke:#567}line{stroke:#567}text{fill:#123}rect.wrong{fill:#fee;stroke:#c00}text.wrong{fill:#c00}rect.network{fill:#f4f7fa}</style>
<rect width="100%%" height="100%%" style="stroke:none"/>
`, svgWidth, d.y+svgLeft, svgWidth, d.y+svgLeft) + d.out.String() + "</svg>\n"
}

func (d *drawing) bridge(b *Bridge) {
	top, middle := d.y, d.y+svgBox/2
	if b.Uplink != "" {
		d.link(svgLeft+140, middle, svgBridge, middle)
		d.box(svgLeft, top, 140, svgBox, wrongIf(b.Wrong))
		d.text(svgLeft+8, top+svgLine, wrongIf(b.Wrong), "uplink")
		d.text(svgLeft+8, top+2*svgLine, wrongIf(b.Wrong), short(b.Uplink, 18))
	}
	gateways := strings.Fields(b.Gateways)
	for i := range b.Networks {
		at := d.y + svgBox/2
		d.link(svgBridge+200, middle, svgNetwork, at)
		d.network(&b.Networks[i])
	}
	d.box(svgBridge, top, 200, svgBox+svgLine*len(gateways), "")
	d.text(svgBridge+8, top+svgLine, "", b.name())
	d.text(svgBridge+8, top+2*svgLine, "", fmt.Sprintf("MTU %d", b.MTU))
	for i, gw := range gateways {
		d.text(svgBridge+8, top+(3+i)*svgLine, "", gw)
	}
	d.y = max(d.y, top+svgBox+svgLine*len(gateways)) + svgLine
}

func (d *drawing) network(n *Drawn) {
	top := d.y
	title := fold(n.title(), (svgWidth-svgNetwork-svgLeft-16)*10/svgChar10)
	rows := (len(n.Pods) + svgColumns - 1) / svgColumns
	const pod = svgBox + svgLine + 6 // three lines
	height := (1+len(title))*svgLine + 10 + rows*pod
	d.box(svgNetwork, top, svgWidth-svgNetwork-svgLeft, height, strings.TrimSpace("network "+wrongIf(n.Wrong)))
	d.text(svgNetwork+8, top+svgLine, wrongIf(n.Wrong), "network "+short(n.Name, 2*nameMost))
	for i, line := range title {
		d.text(svgNetwork+8, top+(2+i)*svgLine, "", line)
	}
	top += (1+len(title))*svgLine + 8
	for i := range n.Pods {
		d.pod(&n.Pods[i], svgNetwork+8+i%svgColumns*svgPod, top+i/svgColumns*pod)
	}
	d.y += height + svgLine
}

// pod is a box with all there is to say of a pod for the pointer.
func (d *drawing) pod(p *Pod, x, y int) {
	class := wrongIf(len(p.Wrong) > 0)
	addresses, ports := strings.Join(p.Addresses, " "), strings.Join(p.Ports, " ")
	whole := []string{p.Name, addresses}
	if ports != "" {
		whole = append(whole, ports)
	}
	name := p.Name
	if !p.Ready {
		name += " (not ready)"
	}
	fmt.Fprintf(&d.out, "<g><title>%s</title>\n", escape(strings.Join(append(whole, p.Wrong...), "; ")))
	d.box(x, y, svgPod-8, svgBox+svgLine, class)
	for i, line := range []string{name, addresses, ports} {
		d.text(x+8, y+(i+1)*svgLine, class, short(line, svgChars))
	}
	d.out.WriteString("</g>\n")
}

func wrongIf(wrong bool) string {
	if wrong {
		return "wrong"
	}
	return ""
}

// short is the beginning of a text.
func short(text string, most int) string {
	if runes := []rune(printable.Line(text)); len(runes) > most {
		return string(runes[:most-2]) + ".."
	}
	return text
}

func (d *drawing) box(x, y, width, height int, class string) {
	fmt.Fprintf(&d.out, `<rect class="%s" x="%d" y="%d" width="%d" height="%d" rx="4"/>`+"\n", class, x, y, width, height)
}

func (d *drawing) text(x, y int, class, text string) {
	if text != "" {
		fmt.Fprintf(&d.out, `<text class="%s" x="%d" y="%d">%s</text>`+"\n", class, x, y, escape(text))
	}
}

func (d *drawing) link(x1, y1, x2, y2 int) {
	fmt.Fprintf(&d.out, `<line x1="%d" y1="%d" x2="%d" y2="%d"/>`+"\n", x1, y1, x2, y2)
}

// escape makes a text of any origin the content of an element: XML has no character that
// printable.Line lets pass and that needs more than this.
func escape(text string) string {
	return strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;", "'", "&#39;").Replace(printable.Line(text))
}
