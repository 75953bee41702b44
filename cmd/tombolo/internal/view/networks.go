package view

import (
	"cmp"
	"fmt"
	"math/bits"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// Networks returns the output of `tombolo ls networks`.
func Networks(list []Network) string {
	var b strings.Builder
	for i := range list {
		if i > 0 {
			b.WriteByte('\n')
		}
		list[i].text(&b)
	}

	if len(list) == 0 {
		b.WriteString("no network is on record\n")
	}
	return b.String()
}

// text writes the description of a network, a line for each property.
func (n *Network) text(b *strings.Builder) {
	line := func(key, value string) {
		if value != "" {
			fmt.Fprintf(b, "  %-15s%s\n", key, printable.Line(value))
		}
	}
	b.WriteString(printable.Line(n.Name) + "\n")
	if n.Mode == "" {
		why := "recreate its pods"
		if n.bare {
			why = "no ADD of it has succeeded"
		}
		line("record", "missing: "+why)
	}

	line("mode", n.Mode)
	line("bridge", n.Bridge+ifSet(n.MTU > 0, " (MTU %d)", n.MTU))
	line("VLAN", ifSet(n.VLAN != 0, "%d", n.VLAN))
	line("VLAN trunk", n.VLANTrunk.String())
	line("uplink", n.Uplink)
	line("subnets", printable.List(n.Subnets, ", "))
	line("gateways", printable.List(n.Gateways, ", "))
	line("default route", ifSet(n.DefaultRoute != "", "to the %s", n.DefaultRoute))
	line("IPv6", ifSet(n.SLAAC, "by router advertisements"))
	if n.Mode != "" {
		onOff := map[bool]string{true: "on", false: "off"}
		line("masquerade", onOff[n.Masquerade]+
			ifSet(n.Masquerade && len(n.NonMasquerade) > 0, ", except to %s", printable.List(n.NonMasquerade, ", ")))
		line("policy", n.Policy)
		line("guard", onOff[n.Guard]+ifSet(n.Guard && n.MACOnly > 0, ", only of the MAC for %d of the pods", n.MACOnly))
	}

	line("pods", strconv.Itoa(n.Attachments)+ifSet(n.Adding > 0, ", %d of them not ready", n.Adding))
	for _, p := range n.Pools {
		line("pool", p.String())
	}

	line("pool", n.PoolNote) // only set without pools
	key := "host ports"
	for i := range n.Ports {
		line(key, n.Ports[i].String())
		key = ""
	}
}

// ifSet returns a formatted text, or "" if the property that it describes is not set.
func ifSet(is bool, format string, args ...any) string {
	if !is {
		return ""
	}
	return fmt.Sprintf(format, args...)
}

// String returns the pool's use as text, such as "10.61.0.0/24: 3 of 253 in use, 250 free".
func (p Pool) String() string {
	return fmt.Sprintf("%s: %d of %s in use, %s free", p.Range, p.Used, number(p.Size), number(p.Free))
}

// number returns a number as text. It gives a number of 2^40 or more as an approximate power of two.
func number(n uint64) string {
	if n < 1<<40 {
		return strconv.FormatUint(n, 10)
	}
	return fmt.Sprintf("some 2^%d", bits.Len64(n))
}

// String returns the port and its pod as text, such as "192.0.2.1:8080/tcp -> default/web port 80 (container
// 0123456789ab, eth0)".
func (p *Port) String() string {
	text := fmt.Sprintf("%s -> %s", p.Port, strings.TrimPrefix(p.Pod+" ", " "))
	text += fmt.Sprintf("port %d (container %.12s, %s)", p.PodPort, p.ContainerID, p.IfName)
	if p.Withheld {
		text += ", published by another network"
	}
	return text
}

// List returns a table of all attachments, followed by the differences that affect pods.
func List(inspection *network.Inspection, causes []report.Line) string {
	var text strings.Builder
	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "NETWORK\tPOD\tCONTAINER\tINTERFACE\tPORT\tADDRESSES\tHOST PORTS\tIN/OUT\tSTATE")
	for _, r := range inspection.Attachments {
		mark := "adding"
		switch {
		case r.Ready && len(r.Differences) > 0:
			mark = "differs"
		case r.Ready:
			mark = "ready"
		}
		fmt.Fprintf(w, "%s\t%s\t%.12s\t%s\t%s\t%s\t%s\t%s\t%s\n", r.Network, cmp.Or(printable.Line(r.Pod), "-"),
			r.ContainerID, r.IfName, r.Port, cmp.Or(Addresses(r.Attachment, ","), "-"),
			cmp.Or(strings.Join(hostPorts(r.Attachment), ","), "-"), limits(r.Limits), mark)
	}

	w.Flush()
	for _, line := range causes {
		if len(line.Pods) > 0 {
			text.WriteString(printable.Line(line.String()) + "\n")
		}
	}

	return text.String()
}

// Addresses joins an attachment's addresses, without their prefix lengths, with a separator.
func Addresses(a *network.Attachment, between string) string {
	var texts []string
	for _, address := range a.Addresses {
		texts = append(texts, address.Prefix.Addr().String())
	}
	return strings.Join(texts, between)
}

// hostPorts returns host ports in the form that docker prints: 8080->80/tcp, 192.0.2.1:53->5353/udp,
// 9000-9009->90-99/tcp.
func hostPorts(a *network.Attachment) []string {
	var texts []string
	for _, p := range a.Ports {
		host, _, _ := strings.Cut(p.String(), "/")
		texts = append(texts, host+"->"+nft.Port{Protocol: p.Protocol, HostPort: p.PodPort, Count: p.Count}.String())
	}
	return texts
}

// limits returns the rates to and from a pod, such as 1.5Mbit/800kbit. A direction without a limit is "-". Without any
// limit, the result is "-".
func limits(s bandwidth.Shape) string {
	if s.IsZero() {
		return "-"
	}
	return rate(s.Ingress.Rate) + "/" + rate(s.Egress.Rate)
}

func rate(n uint64) string {
	if n == 0 {
		return "-"
	}
	unit, units := 1.0, []string{"bit", "kbit", "Mbit", "Gbit"}
	for ; len(units) > 1 && float64(n) >= unit*1000; unit *= 1000 {
		units = units[1:]
	}
	return strconv.FormatFloat(float64(n)/unit, 'f', -1, 64) + units[0]
}
