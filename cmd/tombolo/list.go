package main

import (
	"context"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/leases"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/view"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/network"
)

// lsCommand returns the command ls with its views: a table of pods, networks, and a map of everything.
func (o *options) lsCommand() *cobra.Command {
	only := report.Selection{}
	ls := o.withJSON(o.nodeCommand("ls [POD]", "list pods, or networks, or draw both",
		"List the pods on this node with their addresses, host ports and limits, and what has changed since they were "+
			"added. In POD, * and ? are wildcards. ls networks lists networks, and ls map draws them with their pods.",
		func(ctx context.Context, node *network.Node, args []string) error {
			only.Pod = optional(args, 0)
			return o.list(ctx, node, only)
		}))
	ls.Flags().StringVar(&only.Network, "network", "", "list only the pods of this `NETWORK`")
	_ = ls.RegisterFlagCompletionFunc("network", o.completeNetworks)
	networks := o.withJSON(o.nodeCommand("networks [NETWORK]",
		"list networks: bridge, subnets, gateways, uplink, pools and host ports",
		"List the networks on record with their bridges, subnets, gateways and uplinks, how full their pools are, and "+
			"which host port leads to which pod.", o.networks))
	networks.ValidArgsFunction = o.completeNetworks
	svg := false
	draw := o.nodeCommand("map", "draw uplinks, bridges, networks and pods; what check finds wrong is red", "",
		func(ctx context.Context, node *network.Node, _ []string) error { return o.draw(ctx, node, svg) })
	draw.Flags().BoolVar(&svg, "svg", false, "draw an SVG image instead, and print it")
	ls.AddCommand(networks, draw)
	return ls
}

// list prints the pods, and marks those with differences. To stderr it prints the differences that concern no pod, and
// the notes about the host.
func (o *options) list(ctx context.Context, node *network.Node, only report.Selection) error {
	inspection, err := only.Inspect(ctx, node)
	if err != nil {
		return err
	}

	causes := report.Causes(inspection)
	for _, line := range causes {
		if len(line.Pods) == 0 {
			o.warn(line.String())
		}
	}

	for _, line := range inspection.Others {
		o.warn(line)
	}

	if len(inspection.Attachments) == 0 {
		return o.print(only.None(), inspection.Attachments)
	}

	return o.print(view.List(inspection, causes), inspection.Attachments)
}

// networks prints the networks on record. It reports unreadable records on stderr.
func (o *options) networks(ctx context.Context, node *network.Node, args []string) error {
	list, problems, err := view.Load(ctx, node, o.state, optional(args, 0))
	if err != nil {
		return err
	}
	for _, problem := range problems {
		o.warn(problem.Error())
	}
	return o.print(view.Networks(list), list)
}

// draw draws the node's map for a terminal or as SVG.
func (o *options) draw(ctx context.Context, node *network.Node, svg bool) error {
	drawn, err := view.Draw(ctx, node, o.state)
	if err != nil {
		return err
	}

	if svg {
		return o.print(drawn.SVG(), nil)
	}

	screen := view.ScreenOf(os.Stdout, os.Getenv)
	if screen.Colour {
		o.out = os.Stdout // write control sequences unfiltered: Map has made all names printable
	}
	return o.print(drawn.Map(screen), nil)
}

func (o *options) leasesCommand() *cobra.Command {
	return o.withJSON(command("leases",
		"list the DHCP leases of pods, when they expire, and what is wrong with them", "", o.listLeases))
}

// listLeases prints the leases on record. To stderr it prints errors about records, and, if there are leases, a
// warning if tombolod, which renews them, does not work.
func (o *options) listLeases(context.Context, []string) error {
	d, err := lease.Open(o.leases)
	if err != nil {
		return err
	}

	records, damaged, err := d.List()
	if err != nil {
		return err
	}

	for _, bad := range damaged {
		o.warn(bad.Error())
	}

	if err := d.CheckKeeper(); err != nil && len(records) > 0 {
		o.warn(err.Error())
	}

	return o.print(leases.Table(records, time.Now()), leases.List(records, time.Now()))
}
