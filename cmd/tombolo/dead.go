package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"

	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/view"
	"github.com/tombolo-cni/tombolo/internal/printable"
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
	err = errors.Join(err, tellOfPorts(ctx, node, name))
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
				fmt.Fprintf(os.Stderr, "tombolo: container %s, %s of network %s: %s is gone, and its port %s is still there: if the pod has just ended, run this again\n",
					printable.Line(p.ContainerID), p.IfName, n, printable.Line(p.Path), p.Port)
			}
		}
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
