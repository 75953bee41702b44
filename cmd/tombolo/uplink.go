package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/view"
	"github.com/tombolo-cni/tombolo/network"
)

// errUplinkDiffers says that uplink status found something. repair looks after the uplinks of
// networks; one that the operator took is in none before its first ADD.
var errUplinkDiffers = errors.New("an uplink is not as it should be: tombolo uplink take NIC BRIDGE puts it right, and so does tombolod")

func planUplink(ctx context.Context, node *network.Node, out io.Writer, u uplink.Uplink) error {
	steps, err := node.PlanUplink(ctx, u)
	if err != nil {
		return err
	}
	_, err = io.WriteString(out, verdict(steps, u, os.Getenv("SSH_CONNECTION"))+steps.String())
	return err
}

// verdict is the line that a plan begins with. connection is what sshd sets: the client's
// address and port, and those of this end.
func verdict(steps *uplink.Steps, u uplink.Uplink, connection string) string {
	ok, moves, sessions := "OK", "no address", "connections stay"
	if n := len(steps.Warnings); n > 0 {
		ok = fmt.Sprintf("OK, but see the warnings (%d)", n)
	}
	var list []string
	for _, ip := range steps.Moves {
		list = append(list, ip.String())
		if ends := strings.Fields(connection); len(ends) == 4 && ends[2] == ip.String() {
			sessions = "your SSH session stays"
		}
	}
	verb := "moves"
	if len(list) > 0 {
		moves = strings.Join(list, ", ")
	}
	if len(list) > 1 {
		verb = "move"
	}
	return fmt.Sprintf("%s: %s %s to %s, %s; undo: tombolo uplink restore %s\n", ok, moves, verb, u.Bridge, sessions, u.NIC)
}

func takeUplink(ctx context.Context, node *network.Node, out io.Writer, u uplink.Uplink) error {
	if err := node.TakeUplink(ctx, u); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "%s is a port of %s, which has its addresses and routes\n", u.NIC, u.Bridge)
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
		return errUplinkDiffers
	}
	return err
}

func printUplinks(out io.Writer, list []network.UplinkReport, nic string) error {
	if len(list) == 0 && nic != "" {
		_, err := fmt.Fprintf(out, "%s is not taken over\n", nic)
		return err
	}
	for _, r := range list {
		if _, err := fmt.Fprintf(out, "%s on %s: %s\n", r.NIC, view.OrDash(r.Bridge), view.OrDash(string(r.State))); err != nil {
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
