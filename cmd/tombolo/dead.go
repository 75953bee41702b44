package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/view"
	"github.com/tombolo-cni/tombolo/network"
)

// errKept says that gc could not reclaim all.
var errKept = errors.New("some could not be cleaned up")

// collectDead reclaims what dead pods hold, of one network or of all, and prints a line for each.
func collectDead(ctx context.Context, out io.Writer, stateDir, name string, dryRun, asJSON bool) error {
	node, err := network.Open(ctx, &network.Config{
		StateDir: stateDir, Log: slog.New(slog.NewTextHandler(printable.Writer(os.Stderr), nil)),
	})
	if err != nil {
		return err
	}
	dead, err := node.CollectDead(ctx, name, dryRun)
	kept := false
	for _, d := range dead {
		kept = kept || d.Kept != nil
	}
	if asJSON {
		if dead == nil {
			dead = []network.Dead{}
		}
		err = errors.Join(err, json.NewEncoder(out).Encode(dead))
	} else {
		err = errors.Join(err, printDead(out, dead, dryRun))
	}
	if err == nil && kept {
		return errKept
	}
	return err
}

func printDead(out io.Writer, dead []network.Dead, dryRun bool) error {
	for _, d := range dead {
		pod := d.Pod
		if pod == "" {
			pod = "container " + d.ContainerID
		}
		did := "reclaimed"
		switch {
		case d.Kept != nil:
			did = "kept: " + d.Kept.Error()
		case dryRun:
			did = "to be reclaimed"
		}
		if _, err := fmt.Fprintf(out, "%s, %s of network %s (%s): %s; %s\n",
			printable.Line(pod), d.IfName, d.Network, view.OrDash(view.Addresses(d.Attachment, ",")), printable.Line(d.Why), printable.Line(did)); err != nil {
			return err
		}
	}
	return nil
}
