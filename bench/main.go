// Bench measures what one pod costs: a CNI plugin's ADD and DEL, executed as a
// runtime does, side by side with a floor program that does only the kernel's share
// of the work and with the reference plugins, in one run. README.md says how to read
// its figures.
//
// It needs root, and touches nothing of the machine: it measures in network
// namespaces and a mount namespace of its own.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Exit statuses beside 0.
const (
	exitFailed = 1 // a measurement failed, or a gate was broken
	exitUsage  = 2
)

func main() {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case inSandbox:
			os.Exit(bench(os.Args[2], os.Args[3:]))
		case attachLoop:
			os.Exit(fail(runAttachLoop(os.Args[2:], os.Stdout)))
		}
	}
	o, err := parseOptions(os.Args[1:], os.Stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(0)
	case err != nil:
		os.Exit(exitUsage)
	}
	records, err := os.MkdirTemp(o.disk, "tombolo-bench-")
	if err != nil {
		os.Exit(fail(err))
	}
	status, err := enterSandbox(records, os.Args[1:])
	os.Exit(max(status, fail(errors.Join(err, os.RemoveAll(records)))))
}

// fail prints an error, if there is one, and returns the exit status for it.
func fail(err error) int {
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, "bench:", err)
	return exitFailed
}

// options is the command line.
type options struct {
	binaries   binaries
	scenarios  []scenario
	contenders []string
	rounds     int
	gates      []gate
	json       bool
	disk       string // where a directory for lease records is made
}

const quickRounds = 10

func parseOptions(args []string, complaints io.Writer) (options, error) {
	var o options
	peers := os.Getenv("TOMBOLO_PEERS")
	if peers == "" {
		peers = "bin/peers"
	}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(complaints)
	flags.StringVar(&o.binaries.peers, "peers", peers, "the `directory` that bench/build.sh filled")
	flags.StringVar(&o.binaries.tombolo, "tombolo", "bin/tombolo", "the plugin under test, a `path`")
	flags.StringVar(&o.binaries.tombolod, "tombolod", "bin/tombolod", "its keeper of leases, a `path`")
	flags.StringVar(&o.disk, "disk", "/var/tmp", "a `directory` on a disk, for the records of leases")
	scenarios := flags.String("scenarios", "ipv4,dual,attach,full,dhcp", "a `list` of ipv4, dual, attach, full, dhcp, dhcp-rapid, pods=N, full=N, ports=N, leases=N")
	who := flags.String("contenders", strings.Join(contenders(), ","), "a `list` of who takes part")
	flags.IntVar(&o.rounds, "n", 80, fmt.Sprintf("rounds of each scenario; of full one in %d, of leases=N one in %d", fullShare, leaseShare))
	quick := flags.Bool("quick", false, fmt.Sprintf("%d rounds", quickRounds))
	gates := flags.String("gate", "", "a `list` such as add/floor<=2.7,full:add/chain-iptables<=0.04; exit status 1 where one is broken")
	flags.BoolVar(&o.json, "json", false, "print the report as JSON")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if *quick {
		o.rounds = quickRounds
	}
	err := o.interpret(*scenarios, *who, *gates)
	if err == nil && (o.rounds < 1 || flags.NArg() > 0) {
		err = errors.New("want at least one round and no arguments")
	}
	if err != nil {
		fmt.Fprintln(complaints, "bench:", err)
	}
	return o, err
}

func (o *options) interpret(scenarios, who, gates string) error {
	var err error
	if o.scenarios, err = parseScenarios(scenarios); err != nil {
		return err
	}
	for _, name := range strings.Split(who, ",") {
		if !slices.Contains(contenders(), name) {
			return fmt.Errorf("unknown contender %q: want one of %v", name, contenders())
		}
		o.contenders = append(o.contenders, name)
	}
	if o.gates, err = parseGates(gates); err != nil {
		return err
	}
	if o.binaries.peers, err = filepath.Abs(o.binaries.peers); err != nil {
		return err
	}
	if o.binaries.tombolo, err = filepath.Abs(o.binaries.tombolo); err != nil {
		return err
	}
	if o.binaries.tombolod, err = filepath.Abs(o.binaries.tombolod); err != nil {
		return err
	}
	o.disk, err = filepath.Abs(o.disk)
	return err
}

// bench is the process in the sandbox, which may write records of leases to a directory.
// It returns the exit status.
func bench(records string, args []string) int {
	o, err := parseOptions(args, os.Stderr)
	if err != nil {
		return exitUsage
	}
	r := &runner{records: records, binaries: o.binaries, contenders: o.contenders, rounds: o.rounds}
	if err := r.measureAll(o); err != nil {
		return fail(err)
	}
	status := 0
	verdicts := make([]verdict, 0, len(o.gates))
	for _, g := range o.gates {
		v := g.judge(&r.report)
		verdicts = append(verdicts, v)
		if !v.Holds {
			status = exitFailed
		}
	}
	if o.json {
		err = r.report.writeJSON(os.Stdout, verdicts)
	} else {
		err = r.report.writeText(os.Stdout, o.scenarios)
		for _, v := range verdicts {
			fmt.Println(v)
		}
	}
	return max(status, fail(err))
}

func (r *runner) measureAll(o options) error {
	var err error
	if r.dir, err = prepareSandbox(); err != nil {
		return err
	}
	for _, s := range o.scenarios {
		if err := r.measure(s); err != nil {
			return fmt.Errorf("scenario %s: %w", s.name, err)
		}
	}
	if len(r.report.series) == 0 {
		return fmt.Errorf("nothing was measured: %s", strings.Join(r.report.skipped, "; "))
	}
	return nil
}
