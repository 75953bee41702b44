package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/network"
)

func planUplink(ctx context.Context, node *network.Node, out io.Writer, u uplink.Uplink) error {
	steps, err := node.PlanUplink(ctx, u)
	if err != nil {
		return err
	}
	_, err = io.WriteString(out, steps.String())
	return err
}

func takeUplink(ctx context.Context, node *network.Node, out io.Writer, u uplink.Uplink) error {
	notes, err := node.TakeUplink(ctx, u)
	if err != nil {
		return err
	}
	for _, note := range notes {
		fmt.Fprintln(os.Stderr, "tombolo:", printable.Line(note))
	}
	_, err = fmt.Fprintf(out, "%s is a port of %s, which has its addresses and routes\n", u.NIC, u.Bridge)
	return err
}

func restoreUplink(ctx context.Context, node *network.Node, out io.Writer, nic, bridge string) error {
	if err := node.RestoreUplink(ctx, nic, bridge); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "%s has its addresses and routes back\n", nic)
	return err
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
