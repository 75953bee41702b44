//go:debug updatemaxprocs=0

// Command tombolo-cni is the CNI plugin. A container runtime starts it by the name tombolo in the runtime's directory
// of plugins. Under the name of a reference plugin, such as loopback, it does the work of that plugin. netavark, the
// network program of podman 5, starts it with a verb as an argument. The operator's command is tombolo.
package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/cmd/tombolo-cni/internal/netavark"
	"github.com/tombolo-cni/tombolo/internal/cni"
)

func main() {
	prepare()
	path, args := calledAs(os.Args)
	if os.Getenv("CNI_COMMAND") == "" {
		if status, called := netavark.Run(args, os.Stdin, os.Stdout); called {
			os.Exit(status)
		}
		os.Exit(introduce(os.Stderr, filepath.Base(path), args))
	}

	plugin := &cni.Plugin{
		Getenv: os.Getenv,
		Stdin:  os.Stdin,
		Stdout: os.Stdout,
		Name:   filepath.Base(path),
		Kept:   cni.Kept(path),
		Exit:   os.Exit,
	}

	os.Exit(plugin.Run())
}

// calledAs returns the path of the plugin that the runtime called, and the remaining arguments. A file created by
// `tombolo install` starts the program as "tombolo as /opt/cni/bin/bridge": the path is then /opt/cni/bin/bridge.
func calledAs(args []string) (path string, rest []string) {
	if len(args) > 2 && args[1] == cni.As {
		return args[2], args[3:]
	}
	return args[0], args[1:]
}

// referenceVersion is the version of the reference plugins that Tombolo replaces.
const referenceVersion = "v1.9.1"

// introduce prints an explanation for a user who started the plugin by hand, as the reference plugins do. It returns
// the exit status, which is 2 if there are arguments. nerdctl reads the version of the plugin firewall from the first
// line, and without a version would not isolate networks.
func introduce(out io.Writer, name string, args []string) int {
	if len(args) > 0 {
		fmt.Fprintf(out, "%s: this is the CNI plugin, which a container runtime calls; the operator's command is "+
			"tombolo, in /usr/local/bin or /usr/bin: tombolo %s\n", name, strings.Join(args, " "))
		return 2
	}

	version := ""
	if slices.Contains(cni.Names(), name) {
		version = " " + referenceVersion
	}

	fmt.Fprintf(out, "CNI %s plugin%s\nby Tombolo; a container runtime calls it, which sets CNI_COMMAND; the "+
		"operator's command is tombolo: tombolo help\nCNI protocol versions supported: %s\n",
		name, version, strings.Join(cni.SupportedVersions(), ", "))
	return 0
}
