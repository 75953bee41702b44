package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/network"
)

// list prints the attachments of all networks, and marks those that are not as they
// were made. Failures of no attachment go to stderr.
func list(ctx context.Context, out io.Writer, dir string, asJSON bool) error {
	in, err := inspect(ctx, dir)
	if err != nil {
		return err
	}
	for _, line := range apart(in) {
		fmt.Fprintln(os.Stderr, "tombolo:", printable.Line(line))
	}
	if asJSON {
		return json.NewEncoder(out).Encode(in.Attachments)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "NETWORK\tPOD\tCONTAINER\tINTERFACE\tPORT\tADDRESSES\tHOST PORTS\tIN/OUT\tSTATE")
	for _, r := range in.Attachments {
		mark := "adding"
		switch {
		case r.Ready && len(r.Differences) > 0:
			mark = "differs"
		case r.Ready:
			mark = "ready"
		}
		fmt.Fprintf(w, "%s\t%s\t%.12s\t%s\t%s\t%s\t%s\t%s\t%s\n", r.Network, orDash(printable.Line(r.Pod)), r.ContainerID, r.IfName, r.Port,
			orDash(addresses(r.Attachment)), orDash(hostPorts(r.Attachment)), limits(r.Limits), mark)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	return printDifferences(out, in)
}

// check prints what differs, and nothing where nothing does.
func check(ctx context.Context, out io.Writer, dir string, asJSON bool) error {
	in, err := inspect(ctx, dir)
	if err != nil {
		return err
	}
	switch {
	case asJSON:
		err = json.NewEncoder(out).Encode(in)
	default:
		for _, line := range apart(in) {
			if _, err = fmt.Fprintln(out, line); err != nil {
				return err
			}
		}
		if err = printDifferences(out, in); err == nil {
			_, err = fmt.Fprintln(out, in.Summary())
		}
	}
	if err == nil && in.Differs() {
		return errDiffers
	}
	return err
}

func inspect(ctx context.Context, stateDir string) (in *network.Inspection, _ error) {
	err := onNode(ctx, stateDir, "", func(node *network.Node) error {
		var err error
		in, err = node.Inspect(ctx)
		return err
	})
	return in, err
}

// apart lists what belongs to no attachment.
func apart(in *network.Inspection) []string {
	var lines []string
	for _, n := range in.Networks {
		for _, d := range n.Differences {
			lines = append(lines, "network "+n.Network+": "+d)
		}
	}
	lines = append(append(lines, in.Stray...), in.Others...)
	return append(lines, in.Damaged...)
}

func printDifferences(out io.Writer, in *network.Inspection) error {
	for _, r := range in.Attachments {
		name := r.Pod
		if name == "" {
			name = "container " + r.ContainerID
		}
		for _, d := range r.Differences {
			if _, err := fmt.Fprintf(out, "%s, %s of network %s: %s\n", printable.Line(name), r.IfName, r.Network, printable.Line(d)); err != nil {
				return err
			}
		}
	}
	return nil
}

// leases prints the leases on record; what is wrong with a record, and with the keeper,
// goes to stderr.
func leases(out io.Writer, dir string, asJSON bool) error {
	d, err := lease.Open(dir)
	if err != nil {
		return err
	}
	records, damaged, err := d.List()
	if err != nil {
		return err
	}
	for _, bad := range damaged {
		fmt.Fprintln(os.Stderr, "tombolo:", printable.Line(bad.Error()))
	}
	if len(records) > 0 {
		if err := d.CheckKeeper(); err != nil {
			fmt.Fprintln(os.Stderr, "tombolo:", printable.Line(err.Error()))
		}
	}
	if asJSON {
		return lease.WriteJSON(out, records, time.Now())
	}
	return lease.WriteTable(out, records, time.Now())
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func addresses(a *network.Attachment) string {
	var texts []string
	for _, address := range a.Addresses {
		texts = append(texts, address.Prefix.Addr().String())
	}
	return strings.Join(texts, ",")
}

// hostPorts reads like docker's: 8080->80/tcp, 192.0.2.1:53->5353/udp.
func hostPorts(a *network.Attachment) string {
	var texts []string
	for _, p := range a.Ports {
		host, protocol, _ := strings.Cut(p.String(), "/")
		texts = append(texts, fmt.Sprintf("%s->%d/%s", host, p.PodPort, protocol))
	}
	return strings.Join(texts, ",")
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
