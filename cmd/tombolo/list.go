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
	"github.com/tombolo-cni/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/network"
)

// list prints the attachments of all networks, and marks those that are not as they
// were made. Failures of no attachment go to stderr.
func list(ctx context.Context, out io.Writer, dir string, only report.Selection, asJSON bool) error {
	node, err := report.Open(ctx, &network.Config{StateDir: dir})
	if err != nil {
		return err
	}
	in, err := only.Inspect(ctx, node)
	if err != nil {
		return err
	}
	for _, line := range report.Apart(in) {
		fmt.Fprintln(os.Stderr, "tombolo:", printable.Line(line.String()))
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
	for _, line := range report.OfPods(in) {
		if _, err := fmt.Fprintln(out, printable.Line(line.String())); err != nil {
			return err
		}
	}
	return nil
}

// check prints what differs, a line for each cause, or for each difference, and what mends it.
// It prints no line where nothing differs.
func check(ctx context.Context, out io.Writer, dir string, asJSON, each bool) error {
	in, err := inspect(ctx, dir)
	if err != nil {
		return err
	}
	if asJSON {
		err = json.NewEncoder(out).Encode(in)
	} else {
		err = printFound(out, in, each)
		if err == nil {
			_, err = fmt.Fprintln(out, in.Summary())
		}
	}
	if err == nil && in.Differs() {
		return errDiffers
	}
	return err
}

// repair prints what it did, and what differs still.
func repair(ctx context.Context, out io.Writer, dir string) error {
	node, err := report.Open(ctx, &network.Config{StateDir: dir})
	if err != nil {
		return err
	}
	did, err := report.Repair(ctx, node)
	if did == nil {
		return err
	}
	for _, line := range did.Done {
		if _, err := fmt.Fprintln(out, "repaired:", printable.Line(line.Text)); err != nil {
			return err
		}
	}
	for _, line := range did.Left {
		if _, err := fmt.Fprintln(out, "left:", printable.Line(line.String())); err != nil {
			return err
		}
	}
	if len(did.Left) == 0 {
		return err
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "tombolo:", printable.Line(err.Error()))
	}
	return errDiffers
}

func inspect(ctx context.Context, stateDir string) (*network.Inspection, error) {
	node, err := report.Open(ctx, &network.Config{StateDir: stateDir})
	if err != nil {
		return nil, err
	}
	return node.Inspect(ctx)
}

// remove takes a network down that is on record.
func remove(ctx context.Context, dir, name string) error {
	node, err := report.Open(ctx, &network.Config{StateDir: dir})
	if err != nil {
		return err
	}
	return report.Remove(ctx, node, name)
}

func printFound(out io.Writer, in *network.Inspection, each bool) error {
	lines := report.Causes(in)
	if each {
		lines = report.Each(in)
	}
	for _, line := range lines {
		if _, err := fmt.Fprintln(out, printable.Line(line.String())); err != nil {
			return err
		}
	}
	for _, line := range in.Others {
		if _, err := fmt.Fprintln(out, printable.Line(line)); err != nil {
			return err
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
