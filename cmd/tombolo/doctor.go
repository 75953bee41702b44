package main

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/doctor"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network"
)

func (o *options) doctorCommand() *cobra.Command {
	var dns, to []string
	cmd := o.withJSON(o.nodeCommand("doctor [POD]", "find out why a pod has no network",
		"Find out why a pod has no network: test each step from the pod to the outside, and print each that fails, "+
			"with the evidence and a remedy, and what was tried. The exit status is 4 if a problem was found.",
		func(ctx context.Context, node *network.Node, args []string) (err error) {
			opt := doctor.Options{IsDNSNamed: len(dns) > 0}
			if opt.DNS, err = nameServers(ctx, dns); err != nil {
				return err
			}
			if opt.To, err = parseFlag("--to", to, parseTarget); err != nil {
				return err
			}
			return o.doctor(ctx, node, report.Selection{Pod: optional(args, 0)}, opt)
		}))
	cmd.Flags().StringSliceVar(&dns, "dns", nil,
		"ask the name servers at `ADDR,...`, or none (default: those in /etc/resolv.conf)")
	cmd.Flags().StringSliceVar(&to, "to", nil,
		"also find the link, hook or rule that loses a packet to `ADDR[:PORT],...`, "+
			"such as a pod of another node, or its answer")
	return cmd
}

// doctor examines the selected pods and prints the findings. If all pods are selected, it also warns about
// unreadable records. It returns a findingsError if it finds a problem.
func (o *options) doctor(ctx context.Context, node *network.Node, only report.Selection, opt doctor.Options) error {
	if err := readRecords(o.state, &opt); err != nil {
		return err
	}

	inspection, err := only.Inspect(ctx, node)
	if err != nil {
		return err
	}

	for _, d := range inspection.Damaged {
		o.warn(d.String())
	}

	reports, err := doctor.Examine(ctx, node, inspection, opt)
	if err != nil {
		return err
	}

	return o.printExamined(reports, only.None())
}

// nameServers parses the name servers from the command line; "none" means no server. By default it returns the servers
// in /etc/resolv.conf that a pod could ask too: those whose address is no loopback address and has no zone. A missing
// file counts as empty.
func nameServers(ctx context.Context, named []string) ([]netip.Addr, error) {
	if slices.Equal(named, []string{"none"}) {
		return nil, nil
	}

	if len(named) > 0 {
		return parseFlag("--dns", named, netip.ParseAddr)
	}

	var list []netip.Addr
	text, _ := file.ReadNamed(ctx, "/etc/resolv.conf", file.MaxRecord, 0)
	for _, server := range cni.ParseResolvConf(string(text)).Nameservers {
		if a, err := netip.ParseAddr(server); err == nil && !a.IsLoopback() && a.Zone() == "" {
			list = append(list, a)
		}
	}

	return list, nil
}

// parseFlag parses the elements of a flag's list. name is the flag's name, for errors.
func parseFlag[T any](name string, texts []string, parse func(string) (T, error)) (list []T, _ error) {
	for _, text := range texts {
		v, err := parse(text)
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", errUsage, name, err)
		}
		list = append(list, v)
	}
	return list, nil
}

// parseTarget parses an address with or without a port. A missing port becomes 0.
func parseTarget(text string) (netip.AddrPort, error) {
	if to, err := netip.ParseAddrPort(text); err == nil {
		return to, nil
	}
	a, err := netip.ParseAddr(text)
	return netip.AddrPortFrom(a, 0), err
}

// readRecords sets the fields of opt that come from the networks' records, and from tombolod's record of firewalld
// zones. It skips unreadable records, since Inspect reports these.
func readRecords(dir string, opt *doctor.Options) error {
	d, err := state.Open(dir)
	if err != nil {
		return err
	}

	zones, zonesErr := d.Zones()
	networks, _, err := d.ListNetworks()
	opt.Trusted, opt.Kept, opt.Uplinks = zones.Joined, map[string][]netip.Prefix{}, map[string]string{}
	for _, n := range networks {
		opt.Kept[n.Name], opt.Uplinks[n.Name] = n.NonMasquerade, n.Uplink
	}

	return cmp.Or(zonesErr, err)
}

// printExamined prints the findings about each pod. If a pod has a problem and the same findings as the pod before
// it, printExamined prints "the same". If there are no reports, it prints the argument none. It returns a
// findingsError if a finding is more than a note.
func (o *options) printExamined(reports []doctor.Report, none string) error {
	sick := false
	var text strings.Builder
	for i, r := range reports {
		fmt.Fprintf(&text, "%s, %s of network %s:", printable.Line(report.PodName(r.Pod, r.ContainerID)), r.IfName,
			r.Network)
		bad := slices.ContainsFunc(r.Findings, func(f doctor.Finding) bool { return !f.Note })
		sick = sick || bad
		same := bad && i > 0 && slices.Equal(r.Findings, reports[i-1].Findings)
		switch {
		case same:
			text.WriteString(" the same")
		case !bad:
			fmt.Fprintf(&text, " nothing found; tried: %s; --to ADDR[:PORT] tries more",
				cmp.Or(strings.Join(r.Tried, ", "), "nothing, since its ADD is not done"))
			if len(r.Findings) > 0 {
				text.WriteString("; notes:")
			}
		}

		text.WriteString("\n")
		for _, f := range r.Findings {
			if same {
				break
			}
			fmt.Fprintf(&text, "  %-10s  %s\n              this helps: %s\n", f.Step, printable.Line(f.Evidence),
				printable.Line(f.Remedy))
		}
	}

	if len(reports) == 0 {
		text.WriteString(none)
	}

	return o.answer(text.String(), reports, sick, "a problem was found")
}
