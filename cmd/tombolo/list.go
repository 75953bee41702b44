package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/leases"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/view"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/network"
)

// lsCommand returns the command ls with its views: a table of pods, and networks.
func (o *options) lsCommand() *cobra.Command {
	only := report.Selection{}
	ls := o.withJSON(o.nodeCommand("ls [POD]", "list pods, or networks",
		"List the pods on this node with their addresses, host ports and limits, and what has changed since they were "+
			"added. In POD, * and ? are wildcards. ls networks lists networks.",
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
	ls.AddCommand(networks)
	return ls
}

// list prints the pods, and marks those with differences. It prints differences that concern no pod to stderr.
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

func (o *options) leasesCommand() *cobra.Command {
	return o.withJSON(command("leases",
		"list the DHCP leases of pods, when they expire, and what is wrong with them", "", o.listLeases))
}

// listLeases prints the leases on record. It reports problems with a record or the keeper on stderr.
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

	if len(records) > 0 {
		if err := d.CheckKeeper(); err != nil {
			o.warn(err.Error())
		}
	}

	return o.print(leases.Table(records, time.Now()), leases.List(records, time.Now()))
}
