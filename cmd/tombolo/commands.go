package main

import (
	"context"
	"flag"
	"io"
	"time"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/demo"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/install"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/network"
)

// commands is the table of all, in the order of tombolo help. Its flags begin with those
// that several commands share: jsonFlag, stateFlag, leasesFlag.
func commands() []command {
	attached := []status{{exitAttached, "pods still use it"}}
	differs := []status{{exitDiffers, "something differs"}}
	return []command{
		{name: "version", summary: "print the version, the commit, the Go release and the supported CNI versions",
			setup: func(flags *flag.FlagSet) runner {
				asJSON := jsonFlag(flags)
				return func(_ context.Context, out io.Writer, _ []string) error { return printVersion(out, *asJSON) }
			}},
		{name: "ls", args: "[POD]", summary: "list the pods on this node with their addresses, host ports and limits, and what has changed since they were added",
			privileged: true,
			setup: func(flags *flag.FlagSet) runner {
				asJSON, state, only := jsonFlag(flags), stateFlag(flags), report.Selection{}
				flags.StringVar(&only.Network, "network", "", "list only the pods of this `NETWORK`")
				flags.StringVar(&only.Pod, "pod", "", "list only the pods named `NAMESPACE/NAME`, or NAME in any namespace; * and ? are wildcards")
				return func(ctx context.Context, out io.Writer, args []string) error {
					only.Name = optional(args, 0)
					return list(ctx, out, *state, only, *asJSON)
				}
			}},
		{name: "networks", args: "[NETWORK]", summary: "list the networks on record with their bridges, subnets, gateways and uplinks, how full their pools are, and which host port leads to which pod",
			setup: func(flags *flag.FlagSet) runner {
				asJSON, state := jsonFlag(flags), stateFlag(flags)
				return func(ctx context.Context, out io.Writer, args []string) error {
					return networks(ctx, out, *state, optional(args, 0), *asJSON)
				}
			}},
		{name: "map", summary: "draw this node: uplinks, bridges, networks, and pods with their addresses and host ports; what check finds wrong is red",
			privileged: true,
			setup: func(flags *flag.FlagSet) runner {
				state, svg := stateFlag(flags), flags.Bool("svg", false, "draw an SVG image instead, and print it")
				return func(ctx context.Context, out io.Writer, _ []string) error { return picture(ctx, out, *state, *svg) }
			}},
		{name: "check", summary: "compare bridges, pods and firewalls with what was set up, and list what differs and what repairs it",
			privileged: true, statuses: differs,
			setup: func(flags *flag.FlagSet) runner {
				asJSON, state := jsonFlag(flags), stateFlag(flags)
				each := flags.Bool("v", false, "print one line for each difference, not one for each cause")
				return func(ctx context.Context, out io.Writer, _ []string) error {
					return check(ctx, out, *state, *asJSON, *each)
				}
			}},
		{name: "repair", summary: "repair everything that check marks [repair], and print what was repaired and what is left",
			privileged: true, statuses: differs,
			setup: func(flags *flag.FlagSet) runner {
				state := stateFlag(flags)
				return func(ctx context.Context, out io.Writer, _ []string) error { return repair(ctx, out, *state) }
			}},
		{name: "gc", args: "[NETWORK]",
			summary:    "clean up after pods that died without a DEL: release their addresses and host ports",
			privileged: true, statuses: []status{{exitDiffers, "some could not be cleaned up; the output says why"}},
			setup: func(flags *flag.FlagSet) runner {
				asJSON, state := jsonFlag(flags), stateFlag(flags)
				dryRun := flags.Bool("dry-run", false, "only print what would be cleaned up")
				return func(ctx context.Context, out io.Writer, args []string) error {
					return collectDead(ctx, out, *state, optional(args, 0), *dryRun, *asJSON)
				}
			}},
		{name: "doctor", args: "[POD]", summary: "find out why a pod has no network: test each step from the pod to the outside, and print each that fails, the evidence, and what helps",
			privileged: true, statuses: []status{{exitDiffers, "a problem was found"}}, setup: doctorCommand},
		{name: "leases", summary: "list the DHCP leases of pods, when they expire, and what is wrong with them",
			setup: func(flags *flag.FlagSet) runner {
				asJSON, dir := jsonFlag(flags), leasesFlag(flags)
				return func(_ context.Context, out io.Writer, _ []string) error { return leases(out, *dir, *asJSON) }
			}},
		{name: "remove", args: "NETWORK",
			summary:    "delete a network that has no pods left: its rules, gateways and record, and its bridge if nothing else uses it",
			privileged: true, statuses: attached,
			setup: func(flags *flag.FlagSet) runner {
				state := stateFlag(flags)
				return func(ctx context.Context, _ io.Writer, args []string) error { return remove(ctx, *state, args[0]) }
			}},
		{name: "uplink plan", args: "NIC BRIDGE",
			summary:    "print how a NIC would become a port of a bridge, which takes over its addresses and routes; change nothing",
			privileged: true,
			setup: func(flags *flag.FlagSet) runner {
				u, state := uplinkFlags(flags), stateFlag(flags)
				return func(ctx context.Context, out io.Writer, args []string) error {
					return onNode(ctx, *state, "", func(node *network.Node) error { return planUplink(ctx, node, out, u(args)) })
				}
			}},
		{name: "uplink take", args: "NIC BRIDGE", summary: "make a NIC a port of a bridge, as the first ADD of a network with this uplink does",
			privileged: true,
			setup: func(flags *flag.FlagSet) runner {
				u, state, dir := uplinkFlags(flags), stateFlag(flags), leasesFlag(flags)
				id := flags.String("client-id", "", "the `ID` of the DHCP client that leased the host's address: mac, none, or in hexadecimal")
				return func(ctx context.Context, out io.Writer, args []string) error {
					want := u(args)
					want.ClientID = *id
					return onNode(ctx, *state, *dir, func(node *network.Node) error { return takeUplink(ctx, node, out, want) })
				}
			}},
		{name: "uplink restore", args: "NIC [BRIDGE]", summary: "take a NIC off its bridge, and give it its addresses and routes back",
			privileged: true, statuses: attached,
			setup: func(flags *flag.FlagSet) runner {
				state, dir := stateFlag(flags), leasesFlag(flags)
				return func(ctx context.Context, out io.Writer, args []string) error {
					return onNode(ctx, *state, *dir, func(node *network.Node) error {
						return restoreUplink(ctx, node, out, args[0], optional(args, 1))
					})
				}
			}},
		{name: "uplink status", args: "[NIC]", summary: "list the NICs that were made ports of a bridge, and what has changed since",
			privileged: true, statuses: differs,
			setup: func(flags *flag.FlagSet) runner {
				asJSON, state, dir := jsonFlag(flags), stateFlag(flags), leasesFlag(flags)
				return func(ctx context.Context, out io.Writer, args []string) error {
					return onNode(ctx, *state, *dir, func(node *network.Node) error {
						return uplinkStatus(ctx, node, out, optional(args, 0), *asJSON)
					})
				}
			}},
		{name: "validate", args: "FILE...",
			summary:  "print everything that is wrong with configuration files, or what the first ADD of each would do; change nothing",
			statuses: []status{{exitDiffers, "a file is invalid; the output says why"}},
			setup: func(*flag.FlagSet) runner {
				return func(_ context.Context, out io.Writer, args []string) error { return validate(out, args) }
			}},
		{name: "install", args: "DIR",
			summary: "put the plugin into a directory of CNI plugins; with --names, also under the names of the reference plugins, which are kept",
			setup: func(flags *flag.FlagSet) runner {
				names := flags.String("names", "", "also install it under these `NAMES`, such as bridge,portmap, or all")
				undo := flags.Bool("undo", false, "remove these names, or all of them, and put back what was there")
				return func(_ context.Context, out io.Writer, args []string) error {
					return installNames(out, args[0], *names, *undo)
				}
			}},
		{name: "demo", summary: "set up five pods in a sandbox and show that they reach each other; this takes a few seconds",
			setup: func(flags *flag.FlagSet) runner {
				pods := flags.Int("pods", 5, "run this `NUMBER` of pods")
				return func(ctx context.Context, out io.Writer, _ []string) error {
					plugin, err := install.Plugin()
					if err != nil {
						return err
					}
					return demo.Run(ctx, out, plugin, *pods)
				}
			}},
		{name: "help", args: "[COMMAND...]", summary: "print this text, or the help of one command", setup: help},
	}
}

// uplinkFlags declares what a takeover can be told, and gives it for NIC and BRIDGE.
func uplinkFlags(flags *flag.FlagSet) func(args []string) uplink.Uplink {
	keep := flags.Bool("keep-address", false, "leave the addresses on the NIC too, for programs that look for them there")
	timeout := flags.Duration("timeout", 5*time.Second, "wait this `TIME` for the gateway to answer through the bridge")
	return func(args []string) uplink.Uplink {
		return uplink.Uplink{NIC: args[0], Bridge: args[1], KeepAddress: *keep, Timeout: *timeout}
	}
}

// optional is an argument that may be missing.
func optional(args []string, i int) string {
	if i < len(args) {
		return args[i]
	}
	return ""
}
