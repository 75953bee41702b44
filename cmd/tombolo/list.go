package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/view"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/network"
)

// list prints the attachments of all networks, and marks those that are not as they
// were made. Failures of no attachment go to stderr.
func list(ctx context.Context, out io.Writer, dir string, only report.Selection, asJSON bool) error {
	node, err := report.Open(ctx, &network.Config{StateDir: dir})
	if err != nil {
		return err
	}
	in, err := only.Inspect(ctx, node)
	if err != nil {
		return err
	}
	for _, line := range report.Apart(in) {
		fmt.Fprintln(os.Stderr, "tombolo:", printable.Line(line.String()))
	}
	if asJSON {
		return json.NewEncoder(out).Encode(in.Attachments)
	}
	return view.List(out, in)
}

// networks prints what is on record of networks. What cannot be read goes to stderr.
func networks(ctx context.Context, out io.Writer, dir, name string, asJSON bool) error {
	node, err := report.Open(ctx, &network.Config{StateDir: dir})
	if err != nil {
		return err
	}
	list, problems, err := view.Load(ctx, node, dir, name)
	if err != nil {
		return err
	}
	for _, problem := range problems {
		fmt.Fprintln(os.Stderr, "tombolo:", printable.Line(problem.Error()))
	}
	if asJSON {
		return json.NewEncoder(out).Encode(list)
	}
	_, err = io.WriteString(out, view.Networks(list))
	return err
}

// picture draws the node: for a terminal, which says what it shows, or as SVG.
func picture(ctx context.Context, out io.Writer, dir string, svg bool) error {
	node, err := report.Open(ctx, &network.Config{StateDir: dir})
	if err != nil {
		return err
	}
	drawn, err := view.Draw(ctx, node, dir)
	if err != nil {
		return err
	}
	text := ""
	if screen := view.ScreenOf(os.Stdout, os.Getenv); svg {
		text = drawn.SVG()
	} else if text = drawn.Map(screen); screen.Colour {
		out = os.Stdout // which may be sent what it obeys: all names are printable
	}
	_, err = io.WriteString(out, text)
	return err
}

// check prints what differs, a line for each cause, or for each difference, and what mends it.
// It prints no line where nothing differs.
func check(ctx context.Context, out io.Writer, dir string, asJSON, each bool) error {
	in, err := inspect(ctx, dir)
	if err != nil {
		return err
	}
	if asJSON {
		err = json.NewEncoder(out).Encode(in)
	} else {
		err = printFound(out, in, each)
		if err == nil {
			_, err = fmt.Fprintln(out, in.Summary())
		}
	}
	if err == nil && in.Differs() {
		return errDiffers
	}
	return err
}

// repair prints what it did, and what differs still.
func repair(ctx context.Context, out io.Writer, dir string) error {
	node, err := report.Open(ctx, &network.Config{StateDir: dir})
	if err != nil {
		return err
	}
	did, err := report.Repair(ctx, node)
	if did == nil {
		return err
	}
	for _, line := range did.Done {
		if _, err := fmt.Fprintln(out, "repaired:", printable.Line(line.Text)); err != nil {
			return err
		}
	}
	for _, line := range did.Left {
		if _, err := fmt.Fprintln(out, "left:", printable.Line(line.String())); err != nil {
			return err
		}
	}
	if len(did.Left) == 0 {
		return err
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "tombolo:", printable.Line(err.Error()))
	}
	return errDiffers
}

func inspect(ctx context.Context, stateDir string) (*network.Inspection, error) {
	node, err := report.Open(ctx, &network.Config{StateDir: stateDir})
	if err != nil {
		return nil, err
	}
	return node.Inspect(ctx)
}

// remove takes a network down that is on record.
func remove(ctx context.Context, dir, name string) error {
	node, err := report.Open(ctx, &network.Config{StateDir: dir})
	if err != nil {
		return err
	}
	return report.Remove(ctx, node, name)
}

func printFound(out io.Writer, in *network.Inspection, each bool) error {
	lines := report.Causes(in)
	if each {
		lines = report.Each(in)
	}
	for _, line := range lines {
		if _, err := fmt.Fprintln(out, printable.Line(line.String())); err != nil {
			return err
		}
	}
	for _, line := range in.Others {
		if _, err := fmt.Fprintln(out, printable.Line(line)); err != nil {
			return err
		}
	}
	return nil
}

// leases prints the leases on record; what is wrong with a record, and with the keeper,
// goes to stderr.
func leases(out io.Writer, dir string, asJSON bool) error {
	d, err := lease.Open(dir)
	if err != nil {
		return err
	}
	records, damaged, err := d.List()
	if err != nil {
		return err
	}
	for _, bad := range damaged {
		fmt.Fprintln(os.Stderr, "tombolo:", printable.Line(bad.Error()))
	}
	if len(records) > 0 {
		if err := d.CheckKeeper(); err != nil {
			fmt.Fprintln(os.Stderr, "tombolo:", printable.Line(err.Error()))
		}
	}
	if asJSON {
		return lease.WriteJSON(out, records, time.Now())
	}
	return lease.WriteTable(out, records, time.Now())
}
