package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/view"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/network"
)

// differs returns the error of a command that found differences. Its text lists the remedies.
func differs(lines []report.Line) findingsError {
	return findingsError("something differs; this helps: " + report.Helps(lines))
}

func (o *options) checkCommand() *cobra.Command {
	each := false
	cmd := o.withJSON(o.nodeCommand("check", "compare bridges, pods and firewalls with what was set up",
		"Compare bridges, pods and firewalls with what was set up, and list what differs and what repairs it. The "+
			"exit status is 4 if something differs. What pods changed inside is a note: it is theirs, and nothing "+
			"puts it back.",
		func(ctx context.Context, node *network.Node, _ []string) error { return o.check(ctx, node, each) }))
	cmd.Flags().BoolVarP(&each, "verbose", "v", false, "print one line for each difference, not one for each cause")
	return cmd
}

// check compares the node with its records, and prints the differences with their remedies, and notes. It prints one
// line for each cause or, if each is set, for each difference. It returns a findingsError if there are differences.
func (o *options) check(ctx context.Context, node *network.Node, each bool) error {
	inspection, err := node.Inspect(ctx)
	if err != nil {
		return err
	}

	lines := report.Causes(inspection)
	if each {
		lines = report.Each(inspection)
	}

	var text strings.Builder
	for _, line := range lines {
		text.WriteString(printable.Line(line.String()) + "\n")
	}

	for _, line := range report.Notes(inspection) {
		text.WriteString("note: " + printable.Line(line.String()) + "\n")
	}

	for _, line := range inspection.Others {
		text.WriteString(printable.Line(line) + "\n")
	}

	text.WriteString(report.Summary(inspection) + "\n")
	return o.answer(text.String(), inspection, inspection.Differs(), differs(lines))
}

func (o *options) repairCommand() *cobra.Command {
	return o.nodeCommand("repair", "repair what check marks [repair]; delete Tombolo's links and rules that no pod has",
		"Put back what check marks [repair], on the host and never inside a pod, and print what was repaired and what "+
			"is left. It deletes only Tombolo's links and rules that no pod has any more. The exit status is 4 if "+
			"something is left.", o.repair)
}

// repair repairs the host, and prints all repaired and all remaining differences. It returns a findingsError if some
// remain, and the error of a failed repair if none remain.
func (o *options) repair(ctx context.Context, node *network.Node, _ []string) error {
	done, left, err := report.Repair(ctx, node)
	var text strings.Builder
	for _, line := range done {
		line.Remedy = "" // omit the remedy: Repair has applied it
		text.WriteString("repaired: " + printable.Line(line.String()) + "\n")
	}

	for _, line := range left {
		text.WriteString("left: " + printable.Line(line.String()) + "\n")
	}

	if text.Len() == 0 && err == nil {
		text.WriteString("nothing to repair\n")
	}

	if printErr := o.print(text.String(), nil); printErr != nil {
		return printErr
	}

	if len(left) == 0 {
		return err
	}

	if err != nil {
		o.warn(err.Error())
	}

	return differs(left)
}

func (o *options) gcCommand() *cobra.Command {
	dryRun := false
	cmd := o.withJSON(command("gc [NETWORK]",
		"delete the remains of pods that died without a DEL: ports, addresses, host ports, records",
		"Delete the remains of pods that died without a DEL: their ports, addresses, host ports and records, of all "+
			"networks or of one. The exit status is 4 if some remain; the output says why.",
		func(ctx context.Context, args []string) error { return o.gc(ctx, optional(args, 0), dryRun) }))
	cmd.ValidArgsFunction = o.completeNetworks
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "only print what would be deleted")
	return cmd
}

// gc deletes the ports, addresses and records that dead pods left, and prints a line for each interface of a dead pod.
// With dryRun it only prints these lines. If name is empty, gc examines all networks, else only the named one. If it
// could not clean up after a pod, it returns a findingsError.
func (o *options) gc(ctx context.Context, name string, dryRun bool) error {
	node, err := report.Open(ctx, &network.Config{
		StateDir: o.state, LeaseDir: o.leases, Log: slog.New(slog.NewTextHandler(o.stderr, nil)),
	})
	if err != nil {
		return err
	}

	dead, err := node.CollectDead(ctx, name, dryRun)
	dead = append([]network.Dead{}, dead...) // so that JSON has [] and not null
	isKept := false
	var text strings.Builder
	for _, d := range dead {
		verb := "reclaimed"
		switch {
		case d.Kept != nil:
			isKept, verb = true, "kept: "+d.Kept.Error()
		case dryRun:
			verb = "to be reclaimed"
		}
		fmt.Fprintf(&text, "%s, %s of network %s (%s): %s; %s\n", printable.Line(report.PodName(d.Pod, d.ContainerID)),
			d.IfName, d.Network,
			cmp.Or(view.Addresses(d.Attachment, ","), "-"), printable.Line(d.Why), printable.Line(verb))
	}

	if len(dead) == 0 && err == nil {
		text.WriteString("nothing is left of dead pods\n")
	}

	err = errors.Join(err, o.print(text.String(), dead), o.printPorts(ctx, node, name, dead))
	if err == nil && isKept {
		return findingsError("some remains could not be deleted")
	}

	return err
}

// printPorts warns about pods whose namespace path is gone while the pod's port on the bridge still exists. The kernel
// deletes the port a moment after the last process and the last socket have left the namespace. The warning may be
// wrong, since the path may exist in another mount namespace. printPorts skips the pods in dead, which gc has printed.
func (o *options) printPorts(ctx context.Context, node *network.Node, name string, dead []network.Dead) error {
	networks, err := node.Networks(ctx)
	for _, n := range networks {
		if name != "" && n != name {
			continue
		}

		pods, listErr := node.Attachments(ctx, n)
		err = errors.Join(err, listErr)
		for _, p := range pods {
			isDead := slices.ContainsFunc(dead, func(d network.Dead) bool { return d.Key == p.Key })
			if _, statErr := os.Stat(p.Path); p.Ready && !isDead && errors.Is(statErr, fs.ErrNotExist) {
				o.warn(fmt.Sprintf("%s, %s of network %s: %s is gone, but the pod's port %s exists: if the pod has "+
					"just ended, run this again",
					report.PodName(p.Pod, p.ContainerID), p.IfName, n, p.Path, p.Port))
			}
		}
	}

	return err
}

func (o *options) removeCommand() *cobra.Command {
	cmd := o.nodeCommand("remove NETWORK",
		"delete a network without pods: its rules, gateways and record, and its bridge if nothing else uses it",
		"Delete a network that has no pods left: its rules, gateways and record, and its bridge if nothing else "+
			"uses it. The exit status is 3 while pods use it.",
		func(ctx context.Context, node *network.Node, args []string) error {
			if err := node.Upkeep().Known(ctx, args[0]); err != nil {
				return err
			}
			return o.done(node.Remove(ctx, args[0]), "network "+printable.Line(args[0])+" is removed\n")
		})
	cmd.ValidArgsFunction = o.completeNetworks
	return cmd
}
