package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/install"
	"github.com/tombolo-cni/tombolo/internal/cni"
)

func (o *options) installCommand() *cobra.Command {
	list, undo := "", false
	cmd := &cobra.Command{
		Use:   "install DIR",
		Short: "put the plugin into a runtime's directory of CNI plugins",
		Long: "Put the plugin into a runtime's directory of CNI plugins; with --names, also under the names of the reference\n" +
			"plugins, which are kept.",
		Args: takes(1, 1), ValidArgsFunction: cobra.FixedCompletions(nil, cobra.ShellCompDirectiveFilterDirs),
		RunE: func(_ *cobra.Command, args []string) error { return o.install(args[0], list, undo) },
	}
	cmd.Flags().StringVar(&list, "names", "", "also install it under these `NAMES`, such as bridge,portmap, or all")
	cmd.Flags().BoolVar(&undo, "undo", false, "remove these names, or all of them, and put back what was there")
	return cmd
}

// install puts the plugin and names of it into a directory, or takes the names away.
func (o *options) install(dir, list string, undo bool) error {
	var names []string
	if list == "" && undo {
		list = "all"
	}
	if list != "" {
		var err error
		if names, err = install.Select(list, cni.Names()); err != nil {
			return fmt.Errorf("%w: %w", errUsage, err)
		}
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
