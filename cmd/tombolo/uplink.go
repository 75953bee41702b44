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
	"github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/printable"
)

// runUplink runs one of the commands about uplinks.
func runUplink(plugin *cni.Plugin, args []string, out io.Writer) error {
	if len(args) == 0 {
		return fmt.Errorf("uplink: plan, take, restore or status: %w", errUsage)
	}
	verb := args[0]
	flags := flag.NewFlagSet("tombolo uplink "+verb, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	asJSON := flags.Bool("json", false, "")
	stateDir := flags.String("state", cni.DefaultStateDir, "")
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
	ctx := context.Background()
	u := uplink.Uplink{NIC: flags.Arg(0), Bridge: flags.Arg(1), KeepAddress: *keep, Timeout: *timeout}
	switch verb {
	case "plan":
		text, err := plugin.UplinkPlan(ctx, u)
		if err == nil {
			_, err = io.WriteString(out, text)
		}
		return err
	case "take":
		notes, err := plugin.UplinkTake(ctx, *stateDir, *leaseDir, u)
		if err != nil {
			return err
		}
		for _, note := range notes {
			fmt.Fprintln(os.Stderr, "tombolo:", printable.Line(note))
		}
		_, err = fmt.Fprintf(out, "%s is a port of %s, which has its addresses and routes\n", u.NIC, u.Bridge)
		return err
	case "restore":
		if err := plugin.UplinkRestore(ctx, *stateDir, *leaseDir, u.NIC, u.Bridge); err != nil {
			return err
		}
		_, err := fmt.Fprintf(out, "%s has its addresses and routes back\n", u.NIC)
		return err
	}
	return uplinkStatus(plugin, out, *stateDir, *leaseDir, u.NIC, *asJSON)
}

func between(least, most int) string {
	if least == most {
		return fmt.Sprint(least)
	}
	return fmt.Sprintf("%d to %d", least, most)
}

// uplinkStatus prints a line for each NIC, and what differs below.
func uplinkStatus(plugin *cni.Plugin, out io.Writer, stateDir, leaseDir, nic string, asJSON bool) error {
	list, err := plugin.Uplinks(context.Background(), stateDir, leaseDir, nic)
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

func printUplinks(out io.Writer, list []cni.UplinkReport, nic string) error {
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
