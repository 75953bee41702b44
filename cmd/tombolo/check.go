package main

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/internal/printable"
)

const errDiffers found = "something differs; the end of each line says, in brackets, what repairs it"

func (o *options) checkCommand() *cobra.Command {
	each := false
	cmd := &cobra.Command{
		Use:   "check",
		Short: "compare bridges, pods and firewalls with what was set up",
		Long: "Compare bridges, pods and firewalls with what was set up, and list what differs and what repairs it. The exit\n" +
			"status is 4 if something differs.",
		Args: takes(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error { return o.check(cmd.Context(), each) },
	}
	o.jsonFlag(cmd)
	cmd.Flags().BoolVarP(&each, "verbose", "v", false, "print one line for each difference, not one for each cause")
	return cmd
}

// check prints what differs, a line for each cause, or for each difference, and what mends it.
func (o *options) check(ctx context.Context, each bool) error {
	node, err := o.open(ctx)
	if err != nil {
		return err
	}
	in, err := node.Inspect(ctx)
	if err != nil {
		return err
	}
	lines := report.Causes(in)
	if each {
		lines = report.Each(in)
	}
	var text strings.Builder
	for _, line := range lines {
		text.WriteString(printable.Line(line.String()) + "\n")
	}
	for _, line := range in.Others {
		text.WriteString(printable.Line(line) + "\n")
	}
	text.WriteString(in.Summary() + "\n")
	if err := o.print(text.String(), in); err != nil {
		return err
	}
	if in.Differs() {
		return errDiffers
	}
	return nil
}

func (o *options) repairCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "repair",
		Short: "put back what check marks [repair]; delete links and rules of ours that no pod has",
		Long: "Put back what check marks [repair], in the kernel and in pods, and print what was repaired and what is left. It\n" +
			"deletes only links and rules of Tombolo's that no pod has any more. The exit status is 4 if something is left.",
		Args: takes(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error { return o.repair(cmd.Context()) },
	}
}

// repair prints what it did, and what differs still.
func (o *options) repair(ctx context.Context) error {
	node, err := o.open(ctx)
	if err != nil {
		return err
	}
	did, err := report.Repair(ctx, node)
	if did == nil {
		return err
	}
	var text strings.Builder
	for _, line := range did.Done {
		text.WriteString("repaired: " + printable.Line(line.Text) + "\n")
	}
	for _, line := range did.Left {
		text.WriteString("left: " + printable.Line(line.String()) + "\n")
	}
	if text.Len() == 0 && err == nil {
		text.WriteString("nothing is to be repaired\n")
	}
	if printErr := o.print(text.String(), nil); printErr != nil {
		return printErr
	}
	if len(did.Left) == 0 {
		return err
	}
	if err != nil {
		warn(err.Error())
	}
	return errDiffers
}
