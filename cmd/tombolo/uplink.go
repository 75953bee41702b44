package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/network"
)

func (o *options) uplinkCommand() *cobra.Command {
	u := uplink.Uplink{}
	plan := o.onUplink("plan NIC BRIDGE", "print how a NIC would become a port of a bridge; change nothing", takes(2, 2),
		func(ctx context.Context, node *network.Node, args []string) error {
			u.NIC, u.Bridge = args[0], args[1]
			steps, err := node.Uplinks().Plan(ctx, u)
			if err != nil {
				return err
			}
			return o.print(verdict(steps, u, os.Getenv("SSH_CONNECTION"))+steps.String(), nil)
		})
	take := o.onUplink("take NIC BRIDGE", "make a NIC a port of a bridge, as the first ADD of a network with this uplink does", takes(2, 2),
		func(ctx context.Context, node *network.Node, args []string) error {
			u.NIC, u.Bridge = args[0], args[1]
			if err := node.Uplinks().Take(ctx, u); err != nil {
				return err
			}
			return o.print(u.NIC+" is a port of "+u.Bridge+", which has its addresses and routes\n", nil)
		})
	for _, c := range []*cobra.Command{plan, take} {
		c.Flags().BoolVar(&u.KeepAddress, "keep-address", false, "leave the addresses on the NIC too, for programs that look for them there")
		c.Flags().DurationVar(&u.Timeout, "timeout", 5*time.Second, "wait this `TIME` for the gateway to answer through the bridge")
		c.Flags().StringVar(&u.ClientID, "client-id", "", "the `ID` of the DHCP client that leased the host's address: mac, none, or in hexadecimal")
		c.PreRunE = func(*cobra.Command, []string) error {
			if _, err := lease.ClientID(cmp.Or(u.ClientID, "mac"), nil); err != nil {
				return fmt.Errorf("%w: --client-id: %w", errUsage, err)
			}
			return nil
		}
	}
	restore := o.onUplink("restore NIC [BRIDGE]", "take a NIC off its bridge, and give it its addresses and routes back", takes(1, 2), o.restoreUplink)
	restore.Long = "Take a NIC off its bridge, and give it its addresses and routes back. The exit status is 3 while pods use it."
	status := o.onUplink("status [NIC]", "list the NICs that were made ports of a bridge, and what has changed since", takes(0, 1), o.uplinkStatus)
	status.Long = "List the NICs that were made ports of a bridge, and what has changed since. The exit status is 4 if something has."
	o.jsonFlag(status)
	return group("uplink", "make a NIC a port of a bridge, which takes over its addresses and routes, and back", "", plan, take, restore, status)
}

// onUplink is a command of the group's.
func (o *options) onUplink(use, short string, args cobra.PositionalArgs, do func(context.Context, *network.Node, []string) error) *cobra.Command {
	return &cobra.Command{Use: use, Short: short, Args: args, ValidArgsFunction: completeLinks, RunE: func(cmd *cobra.Command, args []string) error {
		node, err := network.Open(cmd.Context(), &network.Config{StateDir: o.state, LeaseDir: o.leases})
		if err != nil {
			return err
		}
		return do(cmd.Context(), node, args)
	}}
}

// verdict is the line that a plan begins with. connection is what sshd sets: the client's
// address and port, and those of this end.
func verdict(steps *uplink.Steps, u uplink.Uplink, connection string) string {
	ok, moves, sessions := "OK", "no address moves", "connections stay"
	if n := len(steps.Warnings); n > 0 {
		ok = fmt.Sprintf("OK, but see the warnings (%d)", n)
	}
	for _, ip := range steps.Moves {
		if ends := strings.Fields(connection); len(ends) == 4 && ends[2] == ip.String() {
			sessions = "your SSH session stays"
		}
	}
	if n := len(steps.Moves); n > 0 {
		moves = printable.List(steps.Moves, ", ") + map[bool]string{true: " moves", false: " move"}[n == 1]
	}
	return fmt.Sprintf("%s: %s to %s, %s; undo: tombolo uplink restore %s\n", ok, moves, u.Bridge, sessions, u.NIC)
}

func (o *options) restoreUplink(ctx context.Context, node *network.Node, args []string) error {
	if err := node.Uplinks().Restore(ctx, args[0], optional(args, 1)); err != nil {
		return err
	}
	return o.print(args[0]+" has its addresses and routes back\n", nil)
}

// uplinkStatus prints a line for each NIC, and what differs below.
func (o *options) uplinkStatus(ctx context.Context, node *network.Node, args []string) error {
	nic := optional(args, 0)
	list, err := node.Uplinks().List(ctx, nic)
	if err != nil {
		return err
	}
	differs := false
	var text strings.Builder
	for _, r := range list {
		found := append(r.Differences, r.LeaseTrouble...)
		differs = differs || len(found) > 0
		fmt.Fprintf(&text, "%s on %s: %s\n", r.NIC, cmp.Or(r.Bridge, "-"), cmp.Or(string(r.State), "-"))
		for _, d := range found {
			text.WriteString("  " + d + "\n")
		}
	}
	if len(list) == 0 {
		said := "no NIC is taken over\n"
		if nic != "" {
			said = nic + " is not taken over\n"
		}
		text.WriteString(said)
	}
	return o.answer(text.String(), list, differs,
		"an uplink is not as it should be: tombolo uplink take NIC BRIDGE puts it right, and so does tombolod")
}
