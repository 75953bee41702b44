package main

import (
	"fmt"
	"io"

	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/install"
	"github.com/tombolo-cni/tombolo/internal/cni"
)

// installNames puts the plugin and names of it into a directory of plugins, or takes the
// names away.
func installNames(out io.Writer, dir, list string, undo bool) error {
	var names []string
	if list == "" && undo {
		list = "all"
	}
	if list != "" {
		var err error
		if names, err = install.Select(list, cni.Names()); err != nil {
			return fmt.Errorf("install: %w: %w", err, errUsage)
		}
	}
	if undo {
		return install.Remove(out, dir, names)
	}
	plugin, err := install.Plugin()
	if err != nil {
		return err
	}
	return install.Add(out, plugin, dir, names)
}
