package main

import (
	"context"
	"flag"
	"io"
	"time"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/demo"
	"github.com/tombolo-cni/tombolo/network"
)

// commands is the table of all, in the order of tombolo help. Its flags begin with those
// that several commands share: jsonFlag, stateFlag, leasesFlag.
func commands() []command {
	attached := []status{{exitAttached, "there are still attachments"}}
	differs := []status{{exitDiffers, "something differs"}}
	return []command{
		{name: "version", summary: "version, commit, Go and the CNI versions that are spoken",
			setup: func(flags *flag.FlagSet) runner {
				asJSON := jsonFlag(flags)
				return func(_ context.Context, out io.Writer, _ []string) error { return printVersion(out, *asJSON) }
			}},
		{name: "ls", summary: "the pods on this node: addresses, host ports, limits, and what of them is not as it was made",
			privileged: true,
			setup: func(flags *flag.FlagSet) runner {
				asJSON, state := jsonFlag(flags), stateFlag(flags)
				return func(ctx context.Context, out io.Writer, _ []string) error { return list(ctx, out, *state, *asJSON) }
			}},
		{name: "check", summary: "what differs from the records: in the kernel, in the pods, in the rules of other firewalls",
			privileged: true, statuses: differs,
			setup: func(flags *flag.FlagSet) runner {
				asJSON, state := jsonFlag(flags), stateFlag(flags)
				each := flags.Bool("v", false, "a line for each difference, not for each cause")
				return func(ctx context.Context, out io.Writer, _ []string) error {
					return check(ctx, out, *state, *asJSON, *each)
				}
			}},
		{name: "repair", summary: "put right what check calls [repair], and say what that was and what is left",
			privileged: true, statuses: differs,
			setup: func(flags *flag.FlagSet) runner {
				state := stateFlag(flags)
				return func(ctx context.Context, out io.Writer, _ []string) error { return repair(ctx, out, *state) }
			}},
		{name: "gc", args: "[NETWORK]",
			summary:    "reclaim what pods hold that died without a DEL: their port is gone, and so is their namespace",
			privileged: true, statuses: []status{{exitDiffers, "some are kept; the output says why"}},
			setup: func(flags *flag.FlagSet) runner {
				asJSON, state := jsonFlag(flags), stateFlag(flags)
				dryRun := flags.Bool("dry-run", false, "print what it would reclaim, and change nothing")
				return func(ctx context.Context, out io.Writer, args []string) error {
					return collectDead(ctx, out, *state, optional(args, 0), *dryRun, *asJSON)
				}
			}},
		{name: "doctor", args: "[POD]", summary: "why a pod has no network: each step of its way that fails, what shows it, and what helps",
			privileged: true, statuses: []status{{exitDiffers, "something was found"}}, setup: doctorCommand},
		{name: "leases", summary: "what pods have leased by DHCP, until when, and what is wrong",
			setup: func(flags *flag.FlagSet) runner {
				asJSON, dir := jsonFlag(flags), leasesFlag(flags)
				return func(_ context.Context, out io.Writer, _ []string) error { return leases(out, *dir, *asJSON) }
			}},
		{name: "remove", args: "NETWORK",
			summary:    "take a network down that has no attachments left: rules, gateways, record, and the bridge if it is empty",
			privileged: true, statuses: attached,
			setup: func(flags *flag.FlagSet) runner {
				state := stateFlag(flags)
				return func(ctx context.Context, _ io.Writer, args []string) error { return remove(ctx, *state, args[0]) }
			}},
		{name: "uplink plan", args: "NIC BRIDGE",
			summary:    "say in words how a NIC would become a port of a bridge, which takes over its addresses and routes",
			privileged: true,
			setup: func(flags *flag.FlagSet) runner {
				u, state := uplinkFlags(flags), stateFlag(flags)
				return func(ctx context.Context, out io.Writer, args []string) error {
					return onNode(ctx, *state, "", func(node *network.Node) error { return planUplink(ctx, node, out, u(args)) })
				}
			}},
		{name: "uplink take", args: "NIC BRIDGE", summary: "do it, as the first ADD of a network with this uplink would",
			privileged: true,
			setup: func(flags *flag.FlagSet) runner {
				u, state, dir := uplinkFlags(flags), stateFlag(flags), leasesFlag(flags)
				return func(ctx context.Context, out io.Writer, args []string) error {
					return onNode(ctx, *state, *dir, func(node *network.Node) error { return takeUplink(ctx, node, out, u(args)) })
				}
			}},
		{name: "uplink restore", args: "NIC [BRIDGE]", summary: "give the NIC back what it had",
			privileged: true, statuses: attached,
			setup: func(flags *flag.FlagSet) runner {
				state, dir := stateFlag(flags), leasesFlag(flags)
				return func(ctx context.Context, out io.Writer, args []string) error {
					return onNode(ctx, *state, *dir, func(node *network.Node) error {
						return restoreUplink(ctx, node, out, args[0], optional(args, 1))
					})
				}
			}},
		{name: "uplink status", args: "[NIC]", summary: "the NICs that are taken over, and what is not as it was",
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
			summary:  "all that is wrong with configurations, and what the first ADD of each would do, without doing it",
			statuses: []status{{exitDiffers, "something is wrong with one; the output says what"}},
			setup: func(*flag.FlagSet) runner {
				return func(_ context.Context, out io.Writer, args []string) error { return validate(out, args) }
			}},
		{name: "install", args: "DIR",
			summary: "put this program into a directory of plugins; with --names also by those of the reference plugins, which it keeps",
			setup: func(flags *flag.FlagSet) runner {
				names := flags.String("names", "", "by these `NAMES` too: bridge,portmap, say, or all")
				undo := flags.Bool("undo", false, "take the names away, --names or all of them, and put back what was there")
				return func(_ context.Context, out io.Writer, args []string) error {
					return installNames(out, args[0], *names, *undo)
				}
			}},
		{name: "demo", summary: "five pods in a sandbox of their own, in a few seconds",
			setup: func(flags *flag.FlagSet) runner {
				pods := flags.Int("pods", 5, "`N` pods")
				return func(ctx context.Context, out io.Writer, _ []string) error { return demo.Run(ctx, out, *pods) }
			}},
		{name: "help", args: "[COMMAND...]", summary: "this text, or what there is to know of a command", setup: help},
	}
}

// uplinkFlags declares what a takeover can be told, and gives it for NIC and BRIDGE.
func uplinkFlags(flags *flag.FlagSet) func(args []string) uplink.Uplink {
	keep := flags.Bool("keep-address", false, "leave the NIC its addresses too, for programs that look there")
	timeout := flags.Duration("timeout", 5*time.Second, "the `TIME` that the gateway has to answer through the bridge")
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
