package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/internal/install"
)

// installNames puts the program and names of it into a directory of plugins, or takes the
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
	return install.Add(out, dir, names)
}

// calledAs is the path that the program was called by, and the arguments that follow. A file that
// install put there starts it as "tombolo as /opt/cni/bin/bridge".
func calledAs(args []string) (path string, rest []string) {
	if len(args) > 2 && args[1] == install.As {
		return args[2], args[3:]
	}
	return args[0], args[1:]
}

// referenceVersion is that of the reference plugins for which Tombolo stands.
const referenceVersion = "v1.9.1"

// introduce says what a plugin is that somebody called by hand, as the reference plugins do. From a line
// of this form nerdctl learns what the plugin firewall can do: with no version, it isolates no networks.
func introduce(out io.Writer, name string) int {
	fmt.Fprintf(out, "CNI %s plugin %s\nby Tombolo; a container runtime calls it, which sets CNI_COMMAND\nCNI protocol versions supported: %s\n",
		name, referenceVersion, strings.Join(cni.SupportedVersions(), ", "))
	return 0
}
