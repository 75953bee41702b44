package bench

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// usualRounds of plugins that are executed stand for testing's default of a second, of which an operation of two
// milliseconds, with a DEL of twenty after it, would make ten.
const usualRounds = "80x"

func TestMain(m *testing.M) {
	flag.Parse()
	if f := flag.Lookup("test.benchtime"); executes() && f.Value.String() == f.DefValue {
		if err := f.Value.Set(usualRounds); err != nil {
			panic(err)
		}
	}
	if flag.Lookup("test.bench").Value.String() != "" {
		describeMachine()
	}
	nstest.Main(m)
}

// executes says that BenchmarkExec is named, and not only matched as all others are.
func executes() bool { return strings.Contains(flag.Lookup("test.bench").Value.String(), "Exec") }

// once says that every benchmark is to run a single time, to see that it works.
func once() bool { return flag.Lookup("test.benchtime").Value.String() == "1x" }

// standInLine sets how many rounds the line of a benchmark counts, where these are not the
// ones that testing asked for: contenders take turns in the rounds of the first one.
func standInLine(b *testing.B, rounds int) {
	b.N = rounds //lint:ignore SA3001 the time of a round is reported by us, not computed from it
}

// skipLong skips what takes a minute and more where every benchmark runs once.
func skipLong(b *testing.B) {
	b.Helper()
	if once() {
		b.Skip("it takes minutes: any other -benchtime runs it")
	}
}

// describeMachine prints what the figures hold for, in the form that benchstat and
// bench/report read.
func describeMachine() {
	var name unix.Utsname
	_ = unix.Uname(&name)
	fmt.Printf("kernel: Linux %s\ncpus: %d\ngo: %s\ndate: %s\n", unix.ByteSliceToString(name.Release[:]), runtime.NumCPU(), runtime.Version(), time.Now().UTC().Format(time.DateOnly))
	if out, err := exec.Command("git", "describe", "--always", "--dirty").Output(); err == nil {
		fmt.Printf("tombolo: %s", out)
	}
	if mod, err := os.ReadFile("peers/go.mod"); err == nil {
		for line := range strings.Lines(string(mod)) {
			if f := strings.Fields(line); len(f) > 1 && f[0] == "github.com/containernetworking/plugins" {
				fmt.Printf("reference: containernetworking/plugins %s\n", f[1])
			}
		}
	}
	if commit, err := os.ReadFile(filepath.Join(os.Getenv("TOMBOLO_PEERS"), "cni-kindnet.commit")); err == nil {
		fmt.Printf("cni-kindnet: kubernetes-sigs/kindnet %s", commit)
	}
	for tool, version := range map[string]string{"nft": "--version", "iptables": "--version", "dnsmasq": "--version"} {
		if out, err := exec.Command(tool, version).Output(); err == nil {
			first, _, _ := strings.Cut(string(out), "\n")
			fmt.Printf("%s: %s\n", tool, first)
		}
	}
}

// say writes a line of progress.
func say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s  "+format+"\n", append([]any{time.Now().Format(time.TimeOnly)}, args...)...)
}

// progress is said every five seconds. go test has one pipe for both outputs, where it would cut a result's line in two.
func progress(last *time.Time, format string, args ...any) {
	out, _ := os.Stdout.Stat()
	other, _ := os.Stderr.Stat()
	if time.Since(*last) > 5*time.Second && !os.SameFile(out, other) {
		*last = time.Now()
		say(format, args...)
	}
}

// namespaces is how many network namespaces the kernel has, those included that it takes
// down, of all programs on the machine.
func namespaces() int {
	slabs, _ := os.ReadFile("/proc/slabinfo")
	for line := range strings.Lines(string(slabs)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "net_namespace" {
			n, _ := strconv.Atoi(f[1])
			return n
		}
	}
	return 0
}

// settle waits until the kernel has taken down what a benchmark had, so that the next one
// has the machine for itself; before is how many namespaces there were.
func settle(before int) {
	for until := time.Now().Add(patience); !once() && namespaces() > before+10 && time.Now().Before(until); {
		time.Sleep(50 * time.Millisecond)
	}
}

// A report is of a quiet machine: with BENCH_QUIET set, a scenario waits until others leave at least so much of the CPUs
// for a while, and fails where they do not.
const (
	quietLoad  = 0.3 // CPUs that others use
	quietSpan  = 2 * time.Second
	quietWaits = 60
)

// awaitQuiet waits for a quiet machine and prints how quiet it is.
func awaitQuiet(b *testing.B) {
	b.Helper()
	if os.Getenv("BENCH_QUIET") == "" {
		return
	}
	load := 0.0
	for range quietWaits {
		if load = busy(b, quietSpan); load < quietLoad {
			fmt.Printf("load-before: %.2f CPUs, at most %.1f\n", load, quietLoad)
			return
		}
		say("waiting for a quiet machine: others use %.2f CPUs", load)
	}
	b.Fatalf("the machine is not quiet: others use %.2f CPUs, at most %.1f are allowed for a report", load, quietLoad)
}

// busy returns how many CPUs were in use on average during the span, by /proc/stat.
func busy(b *testing.B, span time.Duration) float64 {
	b.Helper()
	work := func() (ticks float64) {
		all := strings.Fields(string(must.Of(os.ReadFile("/proc/stat")).Get(b)))
		for i, field := range all[1:9] { // user, nice, system, idle, iowait, irq, softirq, steal
			if n := must.Of(strconv.ParseFloat(field, 64)).Get(b); i != 3 && i != 4 {
				ticks += n
			}
		}
		return ticks
	}
	const ticksPerSecond = 100 // USER_HZ
	before := work()
	time.Sleep(span)
	return (work() - before) / ticksPerSecond / span.Seconds()
}

// The programs are those of TOMBOLO_BIN and TOMBOLO_PEERS. Without the former, ours are
// built; peers that are not there are left out.
var built = sync.OnceValues(func() (string, error) {
	if path := os.Getenv("TOMBOLO_BIN"); path != "" {
		return filepath.Abs(path)
	}
	dir, err := filepath.Abs("../.cache/bench")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "bin")
	if out, err := exec.Command("make", "-C", "..", "-s", "build", "BIN="+path).CombinedOutput(); err != nil {
		return "", fmt.Errorf("make build: %w: %s", err, out)
	}
	return path, nil
})

// installed is a directory of plugins: ours, by its name and by those of the reference's.
var installed = sync.OnceValues(func() (string, error) {
	from, err := built()
	if err != nil {
		return "", err
	}
	dir, err := placed("plugins")
	if err != nil {
		return "", err
	}
	if out, err := exec.Command(filepath.Join(from, "tombolo"), "install", "--names", "all", dir).CombinedOutput(); err != nil {
		return "", fmt.Errorf("install: %w: %s", err, out)
	}
	return dir, nil
})

// others is a directory of the peers, each written at once as tombolo install writes a program. A file
// that a linker has mapped is in the cache by single pages, and a process begins by up to 0.6 ms later.
var others = sync.OnceValues(func() (string, error) {
	dir, err := placed("peers")
	if err != nil {
		return "", err
	}
	from := os.Getenv("TOMBOLO_PEERS")
	if from == "" {
		from = "../.cache/peers"
	}
	entries, err := os.ReadDir(from)
	if errors.Is(err, fs.ErrNotExist) {
		return dir, nil
	}
	for _, e := range entries {
		text, readErr := os.ReadFile(filepath.Join(from, e.Name()))
		err = errors.Join(err, readErr, os.WriteFile(filepath.Join(dir, e.Name()), text, 0o755))
	}
	return dir, err
})

// placed is a directory that is empty.
func placed(name string) (string, error) {
	dir, err := filepath.Abs("../.cache/bench/" + name)
	if err != nil {
		return "", err
	}
	return dir, errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o755))
}

func program(tb testing.TB, name string) string {
	tb.Helper()
	dir := must.Of(built()).Get(tb)
	return filepath.Join(dir, name)
}

// peer gives the path of another program, and whether it is there.
func peer(name string) (path string, there bool) {
	dir, err := others()
	if err != nil {
		say("the peers are not copied: %v", err)
	}
	path = filepath.Join(dir, name)
	_, err = os.Stat(path)
	return path, err == nil
}

// scratch is a directory in memory, where a runtime has /run.
func scratch(tb testing.TB) string {
	tb.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "tombolo-bench-")
	if err != nil {
		return tb.TempDir()
	}
	tb.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}
