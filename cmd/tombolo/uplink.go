package main

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/network"
)

func (o *options) uplinkCommand() *cobra.Command {
	byTake := false
	plan := o.uplinkSubcommand("plan NIC BRIDGE",
		"print what a network with this uplink makes, and what cannot work; change nothing",
		"Print what the first ADD of a network with this uplink and bridge makes, and what cannot work. Change "+
			"nothing. With --take, print how `uplink take` would make the NIC a port of the bridge.",
		func(ctx context.Context, node *network.Node, args []string) error {
			return o.planUplink(ctx, node, args[0], args[1], byTake)
		})
	plan.Flags().BoolVar(&byTake, "take", false, "print the steps of `uplink take`")
	take := o.uplinkSubcommand("take NIC BRIDGE",
		"make a NIC with static addresses a port of a bridge, which gets its addresses and routes",
		"Make a NIC a port of a bridge, which gets its addresses and routes. No network needs that: mode \"lan\" "+
			"shares the NIC. It is for hosts with static addresses. A NIC that a DHCP client or router "+
			"advertisements manage is refused.",
		func(ctx context.Context, node *network.Node, args []string) error {
			return o.done(node.Uplinks().Take(ctx, args[0], args[1]),
				args[0]+" is a port of "+args[1]+", which has its addresses and routes\n")
		})
	restore := o.uplinkSubcommand("restore NIC [BRIDGE]",
		"undo `uplink take`: give the NIC its addresses and routes back",
		"Take a NIC off its bridge, and give it its addresses and routes back. The exit status is 3 while pods use it.",
		o.restoreUplink)
	status := o.withJSON(o.uplinkSubcommand("status [NIC]",
		"list the NICs that are shared or taken over, and what differs from their setup",
		"List the NICs that are shared or taken over, and what differs from their setup. The exit status is 4 if "+
			"something differs.", o.uplinkStatus))
	return group("uplink", "see which NICs connect pods to a LAN; make a NIC a port of a bridge, and back", "", plan,
		take, restore, status)
}

// uplinkSubcommand returns a subcommand of uplink. It opens the node and calls do.
func (o *options) uplinkSubcommand(use, short, long string,
	do func(context.Context, *network.Node, []string) error) *cobra.Command {
	cmd := command(use, short, long, func(ctx context.Context, args []string) error {
		node, err := network.Open(ctx, &network.Config{StateDir: o.state})
		if err != nil {
			return err
		}
		return do(ctx, node, args)
	})
	cmd.ValidArgsFunction = completeLinks
	return cmd
}

// planUplink prints the steps of the first ADD of a network whose bridge shares the NIC. If byTake is set, it prints
// the steps of `tombolo uplink take`, which makes the NIC a port of the bridge.
func (o *options) planUplink(ctx context.Context, node *network.Node, nic, bridge string, byTake bool) error {
	if byTake {
		steps, moves, warnings, err := node.Uplinks().PlanTake(ctx, nic, bridge)
		if err != nil {
			return err
		}
		return o.print(verdict(moves, warnings, nic, bridge, os.Getenv("SSH_CONNECTION"))+steps, nil)
	}

	lines, warnings, err := node.Uplinks().PlanShare(ctx, nic, bridge)
	if err != nil {
		return err
	}

	var text strings.Builder
	fmt.Fprintf(&text, "%s: %s stays the host's, and pods on %s are its neighbours on the LAN\n", okUnless(warnings),
		nic, bridge)
	for i, line := range lines {
		fmt.Fprintf(&text, "%d. %s\n", i+1, line)
	}

	for _, w := range warnings {
		fmt.Fprintf(&text, "warning: %s\n", w)
	}

	return o.print(text.String(), nil)
}

func okUnless(warnings []string) string {
	if len(warnings) == 0 {
		return "OK"
	}
	return fmt.Sprintf("OK, but see the warnings (%d)", len(warnings))
}

// verdict returns the first line of a takeover's plan. connection is the variable SSH_CONNECTION of sshd: address and
// port of the client, then of the server.
func verdict(addresses []netip.Addr, warnings []string, nic, bridge, connection string) string {
	moves, sessions, own := "no address moves", "connections stay", printable.Texts(addresses)
	if ends := strings.Fields(connection); len(ends) == 4 && slices.Contains(own, ends[2]) {
		sessions = "your SSH session stays"
	}

	if n := len(own); n > 0 {
		moves = strings.Join(own, ", ") + map[bool]string{true: " moves", false: " move"}[n == 1]
	}
	return fmt.Sprintf("%s: %s to %s, %s; undo: tombolo uplink restore %s\n", okUnless(warnings), moves, bridge,
		sessions, nic)
}

func (o *options) restoreUplink(ctx context.Context, node *network.Node, args []string) error {
	err := node.Uplinks().Restore(ctx, args[0], optional(args, 1))
	return o.done(err, args[0]+" has its addresses and routes back\n")
}

// uplinkStatus prints a line for each NIC that a network shares or that was taken over. Below each line it lists the
// differences from the intended state. If there are any, uplinkStatus returns a findingsError.
func (o *options) uplinkStatus(ctx context.Context, node *network.Node, args []string) error {
	nic := optional(args, 0)
	list, err := node.Uplinks().List(ctx, nic)
	if err != nil {
		return err
	}

	differs := false
	var text strings.Builder
	for _, r := range list {
		differs = differs || len(r.Differences) > 0
		fmt.Fprintf(&text, "%s on %s: %s\n", r.NIC, cmp.Or(r.Bridge, "-"), cmp.Or(r.State, "-"))
		for _, d := range r.Differences {
			text.WriteString("  " + d + "\n")
		}
	}

	if len(list) == 0 {
		none := "no NIC is shared or taken over\n"
		if nic != "" {
			none = nic + " is neither shared nor taken over\n"
		}
		text.WriteString(none)
	}

	return o.answer(text.String(), list, differs,
		"something differs; unless its line names another command, this helps: tombolo repair")
}
