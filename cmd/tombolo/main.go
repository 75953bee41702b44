// Command tombolo is the operator's command: see tombolo help. The CNI plugin is tombolo-cni.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/signal"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/network"
)

func main() {
	if os.Getenv("CNI_COMMAND") != "" {
		fmt.Println(misplaced)
		os.Exit(exitFailed)
	}
	debug.SetGCPercent(collectAt)
	os.Exit(operator(os.Args[1:]))
}

// collectAt is the percentage for debug.SetGCPercent. The heap may grow to five times its live size before a garbage
// collection, since a command ends before its heap is large. With the default, collections take a tenth of the CPU
// time of a repair of 200 pods.
const collectAt = 400

// misplaced is the CNI error for a runtime that started this command instead of the plugin.
const misplaced = `{"cniVersion":"1.1.0","code":4,"msg":"this file is the operator's command tombolo, and no CNI ` +
	`plugin: tombolo-cni belongs here, by the name tombolo; sudo tombolo install DIR puts it there"}`

const (
	exitFailed   = 1
	exitUsage    = 2
	exitAttached = 3
	exitFound    = 4
)

// findingsError is the error of a command that did its work and found something. It leads to the exit status exitFound.
type findingsError string

func (f findingsError) Error() string { return string(f) }

// errUsage marks an error in the command line itself. It leads to the exit status exitUsage.
var errUsage = errors.New("the command line is wrong")

// operator runs a command and returns the exit status. If the reader of the command's output, such as head, ends
// early, the command still does all its work.
func operator(args []string) int {
	signal.Ignore(unix.SIGPIPE)
	o := &options{out: printable.Writer(pipeWriter{os.Stdout}), stderr: printable.Writer(os.Stderr)}
	root := o.root()
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(context.Background())
	switch {
	case err == nil:
		return 0
	case !o.parsed || errors.Is(err, errUsage):
		fmt.Fprintf(o.stderr, "tombolo: %s\nsee %s --help\n", strings.TrimSpace(err.Error()), cmd.CommandPath())
		return exitUsage
	}

	text := printable.Line(err.Error())
	if errors.Is(err, fs.ErrPermission) {
		text += ": run it as root; it needs CAP_NET_ADMIN and CAP_SYS_ADMIN"
	}

	fmt.Fprintln(os.Stderr, "tombolo:", text)
	switch {
	case errors.Is(err, network.ErrAttached):
		return exitAttached
	case errors.As(err, new(findingsError)):
		return exitFound
	}

	return exitFailed
}

// pipeWriter is a writer that ignores EPIPE, the error after its reader has ended.
type pipeWriter struct{ to io.Writer }

func (u pipeWriter) Write(p []byte) (int, error) {
	n, err := u.to.Write(p)
	if errors.Is(err, unix.EPIPE) {
		return len(p), nil
	}
	return n, err
}

// options holds the common options of all commands, and their outputs.
type options struct {
	out, stderr   io.Writer
	state, leases string
	json          bool
	parsed        bool // the command line is valid, so later errors come from the command's work
}

// root returns the command tombolo with all its subcommands.
func (o *options) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "tombolo",
		Short: "pods on a Linux bridge",
		Long: "tombolo looks after pods on a Linux bridge, which the CNI plugin tombolo-cni puts there.\n\n" +
			"Most commands need root, or CAP_NET_ADMIN and CAP_SYS_ADMIN. POD is any of what ls prints: a pod's " +
			"name, with or\n" +
			"without its namespace, the beginning of a container ID, a port, an interface or an address.\n\n" +
			"Exit status: 0 success, 1 failure, 2 the command line is wrong, 3 pods still use it (remove, uplink " +
			"restore),\n" +
			"4 the command found something (status, check, repair, gc, doctor, uplink status, validate).",
		Version:          thisVersion().Version,
		SilenceErrors:    true,
		SilenceUsage:     true,
		PersistentPreRun: func(*cobra.Command, []string) { o.parsed = true },
	}

	root.SetOut(o.out)
	root.SetFlagErrorFunc(badFlag)
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp)
	flags := root.PersistentFlags()
	flags.StringVar(&o.state, "state", network.DefaultStateDir, "use this state `DIR`, the configuration's stateDir")
	flags.StringVar(&o.leases, "leases", lease.DefaultDir, "use this lease `DIR`, the configuration's leaseDir")
	add := func(title string, commands ...*cobra.Command) {
		root.AddGroup(&cobra.Group{ID: title, Title: title})
		for _, c := range commands {
			c.GroupID = title
		}
		root.AddCommand(commands...)
	}

	add("Show the state, and what is wrong:", o.statusCommand(), o.lsCommand(), o.leasesCommand(), o.checkCommand(),
		o.doctorCommand(), o.bugreportCommand())
	add("Repair and delete:", o.repairCommand(), o.gcCommand(), o.removeCommand())
	add("Set up:", o.initCommand(), o.installCommand(), o.validateCommand(), o.uplinkCommand(), o.versionCommand())
	return root
}

// command returns a command that calls run. use consists of the command's name and its arguments, such as "remove
// NETWORK", "ls [POD]" or "validate FILE...". takeNamed checks the number of arguments.
func command(use, short, long string, run func(context.Context, []string) error) *cobra.Command {
	const width = 118
	return &cobra.Command{
		Use: use, Short: short, Long: strings.Join(printable.Fold(long, width), "\n"), Args: takeNamed,
		RunE: func(cmd *cobra.Command, args []string) error { return run(cmd.Context(), args) },
	}
}

// takeNamed returns an error unless a command gets as many arguments as its usage names. Arguments in brackets may be
// missing, and "..." permits more.
func takeNamed(cmd *cobra.Command, args []string) error {
	names := strings.Fields(cmd.Use)[1:]
	required := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return name[0] == '[' })
	isList := strings.HasSuffix(cmd.Use, "...")
	if len(args) >= len(required) && (isList || len(args) <= len(names)) {
		return nil
	}
	return fmt.Errorf("%s takes %s; given: %s", cmd.CommandPath(), cmp.Or(strings.Join(names, " "), "no arguments"),
		cmp.Or(strings.Join(args, " "), "none"))
}

// group returns a command that has only subcommands.
func group(use, short, long string, commands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Long: long,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.Args = func(_ *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		return fmt.Errorf("unknown command %q for %q%s", args[0], cmd.CommandPath(),
			didYouMean(args[0], cmd.SuggestionsFor(args[0])))
	}

	cmd.SuggestionsMinimumDistance = 2 // in edits of the misspelt name; cobra sets it for the root command only
	cmd.AddCommand(commands...)
	return cmd
}

// didYouMean returns a question about the known name with the closest spelling, or "" if none is close.
func didYouMean(name string, names []string) string {
	if near := strict.Nearest(name, names); near != "" && near != name {
		return fmt.Sprintf(": did you mean %s?", near)
	}
	return ""
}

// badFlag adds a question about the flag with the closest spelling to an error about an unknown flag.
func badFlag(cmd *cobra.Command, err error) error {
	var unknown interface{ GetSpecifiedName() string } // of package pflag: an unknown flag, or a missing value
	if !errors.As(err, &unknown) {
		return err
	}
	flags := regexp.MustCompile(`--[a-z-]+`).FindAllString(cmd.Flags().FlagUsages(), -1)
	return fmt.Errorf("%w%s", err, didYouMean("--"+unknown.GetSpecifiedName(), flags))
}

// withJSON adds the flag --json to a command.
func (o *options) withJSON(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().BoolVar(&o.json, "json", false, "print JSON")
	return cmd
}

// print prints text. With the flag --json it prints value instead.
func (o *options) print(text string, value any) error {
	if o.json {
		return json.NewEncoder(o.out).Encode(value)
	}
	_, err := io.WriteString(o.out, text)
	return err
}

// done returns err, the error of a command's work. If there is none, it prints text.
func (o *options) done(err error, text string) error {
	if err != nil {
		return err
	}
	return o.print(text, nil)
}

// answer prints text or value like print. If the third argument is true, the command has found something, and answer
// returns err.
func (o *options) answer(text string, value any, is bool, err findingsError) error {
	if printErr := o.print(text, value); printErr != nil || !is {
		return printErr
	}
	return err
}

// warn prints a line to stderr, for messages that are not part of the command's output.
func (o *options) warn(text string) { fmt.Fprintln(o.stderr, "tombolo:", printable.Line(text)) }

// open opens the node whose directories the flags name.
func (o *options) open(ctx context.Context) (*network.Node, error) {
	return report.Open(ctx, &network.Config{StateDir: o.state, LeaseDir: o.leases})
}

// nodeCommand returns a command that opens the node and calls do with it.
func (o *options) nodeCommand(use, short, long string,
	do func(context.Context, *network.Node, []string) error) *cobra.Command {
	return command(use, short, long, func(ctx context.Context, args []string) error {
		node, err := o.open(ctx)
		if err != nil {
			return err
		}
		return do(ctx, node, args)
	})
}

// optional returns the argument with the index i, or "" if it is missing.
func optional(args []string, i int) string {
	if i < len(args) {
		return args[i]
	}
	return ""
}

// completeNetworks and completeLinks are completions of arguments for shells.

func (o *options) completeNetworks(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	node, err := o.open(cmd.Context())
	if err != nil || len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	names, _ := node.Networks(cmd.Context())
	return names, cobra.ShellCompDirectiveNoFileComp
}

func completeLinks(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	var names []string
	links, _ := net.Interfaces()
	for i := 0; i < len(links) && len(args) < 2; i++ {
		names = append(names, links[i].Name)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
