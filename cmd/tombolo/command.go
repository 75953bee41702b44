package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/network"
)

// A command is one thing that an operator can ask for. Help, completion, the man page and
// the exit statuses all follow from the table of them: see commands.
type command struct {
	name    string // "ls", or "uplink plan": one of a group
	args    string // "NIC [BRIDGE]", "FILE..."
	summary string // what it does, in one sentence without a full stop
	// privileged commands open netlink sockets that change or list what only CAP_NET_ADMIN may
	// see, and enter network namespaces, which takes CAP_SYS_ADMIN.
	privileged bool
	statuses   []status // besides 0, 1 and 2, which all have
	// setup declares the flags, and gives what runs after they are parsed.
	setup func(flags *flag.FlagSet) runner
}

// A runner runs a command with its arguments, as many as command.args wants.
type runner func(ctx context.Context, out io.Writer, args []string) error

// status is an exit status, and what it says.
type status struct {
	code int
	text string
}

const (
	exitFailed   = 1
	exitUsage    = 2
	exitAttached = 3
	exitDiffers  = 4
)

// errDiffers says that check found something.
var errDiffers = errors.New("something differs; the end of each line says, in brackets, what repairs it")

// errUsage is the cause of an error about the command line itself.
var errUsage = errors.New("see tombolo help")

// operator runs one command of the operator's and gives the exit status. A command whose output
// is read no more, as by head, does all its work.
func operator(args []string) int {
	signal.Ignore(unix.SIGPIPE)
	err := run(context.Background(), args, printable.Writer(unread{os.Stdout}))
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, "tombolo:", printable.Line(err.Error()))
	switch {
	case errors.Is(err, errUsage):
		return exitUsage
	case errors.Is(err, network.ErrAttached):
		return exitAttached
	case errors.Is(err, errDiffers), errors.Is(err, errUplinkDiffers), errors.Is(err, errKept), errors.Is(err, errInvalid), errors.Is(err, errSick):
		return exitDiffers
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

func run(ctx context.Context, args []string, out io.Writer) error {
	table := commands()
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, overview(table))
		return fmt.Errorf("no command: %w", errUsage)
	}
	switch args[0] {
	case "-h", "-help", "--help":
		args = append([]string{"help"}, args[1:]...)
	case "-version", "--version":
		args = append([]string{"version"}, args[1:]...)
	}
	cmd, rest, err := find(table, args)
	if err != nil {
		if group := group(table, args[0]); len(group) > 0 && len(args) > 1 && asksForHelp(args[1]) {
			_, err = io.WriteString(out, describeAll(group))
		}
		return err
	}
	return cmd.run(ctx, out, rest)
}

// find gives the command that a line names, and what follows its name.
func find(table []command, args []string) (*command, []string, error) {
	for i := range table {
		words := strings.Fields(table[i].name)
		if len(args) >= len(words) && strings.Join(args[:len(words)], " ") == table[i].name {
			return &table[i], args[len(words):], nil
		}
	}
	name := args[0]
	if group := group(table, name); len(group) > 0 {
		if len(args) == 1 {
			return nil, nil, fmt.Errorf("%s: %s: %w", name, verbs(group), errUsage)
		}
		name += " " + args[1]
	}
	names := make([]string, 0, len(table))
	for _, c := range table {
		names = append(names, c.name)
		if group, _, ok := strings.Cut(c.name, " "); ok {
			names = append(names, group)
		}
	}
	if near := strict.Nearest(name, names); near != "" {
		return nil, nil, fmt.Errorf("no command %q; did you mean %q? %w", name, near, errUsage)
	}
	return nil, nil, fmt.Errorf("no command %q: %w", name, errUsage)
}

// group gives the commands of one group, such as uplink.
func group(table []command, name string) []command {
	var list []command
	for _, c := range table {
		if strings.HasPrefix(c.name, name+" ") {
			list = append(list, c)
		}
	}
	return list
}

// verbs reads "plan, take, restore or status".
func verbs(group []command) string {
	var b strings.Builder
	for i, c := range group {
		switch {
		case i == 0:
		case i == len(group)-1:
			b.WriteString(" or ")
		default:
			b.WriteString(", ")
		}
		b.WriteString(strings.Fields(c.name)[1])
	}
	return b.String()
}

func asksForHelp(arg string) bool { return arg == "-h" || arg == "-help" || arg == "--help" }

// run parses a command's line, and runs it.
func (c *command) run(ctx context.Context, out io.Writer, line []string) error {
	flags := flag.NewFlagSet("tombolo "+c.name, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	do := c.setup(flags)
	accept(flags)
	args, err := parse(flags, line)
	if errors.Is(err, flag.ErrHelp) {
		_, err = io.WriteString(out, c.describe())
		return err
	}
	if err != nil {
		return fmt.Errorf("%s: %w: %w", c.name, err, errUsage)
	}
	least, most := c.count()
	if len(args) < least || most >= 0 && len(args) > most {
		return fmt.Errorf("%s: %d arguments given, %s expected: %w", c.name, len(args), between(least, most), errUsage)
	}
	var lacks string
	if c.privileged {
		var hopeless bool
		if lacks, hopeless, err = lacking(); err != nil {
			return err
		}
		if hopeless {
			return fmt.Errorf("%s: user %d lacks %s: run it as root, with sudo for example", c.name, os.Geteuid(), lacks)
		}
	}
	err = do(ctx, out, args)
	switch {
	case !errors.Is(err, fs.ErrPermission):
		return err
	case lacks != "":
		return fmt.Errorf("%w: this process lacks %s", err, lacks)
	case os.Geteuid() != 0:
		return fmt.Errorf("%w: run it as root", err)
	}
	return err
}

// accept has every command take the directories, so that one line of flags serves all.
// Those that a command has no use for are in no help.
func accept(flags *flag.FlagSet) {
	for _, name := range []string{"state", "leases"} {
		if flags.Lookup(name) == nil {
			flags.String(name, "", "")
		}
	}
}

// parse gives the arguments, among which flags may stand; "--" ends the flags.
func parse(flags *flag.FlagSet, line []string) ([]string, error) {
	var args []string
	for {
		if err := flags.Parse(line); err != nil {
			return nil, err
		}
		rest := flags.Args()
		if used := len(line) - len(rest); len(rest) == 0 || used > 0 && line[used-1] == "--" {
			return append(args, rest...), nil
		}
		args, line = append(args, rest[0]), rest[1:]
	}
}

// count gives how many arguments there may be: most is -1 where there is no end.
func (c *command) count() (least, most int) {
	for _, word := range strings.Fields(c.args) {
		if !strings.HasPrefix(word, "[") {
			least++
		}
		most++
		if strings.Contains(word, "...") {
			return least, -1
		}
	}
	return least, most
}

func between(least, most int) string {
	switch {
	case most < 0:
		return fmt.Sprintf("%d or more", least)
	case least == most:
		return fmt.Sprint(least)
	}
	return fmt.Sprintf("%d to %d", least, most)
}

// These are the flags that several commands have.

func jsonFlag(flags *flag.FlagSet) *bool { return flags.Bool("json", false, "print JSON") }

func stateFlag(flags *flag.FlagSet) *string {
	return flags.String("state", network.DefaultStateDir, "use this state `DIR`, the configuration's stateDir")
}

func leasesFlag(flags *flag.FlagSet) *string {
	return flags.String("leases", lease.DefaultDir, "use this lease `DIR`, the configuration's leaseDir")
}
