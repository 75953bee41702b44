package view

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/network"
)

// Node is a node with what is wrong with it, to be drawn.
type Node struct {
	Bridges []Bridge
	Wrong   []string // the causes that check gives, and what differs of uplinks
}

// Bridge is one, with the networks on it, and the NIC that is taken over for it.
type Bridge struct {
	Name     string
	MTU      int
	Gateways string
	Uplink   string // the NIC; empty: none
	Wrong    bool   // of the uplink
	Networks []Drawn
}

// Drawn is a network with its pods, those first of which something is wrong.
type Drawn struct {
	Network
	Wrong bool // of what its pods share
	Pods  []*network.Report
}

// Draw looks at a node: at its records, and, by Inspect, at the kernel. stateDir is the node's.
func Draw(ctx context.Context, node *network.Node, stateDir string) (*Node, error) {
	networks, problems, err := Load(ctx, node, stateDir, "")
	if err != nil {
		return nil, err
	}
	in, err := node.Inspect(ctx)
	if err != nil {
		return nil, err
	}
	uplinks, err := node.Uplinks().List(ctx, "")
	if err != nil {
		return nil, err
	}
	n := arrange(networks, in, uplinks)
	for _, problem := range problems {
		// Inspect has found most of them, too.
		if text := problem.Error(); !strings.Contains("\n"+strings.Join(n.Wrong, "\n"), "\n"+text) {
			n.Wrong = append(n.Wrong, text)
		}
	}
	return n, nil
}

// arrange puts what was found into its places.
func arrange(networks []Network, in *network.Inspection, uplinks []network.UplinkReport) *Node {
	n := &Node{}
	for _, line := range report.Causes(in) {
		n.Wrong = append(n.Wrong, line.String())
	}
	for i := range uplinks {
		u := &uplinks[i]
		b := n.bridge(u.Bridge)
		found := append(u.Differences, u.LeaseTrouble...)
		b.Uplink, b.Wrong = u.NIC, len(found) > 0
		for _, d := range found {
			n.Wrong = append(n.Wrong, "uplink "+u.NIC+": "+d)
		}
	}
	for i := range networks {
		d := Drawn{Network: networks[i]}
		for j := range in.Networks {
			d.Wrong = d.Wrong || in.Networks[j].Network == d.Name
		}
		for j := range in.Attachments {
			if r := &in.Attachments[j]; r.Network == d.Name {
				d.Pods = append(d.Pods, r)
			}
		}
		slices.SortStableFunc(d.Pods, func(a, b *network.Report) int {
			return cmp.Or(min(len(b.Differences), 1)-min(len(a.Differences), 1), strings.Compare(report.PodName(a.Pod, a.ContainerID), report.PodName(b.Pod, b.ContainerID)))
		})
		b := n.bridge(d.Bridge)
		if b.MTU = max(b.MTU, d.MTU); b.Uplink == "" {
			b.Uplink = d.Uplink
		}
		for _, gw := range d.Gateways {
			if text := gw.String(); !strings.Contains(" "+b.Gateways+" ", " "+text+" ") {
				b.Gateways = strings.TrimSpace(b.Gateways + " " + text)
			}
		}
		b.Networks = append(b.Networks, d)
	}
	slices.SortStableFunc(n.Bridges, func(a, b Bridge) int { return strings.Compare(a.Name, b.Name) })
	return n
}

// bridge gives the one of a name, which is made if it is not there yet.
func (n *Node) bridge(name string) *Bridge {
	for i := range n.Bridges {
		if n.Bridges[i].Name == name {
			return &n.Bridges[i]
		}
	}
	n.Bridges = append(n.Bridges, Bridge{Name: name})
	return &n.Bridges[len(n.Bridges)-1]
}

// title is what is said of a network in a line.
func (d *Drawn) title() string {
	text := d.Mode
	if text == "" {
		text = "no record"
	}
	if d.VLAN != 0 {
		text += fmt.Sprintf(", VLAN %d", d.VLAN)
	}
	if d.DefaultRoute != "" {
		text += ", default route to the " + d.DefaultRoute
	}
	if d.Masquerade {
		text += ", masquerade"
	}
	if d.Policy != "" && d.Policy != "open" {
		text += ", " + d.Policy
	}
	if d.Guard {
		text += ", guard"
	}
	text += ", " + printable.Count(len(d.Pods), "pod", "pods")
	for _, p := range d.Pools {
		text += fmt.Sprintf("; %s: %d of %s in use", p.Range, p.Used, number(p.Size))
	}
	return text
}

// title is what is said of a bridge behind its name.
func (b *Bridge) title() string {
	text := ""
	if b.MTU > 0 {
		text = fmt.Sprintf(" (MTU %d)", b.MTU)
	}
	if b.Gateways != "" {
		text += " " + b.Gateways
	}
	return text
}
