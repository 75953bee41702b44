package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/printable"
)

func (o *options) bugreportCommand() *cobra.Command {
	lists := ""
	cmd := command("bugreport [FILE]",
		"write a file to paste into an issue: the output of other commands, and the configuration",
		"Write a new file to paste into an issue, tombolo-bugreport.md by default: the output of status, check, ls, "+
			"leases, doctor and others, and the runtimes' networks. Of a network it shows only the fields that "+
			"Tombolo knows, since others may be secret. It names pods and addresses.",
		func(ctx context.Context, args []string) error {
			return o.bugreport(ctx, cmp.Or(optional(args, 0), "tombolo-bugreport.md"), lists)
		})
	cmd.ValidArgsFunction = cobra.FixedCompletions(nil, cobra.ShellCompDirectiveDefault)
	cmd.Flags().StringVar(&lists, "dir", "/etc/cni/net.d", "the runtimes' `DIR` of CNI networks")
	return cmd
}

// bugreport writes a new file at path with the output of other tombolo commands and the configurations in the
// directory lists. It returns an error if the file exists already. If a part of the report fails, the file contains
// the error. bugreport also returns an error about a missing permission.
func (o *options) bugreport(ctx context.Context, path, lists string) error {
	report, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer report.Close()
	ctx, stop := context.WithTimeout(ctx, time.Minute) // a limit, since doctor waits for each lost packet of each pod
	defer stop()
	inner := &options{out: printable.Writer(report), stderr: printable.Writer(report)}
	var denied error
	part := func(title string, write func() error) {
		fmt.Fprintf(inner.out, "### %s\n\n```text\n", title)
		if err := write(); err != nil {
			inner.warn(err.Error())
			if errors.Is(err, fs.ErrPermission) {
				denied = err
			}
		}
		fmt.Fprint(inner.out, "```\n\n")
	}

	for _, line := range []string{"version", "status", "check", "ls", "ls networks", "leases", "uplink status",
		"doctor"} {
		root := inner.root()
		root.SetArgs(append(strings.Fields(line), "--state", o.state, "--leases", o.leases))
		part("tombolo "+line, func() error { return root.ExecuteContext(ctx) })
	}

	part("networks in "+lists, func() error { configurations(ctx, inner.out, lists); return nil })
	if _, err := fmt.Fprintln(report, "Not in this file: journalctl -u tombolod, nft list ruleset."); err != nil {
		return err
	}

	return errors.Join(denied, o.print(path+
		" is written: read it before you publish it, since it names pods and addresses\n", nil))
}

// configurations prints the configuration files in a directory. It leaves out values that may be secret: see redact.
func configurations(ctx context.Context, to io.Writer, dir string) {
	known := append(cni.KnownFields(), "plugins", "cniVersions", "disableCheck")
	paths, _ := filepath.Glob(filepath.Join(dir, "*.*")) // Glob fails only for an invalid pattern
	for _, path := range paths {
		var conf map[string]any
		data, err := file.ReadNamed(ctx, path, cni.MaxStdin, 0)
		if err := cmp.Or(err, json.Unmarshal(data, &conf)); err != nil {
			fmt.Fprintf(to, "%s: %v\n", path, err)
			continue
		}
		data, _ = json.Marshal(redact(conf, known))
		fmt.Fprintf(to, "%s: %s\n", path, data)
	}
}

// redact replaces values that may be secret by "(left out)". These are the values of unknown fields and, for a plugin
// of another program, all values except the type. redact changes conf and returns it.
func redact(conf any, known []string) any {
	switch conf := conf.(type) {
	case []any:
		for i := range conf {
			conf[i] = redact(conf[i], known)
		}
	case map[string]any:
		kind, is := conf["type"].(string)
		foreign := is && !slices.Contains(append(cni.Names(), "tombolo", "dhcp"), filepath.Base(kind))
		for key := range conf {
			if conf[key] = redact(conf[key], known); foreign && key != "type" || !slices.Contains(known, key) {
				conf[key] = "(left out)"
			}
		}
	}

	return conf
}
