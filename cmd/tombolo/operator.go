package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/internal/demo"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/network"
)

const usage = `tombolo puts pods on a Linux bridge. Container runtimes run it as a CNI plugin.

usage:
  tombolo version [--json]            version, commit, Go and the CNI versions that are spoken
  tombolo ls [--json] [--state DIR]   the pods on this node: addresses, host ports, limits, and
                                      what of them is not as it was made
  tombolo check [--json] [--state DIR]
                                      what differs from the records: in the kernel, in the pods,
                                      in the rules of other firewalls
  tombolo repair [--state DIR]        put it right: rules, elements, bridges, ports, limits
  tombolo leases [--json] [--leases DIR]
                                      what pods have leased by DHCP, until when, and what is wrong
  tombolo remove [--state DIR] NETWORK
                                      take a network down that has no attachments left:
                                      rules, gateways, record, and the bridge if it is empty
  tombolo uplink plan [--keep-address] [--timeout 5s] NIC BRIDGE
                                      say in words how a NIC would become a port of a bridge,
                                      which takes over its addresses and routes
  tombolo uplink take [--keep-address] [--timeout 5s] [--state DIR] [--leases DIR] NIC BRIDGE
                                      do it, as the first ADD of a network with this uplink would
  tombolo uplink restore [--state DIR] [--leases DIR] NIC [BRIDGE]
                                      give the NIC back what it had
  tombolo uplink status [--json] [--state DIR] [--leases DIR] [NIC]
                                      the NICs that are taken over, and what is not as it was
  tombolo demo [--pods N]             five pods in a sandbox of their own, in a few seconds
  tombolo help                        this text

DIR is the stateDir of the network's configuration, /run/tombolo by default; that of
leases is its leaseDir, /var/lib/tombolo/leases.

exit status:
  0  done
  1  it failed; stderr says why
  2  the command line is wrong
  3  remove, uplink restore: there are still attachments
  4  check, uplink status: something differs
`

const (
	exitFailed   = 1
	exitUsage    = 2
	exitAttached = 3
	exitDiffers  = 4
)

// errDiffers says that check found something.
var errDiffers = errors.New("not all is as it should be: tombolo repair mends what differs on the host; what differs in a pod comes back when the pod is made again, and what another firewall stops is up to its owner")

// errUsage is the cause of an error about the command line itself.
var errUsage = errors.New("see tombolo help")

// operator runs one command of the operator's and gives the exit status.
func operator(args []string) int {
	err := run(args, printable.Writer(os.Stdout))
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errUsage):
		fmt.Fprintln(os.Stderr, "tombolo:", printable.Line(err.Error()))
		return exitUsage
	}
	fmt.Fprintln(os.Stderr, "tombolo:", printable.Line(err.Error()))
	switch {
	case errors.Is(err, network.ErrAttached):
		return exitAttached
	case errors.Is(err, errDiffers):
		return exitDiffers
	}
	return exitFailed
}

func run(args []string, out io.Writer) error {
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, usage)
		return fmt.Errorf("no command: %w", errUsage)
	}
	name, rest := args[0], args[1:]
	if name == "-h" || name == "--help" {
		name = "help"
	}
	if name == "uplink" {
		return runUplink(rest, out)
	}
	flags := flag.NewFlagSet("tombolo "+name, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	asJSON := flags.Bool("json", false, "")
	stateDir := flags.String("state", network.DefaultStateDir, "")
	leaseDir := flags.String("leases", lease.DefaultDir, "")
	pods := flags.Int("pods", 5, "")
	if err := flags.Parse(rest); err != nil {
		return fmt.Errorf("%s: %w: %w", name, err, errUsage)
	}
	arguments := map[string]int{"version": 0, "ls": 0, "check": 0, "repair": 0, "leases": 0, "remove": 1, "demo": 0, "help": 0}
	want, known := arguments[name]
	if !known {
		return fmt.Errorf("no command %q: %w", name, errUsage)
	}
	if flags.NArg() != want {
		return fmt.Errorf("%s: %d arguments, where %d are due: %w", name, flags.NArg(), want, errUsage)
	}
	switch name {
	case "version":
		return printVersion(out, *asJSON)
	case "ls":
		return list(out, *stateDir, *asJSON)
	case "check":
		return check(out, *stateDir, *asJSON)
	case "repair":
		return onNode(*stateDir, "", func(ctx context.Context, node *network.Node) error { return node.Repair(ctx) })
	case "leases":
		return leases(out, *leaseDir, *asJSON)
	case "remove":
		return onNode(*stateDir, "", func(ctx context.Context, node *network.Node) error { return node.Remove(ctx, flags.Arg(0)) })
	case "demo":
		return demo.Run(context.Background(), out, *pods)
	}
	_, err := fmt.Fprint(out, usage)
	return err
}

// onNode does something with the node's networks.
func onNode(stateDir, leaseDir string, do func(context.Context, *network.Node) error) error {
	ctx := context.Background()
	node, err := network.Open(ctx, &network.Config{StateDir: stateDir, LeaseDir: leaseDir})
	if err != nil {
		return err
	}
	return do(ctx, node)
}

func printVersion(out io.Writer, asJSON bool) error {
	v := struct {
		Version string   `json:"version"`
		Commit  string   `json:"commit"`
		Go      string   `json:"go"`
		CNI     []string `json:"cni"`
	}{"unknown", "unknown", runtime.Version(), cni.SupportedVersions()}
	// The go command stamps both from git.
	if info, ok := debug.ReadBuildInfo(); ok {
		v.Version = info.Main.Version
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				v.Commit = s.Value
			}
		}
	}
	if asJSON {
		return json.NewEncoder(out).Encode(v)
	}
	_, err := fmt.Fprintf(out, "tombolo %s (commit %s, %s, %s/%s)\nCNI %s\n",
		v.Version, v.Commit, v.Go, runtime.GOOS, runtime.GOARCH, strings.Join(v.CNI, ", "))
	return err
}
