package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/network"
)

// runUplink runs one of the commands about uplinks.
func runUplink(args []string, out io.Writer) error {
	if len(args) == 0 {
		return fmt.Errorf("uplink: plan, take, restore or status: %w", errUsage)
	}
	verb := args[0]
	flags := flag.NewFlagSet("tombolo uplink "+verb, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	asJSON := flags.Bool("json", false, "")
	stateDir := flags.String("state", network.DefaultStateDir, "")
	leaseDir := flags.String("leases", lease.DefaultDir, "")
	keep := flags.Bool("keep-address", false, "")
	timeout := flags.Duration("timeout", 5*time.Second, "")
	if err := flags.Parse(args[1:]); err != nil {
		return fmt.Errorf("uplink %s: %w: %w", verb, err, errUsage)
	}
	least, most := 2, 2
	switch verb {
	case "plan", "take":
	case "restore":
		least = 1
	case "status":
		least, most = 0, 1
	default:
		return fmt.Errorf("no command %q: %w", "uplink "+verb, errUsage)
	}
	if n := flags.NArg(); n < least || n > most {
		return fmt.Errorf("uplink %s: %d arguments, where %s are due: %w", verb, n, between(least, most), errUsage)
	}
	u := uplink.Uplink{NIC: flags.Arg(0), Bridge: flags.Arg(1), KeepAddress: *keep, Timeout: *timeout}
	do := map[string]func(context.Context, *network.Node) error{
		"plan": func(ctx context.Context, node *network.Node) error {
			steps, err := node.PlanUplink(ctx, u)
			if err == nil {
				_, err = io.WriteString(out, steps.String())
			}
			return err
		},
		"take": func(ctx context.Context, node *network.Node) error {
			notes, err := node.TakeUplink(ctx, u)
			if err != nil {
				return err
			}
			for _, note := range notes {
				fmt.Fprintln(os.Stderr, "tombolo:", printable.Line(note))
			}
			_, err = fmt.Fprintf(out, "%s is a port of %s, which has its addresses and routes\n", u.NIC, u.Bridge)
			return err
		},
		"restore": func(ctx context.Context, node *network.Node) error {
			if err := node.RestoreUplink(ctx, u.NIC, u.Bridge); err != nil {
				return err
			}
			_, err := fmt.Fprintf(out, "%s has its addresses and routes back\n", u.NIC)
			return err
		},
		"status": func(ctx context.Context, node *network.Node) error {
			return uplinkStatus(ctx, node, out, u.NIC, *asJSON)
		},
	}[verb]
	return onNode(*stateDir, *leaseDir, do)
}

func between(least, most int) string {
	if least == most {
		return fmt.Sprint(least)
	}
	return fmt.Sprintf("%d to %d", least, most)
}

// uplinkStatus prints a line for each NIC, and what differs below.
func uplinkStatus(ctx context.Context, node *network.Node, out io.Writer, nic string, asJSON bool) error {
	list, err := node.Uplinks(ctx, nic)
	if err != nil {
		return err
	}
	differs := false
	for _, r := range list {
		differs = differs || len(r.Differences) > 0
	}
	if asJSON {
		err = json.NewEncoder(out).Encode(list)
	} else {
		err = printUplinks(out, list, nic)
	}
	if err == nil && differs {
		return errDiffers
	}
	return err
}

func printUplinks(out io.Writer, list []network.UplinkReport, nic string) error {
	if len(list) == 0 && nic != "" {
		_, err := fmt.Fprintf(out, "%s is not taken over\n", nic)
		return err
	}
	for _, r := range list {
		if _, err := fmt.Fprintf(out, "%s on %s: %s\n", r.NIC, orDash(r.Bridge), orDash(string(r.State))); err != nil {
			return err
		}
		for _, d := range r.Differences {
			if _, err := fmt.Fprintln(out, "  "+d); err != nil {
				return err
			}
		}
	}
	return nil
}
