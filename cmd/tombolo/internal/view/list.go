package view

import (
	"fmt"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/network"
)

// List is a table of attachments, and what of them is not as it was made.
func List(in *network.Inspection) string {
	if len(in.Attachments) == 0 {
		return "no pod is on record\n"
	}
	var text strings.Builder
	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "NETWORK\tPOD\tCONTAINER\tINTERFACE\tPORT\tADDRESSES\tHOST PORTS\tIN/OUT\tSTATE")
	for _, r := range in.Attachments {
		mark := "adding"
		switch {
		case r.Ready && len(r.Differences) > 0:
			mark = "differs"
		case r.Ready:
			mark = "ready"
		}
		fmt.Fprintf(w, "%s\t%s\t%.12s\t%s\t%s\t%s\t%s\t%s\t%s\n", r.Network, OrDash(printable.Line(r.Pod)), r.ContainerID, r.IfName, r.Port,
			OrDash(Addresses(r.Attachment, ",")), OrDash(strings.Join(hostPorts(r.Attachment), ",")), limits(r.Limits), mark)
	}
	w.Flush()
	for _, line := range report.OfPods(in) {
		text.WriteString(printable.Line(line.String()) + "\n")
	}
	return text.String()
}

// OrDash stands in for an empty text.
func OrDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// Addresses are those of an attachment, in one text.
func Addresses(a *network.Attachment, between string) string {
	var texts []string
	for _, address := range a.Addresses {
		texts = append(texts, address.Prefix.Addr().String())
	}
	return strings.Join(texts, between)
}

// hostPorts read like docker's: 8080->80/tcp, 192.0.2.1:53->5353/udp.
func hostPorts(a *network.Attachment) []string {
	var texts []string
	for _, p := range a.Ports {
		host, protocol, _ := strings.Cut(p.String(), "/")
		texts = append(texts, fmt.Sprintf("%s->%d/%s", host, p.PodPort, protocol))
	}
	return texts
}

// limits gives both rates, as tc writes them.
func limits(s bandwidth.Shape) string {
	if s.IsZero() {
		return "-"
	}
	return rate(s.Ingress.Rate) + "/" + rate(s.Egress.Rate)
}

func rate(bits uint64) string {
	if bits == 0 {
		return "-"
	}
	for _, unit := range []struct {
		size uint64
		name string
	}{{1e9, "Gbit"}, {1e6, "Mbit"}, {1e3, "kbit"}} {
		if bits >= unit.size {
			return strconv.FormatFloat(float64(bits)/float64(unit.size), 'f', -1, 64) + unit.name
		}
	}
	return strconv.FormatUint(bits, 10) + "bit"
}
