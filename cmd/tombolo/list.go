package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// list prints the attachments of all networks, and marks those that are not as they
// were made. What no attachment is to blame for goes to stderr.
func list(plugin *cni.Plugin, out io.Writer, dir string, asJSON bool) error {
	in, err := plugin.Inspect(context.Background(), dir)
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
		mark := string(r.State)
		if len(r.Differences) > 0 && r.State == state.Ready {
			mark = "differs"
		}
		fmt.Fprintf(w, "%s\t%s\t%.12s\t%s\t%s\t%s\t%s\t%s\t%s\n", r.Network, orDash(printable.Line(r.Pod)), r.ContainerID, r.IfName, r.HostIf,
			orDash(addresses(r.Attachment)), orDash(hostPorts(r.Attachment)), limits(r.Bandwidth), mark)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	return printDifferences(out, in)
}

// check prints what differs, and nothing where nothing does.
func check(plugin *cni.Plugin, out io.Writer, dir string, asJSON bool) error {
	in, err := plugin.Inspect(context.Background(), dir)
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

// apart lists what belongs to no attachment.
func apart(in *cni.Inspection) []string {
	var lines []string
	for _, n := range in.Networks {
		for _, d := range n.Differences {
			lines = append(lines, "network "+n.Network+": "+d)
		}
	}
	lines = append(lines, in.Stray...)
	return append(lines, in.Damaged...)
}

func printDifferences(out io.Writer, in *cni.Inspection) error {
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
		if err := d.Kept(); err != nil {
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

func addresses(a *state.Attachment) string {
	var texts []string
	for _, address := range a.Addresses {
		texts = append(texts, address.Prefix.Addr().String())
	}
	return strings.Join(texts, ",")
}

// hostPorts reads like docker's: 8080->80/tcp, 192.0.2.1:53->5353/udp.
func hostPorts(a *state.Attachment) string {
	var texts []string
	for _, p := range a.Published {
		host := strconv.Itoa(p.HostPort)
		if p.HostIP.IsValid() {
			host = netip.AddrPortFrom(p.HostIP, uint16(p.HostPort)).String()
		}
		texts = append(texts, fmt.Sprintf("%s->%d/%s", host, p.PodPort, p.Protocol))
	}
	return strings.Join(texts, ",")
}

// limits gives both rates, as tc writes them.
func limits(b state.Bandwidth) string {
	if b == (state.Bandwidth{}) {
		return "-"
	}
	return rate(b.IngressRate) + "/" + rate(b.EgressRate)
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
