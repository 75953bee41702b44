package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/conflist"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/install"
	"github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/internal/file"
)

func (o *options) installCommand() *cobra.Command {
	list, undo := "", false
	cmd := command("install DIR", "put the plugin into a runtime's directory of CNI plugins",
		"Put the plugin into a runtime's directory of CNI plugins; with --names, also under the names of the "+
			"reference plugins, which are kept.",
		func(_ context.Context, args []string) error { return o.install(args[0], list, undo) })
	cmd.ValidArgsFunction = cobra.FixedCompletions(nil, cobra.ShellCompDirectiveFilterDirs)
	cmd.Flags().StringVar(&list, "names", "", "also install it under these `NAMES`, such as bridge,portmap, or all")
	cmd.Flags().BoolVar(&undo, "undo", false, "remove these names, or all of them, and put back what was there")
	return cmd
}

// install copies the plugin into the directory dir, and adds a file for each name in list. With undo it removes these
// files instead or, if list is empty, the files of all names.
func (o *options) install(dir, list string, undo bool) error {
	if list == "" && undo {
		list = "all"
	}

	names, err := install.Select(list, cni.Names())
	if list != "" && err != nil { // without a list, names is nil
		return fmt.Errorf("%w: %w", errUsage, err)
	}

	if undo {
		return install.Remove(o.out, dir, names)
	}

	plugin, err := install.Plugin()
	if err != nil {
		return err
	}

	return install.Add(o.out, plugin, dir, names)
}

func (o *options) validateCommand() *cobra.Command {
	cmd := command("validate FILE...",
		"print all that is wrong with configuration files, or what their first ADD would do",
		"Print all that is wrong with configuration files, or what the first ADD of each would do; change nothing. "+
			"The exit status is 4 if a file is invalid.", o.validate)
	cmd.ValidArgsFunction = cobra.FixedCompletions(nil, cobra.ShellCompDirectiveDefault)
	return cmd
}

// validate prints the warnings and the problems of each file. If a file has no problems, validate prints the steps of
// its first ADD. It returns a findingsError if a file is invalid, and an error if a file cannot be read.
func (o *options) validate(ctx context.Context, files []string) error {
	var text strings.Builder
	invalid := false
	var readErr error
	for _, name := range files {
		// Allow a named pipe, such as the shell makes for <(command).
		data, err := file.ReadNamed(ctx, name, cni.MaxStdin, fs.ModeNamedPipe)
		if err != nil {
			readErr = errors.Join(readErr, err)
			continue
		}

		r := conflist.Examine(data)
		switch ext := filepath.Ext(name); {
		case ext == ".conflist" && r.Single:
			r.Problems = append(r.Problems,
				`runtimes take a .conflist file only as a list: put the plugin into "plugins"`)
		case (ext == ".conf" || ext == ".json") && r.List:
			r.Problems = append(r.Problems,
				"runtimes take a "+ext+" file only as one plugin's configuration: name it .conflist")
		}

		verdict, lines := "valid", r.Plan
		if len(r.Problems) > 0 {
			invalid, verdict, lines = true, "invalid", r.Problems
		}

		fmt.Fprintf(&text, "%s: %s\n", name, verdict)
		for _, line := range r.Warnings {
			fmt.Fprintf(&text, "  warning: %s\n", line)
		}

		for _, line := range lines {
			fmt.Fprintf(&text, "  %s\n", line)
		}
	}

	err := o.answer(text.String(), nil, invalid, "at least one configuration is invalid")
	return cmp.Or(readErr, err)
}

// version describes the build.
type version struct {
	Version string   `json:"version"`
	Commit  string   `json:"commit"`
	Go      string   `json:"go"`
	CNI     []string `json:"cni"`
}

// thisVersion describes this build. The go command recorded the version and the commit from git.
func thisVersion() version {
	build, _ := debug.ReadBuildInfo()
	v := version{build.Main.Version, "unknown", runtime.Version(), cni.SupportedVersions()}
	for _, s := range build.Settings {
		if s.Key == "vcs.revision" {
			v.Commit = s.Value
		}
	}

	return v
}

func (o *options) versionCommand() *cobra.Command {
	return o.withJSON(command("version",
		"print the version, the commit, the Go release and the supported CNI versions", "",
		func(context.Context, []string) error {
			v := thisVersion()
			return o.print(fmt.Sprintf("tombolo %s (commit %s, %s, %s/%s)\nCNI %s\n",
				v.Version, v.Commit, v.Go, runtime.GOOS, runtime.GOARCH, strings.Join(v.CNI, ", ")), v)
		}))
}
