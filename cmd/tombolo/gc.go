package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/view"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/network"
)

const errKept found = "some could not be cleaned up"

func (o *options) gcCommand() *cobra.Command {
	dryRun := false
	cmd := &cobra.Command{
		Use:   "gc [NETWORK]",
		Short: "delete what pods left that died without a DEL: ports, addresses, host ports, records",
		Long: "Delete what pods left that died without a DEL: their ports, addresses, host ports and records, of all networks or\n" +
			"of one. The exit status is 4 if some could not be cleaned up; the output says why.",
		Args: takes(0, 1), ValidArgsFunction: o.completeNetworks,
		RunE: func(cmd *cobra.Command, args []string) error { return o.gc(cmd.Context(), optional(args, 0), dryRun) },
	}
	o.jsonFlag(cmd)
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "only print what would be cleaned up")
	return cmd
}

// gc reclaims what dead pods hold, of one network or of all, and prints a line for each.
func (o *options) gc(ctx context.Context, name string, dryRun bool) error {
	node, err := report.Open(ctx, &network.Config{
		StateDir: o.state, LeaseDir: o.leases, Log: slog.New(slog.NewTextHandler(printable.Writer(os.Stderr), nil)),
	})
	if err != nil {
		return err
	}
	dead, err := node.CollectDead(ctx, name, dryRun)
	if dead == nil {
		dead = []network.Dead{}
	}
	kept := false
	var text strings.Builder
	for _, d := range dead {
		did := "reclaimed"
		switch {
		case d.Kept != nil:
			kept, did = true, "kept: "+d.Kept.Error()
		case dryRun:
			did = "to be reclaimed"
		}
		fmt.Fprintf(&text, "%s, %s of network %s (%s): %s; %s\n", printable.Line(report.PodName(d.Pod, d.ContainerID)), d.IfName, d.Network,
			view.OrDash(view.Addresses(d.Attachment, ",")), printable.Line(d.Why), printable.Line(did))
	}
	if len(dead) == 0 && err == nil {
		text.WriteString("no dead pod has anything\n")
	}
	err = errors.Join(err, o.print(text.String(), dead), tellOfPorts(ctx, node, name))
	if err == nil && kept {
		return errKept
	}
	return err
}

// tellOfPorts names pods whose namespace has no path any more, and a port still: the kernel takes that away a
// moment after the last socket in the namespace. It is no more than a hint, since a path may be another mount namespace's.
func tellOfPorts(ctx context.Context, node *network.Node, name string) error {
	networks, err := node.Networks(ctx)
	for _, n := range networks {
		if name != "" && n != name {
			continue
		}
		pods, listErr := node.Attachments(ctx, n)
		err = errors.Join(err, listErr)
		for _, p := range pods {
			if _, statErr := os.Stat(p.Path); p.Ready && errors.Is(statErr, fs.ErrNotExist) {
				warn(fmt.Sprintf("container %s, %s of network %s: %s is gone, and its port %s is still there: if the pod has just ended, run this again",
					p.ContainerID, p.IfName, n, p.Path, p.Port))
			}
		}
	}
	return err
}

func (o *options) removeCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "remove NETWORK",
		Short: "delete a network without pods: its rules, gateways and record, and its bridge if nothing else uses it",
		Long: "Delete a network that has no pods left: its rules, gateways and record, and its bridge if nothing else uses it.\n" +
			"The exit status is 3 while pods use it.",
		Args: takes(1, 1), ValidArgsFunction: o.completeNetworks,
		RunE: func(cmd *cobra.Command, args []string) error {
			node, err := o.open(cmd.Context())
			if err == nil {
				err = report.Remove(cmd.Context(), node, args[0])
			}
			if err != nil {
				return err
			}
			return o.print("network "+printable.Line(args[0])+" is removed\n", nil)
		},
	}
}
