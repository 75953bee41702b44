// Command tombolo is the operator's: see tombolo help. The CNI plugin is tombolo-cni.
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
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/network"
)

func main() {
	if os.Getenv("CNI_COMMAND") != "" {
		os.Exit(misplaced(os.Stdout))
	}
	debug.SetGCPercent(collectAt)
	os.Exit(operator(os.Args[1:]))
}

// collectAt has the heap grow to five times what is in use before it is collected. A command ends before it has much, and
// of a repair of 200 pods the collector's default takes a tenth of the CPU time.
const collectAt = 400

// misplaced tells a runtime, in the way of CNI, that the file which it started is the wrong one.
func misplaced(out io.Writer) int {
	versions := cni.SupportedVersions()
	_ = json.NewEncoder(out).Encode(struct {
		CNIVersion string `json:"cniVersion"`
		types.Error
	}{versions[len(versions)-1], types.Error{
		Code: types.ErrInvalidEnvironmentVariables,
		Msg:  "this file is the operator's command tombolo, and no CNI plugin: tombolo-cni belongs here, by the name tombolo; sudo tombolo install DIR puts it there",
	}})
	return 1
}

const (
	exitFailed   = 1
	exitUsage    = 2
	exitAttached = 3
	exitFound    = 4
)

// found is the end of a command that did its work and found something: its exit status says so.
type found string

func (f found) Error() string { return string(f) }

// errUsage is the cause of an error about the command line itself.
var errUsage = errors.New("the command line is wrong")

// operator runs a command of the operator's and gives the exit status. A command whose output
// is read no more, as by head, does all its work.
func operator(args []string) int {
	signal.Ignore(unix.SIGPIPE)
	o := &options{out: printable.Writer(unread{os.Stdout}), stderr: printable.Writer(os.Stderr)}
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
	case errors.As(err, new(found)):
		return exitFound
	}
	return exitFailed
}

// unread is a writer whose reader may end before the work does.
type unread struct{ to io.Writer }

func (u unread) Write(p []byte) (int, error) {
	n, err := u.to.Write(p)
	if errors.Is(err, unix.EPIPE) {
		return len(p), nil
	}
	return n, err
}

// options are those that several commands share, and where they write to.
type options struct {
	out, stderr   io.Writer
	state, leases string
	json          bool
	parsed        bool // the command line is right: what goes wrong now is the command's
}

// root is the command without a name, which has all others.
func (o *options) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "tombolo",
		Short: "pods on a Linux bridge",
		Long: "tombolo looks after pods on a Linux bridge, which the CNI plugin tombolo-cni puts there.\n\n" +
			"Most commands need root, or CAP_NET_ADMIN and CAP_SYS_ADMIN. POD is any of what ls prints: a pod's name, with or\n" +
			"without its namespace, the beginning of a container ID, a port, an interface or an address.\n\n" +
			"Exit status: 0 success, 1 failure, 2 the command line is wrong, 3 pods still use it (remove, uplink restore),\n" +
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
	for _, g := range []struct {
		title    string
		commands []*cobra.Command
	}{
		{"See what there is, and what is wrong:", []*cobra.Command{o.statusCommand(), o.lsCommand(), o.leasesCommand(), o.checkCommand(), o.doctorCommand(), o.bugreportCommand()}},
		{"Put it right:", []*cobra.Command{o.repairCommand(), o.gcCommand(), o.removeCommand()}},
		{"Set it up:", []*cobra.Command{o.initCommand(), o.installCommand(), o.validateCommand(), o.uplinkCommand(), o.versionCommand()}},
	} {
		root.AddGroup(&cobra.Group{ID: g.title, Title: g.title})
		for _, c := range g.commands {
			c.GroupID = g.title
		}
		root.AddCommand(g.commands...)
	}
	return root
}

// takes has a command take from least to most arguments, of which its line of use has the names; -1 is any number.
func takes(least, most int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) >= least && (most < 0 || len(args) <= most) {
			return nil
		}
		_, names, _ := strings.Cut(cmd.Use, " ")
		return fmt.Errorf("%s takes %s; given: %s", cmd.CommandPath(), cmp.Or(names, "no arguments"), cmp.Or(strings.Join(args, " "), "none"))
	}
}

// group is a command that does nothing but have others.
func group(use, short, long string, commands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Long: long, RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.Args = func(_ *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		return fmt.Errorf("unknown command %q for %q%s", args[0], cmd.CommandPath(), meant(args[0], cmd.SuggestionsFor(args[0])))
	}
	cmd.SuggestionsMinimumDistance = 2 // as cobra has it for the root
	cmd.AddCommand(commands...)
	return cmd
}

// meant asks for a name that is spelt nearly alike.
func meant(name string, names []string) string {
	if near := strict.Nearest(name, names); near != "" && near != name {
		return fmt.Sprintf(": did you mean %s?", near)
	}
	return ""
}

// badFlag asks for the flag that was meant.
func badFlag(cmd *cobra.Command, err error) error {
	var unknown interface{ GetSpecifiedName() string } // of pflag
	if !errors.As(err, &unknown) {
		return err
	}
	flags := regexp.MustCompile(`--[a-z-]+`).FindAllString(cmd.Flags().FlagUsages(), -1)
	return fmt.Errorf("%w%s", err, meant("--"+unknown.GetSpecifiedName(), flags))
}

// jsonFlag gives a command the choice of JSON.
func (o *options) jsonFlag(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&o.json, "json", false, "print JSON")
}

// print prints a text, or what it is of as JSON.
func (o *options) print(text string, value any) error {
	if o.json {
		return json.NewEncoder(o.out).Encode(value)
	}
	_, err := io.WriteString(o.out, text)
	return err
}

// answer is print, and ends with the error if something was found.
func (o *options) answer(text string, value any, is bool, err found) error {
	if printErr := o.print(text, value); printErr != nil || !is {
		return printErr
	}
	return err
}

// warn says on stderr what is no part of the answer.
func (o *options) warn(text string) { fmt.Fprintln(o.stderr, "tombolo:", printable.Line(text)) }

// open opens the node to look at it.
func (o *options) open(ctx context.Context) (*network.Node, error) {
	return report.Open(ctx, &network.Config{StateDir: o.state, LeaseDir: o.leases})
}

// onNode is the work of a command on the node.
func (o *options) onNode(do func(context.Context, *network.Node, []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		node, err := o.open(cmd.Context())
		if err != nil {
			return err
		}
		return do(cmd.Context(), node, args)
	}
}

// optional is an argument that may be missing.
func optional(args []string, i int) string {
	if i < len(args) {
		return args[i]
	}
	return ""
}

// These complete arguments.

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
