package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/doctor"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network"
)

// errSick says that doctor found something.
var errSick = errors.New("a problem was found")

// doctorCommand declares what doctor can be told.
func doctorCommand(flags *flag.FlagSet) runner {
	asJSON, dir := jsonFlag(flags), stateFlag(flags)
	dns := flags.String("dns", "", "ask the name servers at `ADDR,...`, or none (default: those in /etc/resolv.conf)")
	to := flags.String("to", "", "also test the way to `ADDR,...`, such as a pod of another node; with ADDR:PORT, find the rule that drops a connection")
	return func(ctx context.Context, out io.Writer, args []string) error {
		servers, err := nameServers(*dns)
		if err != nil {
			return err
		}
		targets, ports, err := parseTargets(*to)
		if err != nil {
			return err
		}
		node, err := report.Open(ctx, &network.Config{StateDir: *dir})
		if err != nil {
			return err
		}
		opt := doctor.Options{Pod: optional(args, 0), DNS: servers, To: targets, Ports: ports}
		if err := readRecords(*dir, &opt); err != nil {
			return err
		}
		reports, err := doctor.Examine(ctx, node, opt)
		if err != nil {
			return err
		}
		return printExamined(out, reports, *asJSON)
	}
}

// nameServers are those that are named, or of /etc/resolv.conf those that a pod could ask too.
func nameServers(named string) ([]netip.Addr, error) {
	var list []netip.Addr
	switch named {
	case "none":
	case "":
		text, err := os.ReadFile("/etc/resolv.conf")
		if err != nil {
			return nil, nil // then names are no matter of the host's
		}
		for line := range strings.Lines(string(text)) {
			fields := strings.Fields(line)
			if len(fields) < 2 || fields[0] != "nameserver" {
				continue
			}
			if a, err := netip.ParseAddr(fields[1]); err == nil && !a.IsLoopback() && a.Zone() == "" {
				list = append(list, a)
			}
		}
	default:
		return parseAddresses("--dns", named)
	}
	return list, nil
}

// parseAddresses reads a flag's.
func parseAddresses(name, text string) ([]netip.Addr, error) {
	var list []netip.Addr
	for one := range strings.SplitSeq(text, ",") {
		if text == "" {
			break
		}
		a, err := netip.ParseAddr(one)
		if err != nil {
			return nil, fmt.Errorf("doctor: %s: %w: %w", name, err, errUsage)
		}
		list = append(list, a)
	}
	return list, nil
}

// parseTargets reads addresses, and addresses with ports.
func parseTargets(text string) (targets []netip.Addr, ports []netip.AddrPort, err error) {
	var plain []string
	for one := range strings.SplitSeq(text, ",") {
		if port, err := netip.ParseAddrPort(one); err == nil {
			ports = append(ports, port)
		} else if one != "" {
			plain = append(plain, one)
		}
	}
	targets, err = parseAddresses("--to", strings.Join(plain, ","))
	return targets, ports, err
}

// readRecords gives what is known of networks, and of their links in firewalld. A record that cannot be read is among
// the findings.
func readRecords(dir string, opt *doctor.Options) error {
	d, err := state.Open(dir)
	if err != nil {
		return err
	}
	zones, err := d.Zones()
	if err != nil {
		return err
	}
	networks, _, err := d.ListNetworks()
	opt.Trusted, opt.Kept, opt.Marks = zones.Joined, map[string][]netip.Prefix{}, map[string]uint32{}
	for _, n := range networks {
		opt.Kept[n.Name], opt.Marks[n.Name] = n.NonMasquerade, uint32(n.Mark)
	}
	return err
}

func printExamined(out io.Writer, reports []doctor.Report, asJSON bool) error {
	sick := false
	var text strings.Builder
	for _, r := range reports {
		name := r.Pod
		if name == "" {
			name = "container " + r.ContainerID
		}
		fmt.Fprintf(&text, "%s, %s of network %s:", printable.Line(name), r.IfName, r.Network)
		if len(r.Findings) == 0 {
			text.WriteString(" nothing found\n")
			continue
		}
		bad := slices.ContainsFunc(r.Findings, func(f doctor.Finding) bool { return !f.Note })
		if !bad {
			text.WriteString(" nothing found; to be known:")
		}
		sick = sick || bad
		text.WriteString("\n")
		for _, f := range r.Findings {
			fmt.Fprintf(&text, "  %-10s  %s\n              this helps: %s\n", f.Step, printable.Line(f.Evidence), printable.Line(f.Remedy))
		}
	}
	var err error
	if asJSON {
		err = json.NewEncoder(out).Encode(reports)
	} else {
		_, err = io.WriteString(out, text.String())
	}
	if err == nil && sick {
		return errSick
	}
	return err
}
