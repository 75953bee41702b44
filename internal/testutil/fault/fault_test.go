package fault_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/fault"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// stepsVar has this program make some directories, one after the other.
const stepsVar = "TOMBOLO_FAULT_STEPS"

const steps = 5

func TestMain(m *testing.M) {
	fault.Main()
	if dir := os.Getenv(stepsVar); dir != "" {
		os.Exit(walk(dir))
	}
	nstest.Main(m)
}

// walk ends with the number of the step that failed.
func walk(dir string) int {
	for i := range steps {
		// So that a call more or less of the runtime's does not hide a step.
		for range 8 {
			if _, err := os.Stat(dir); err != nil {
				fmt.Fprintln(os.Stderr, err)
				return i + 1
			}
		}
		if err := os.Mkdir(fmt.Sprintf("%s/%d", dir, i), 0o700); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return i + 1
		}
	}
	return 0
}

// run runs it with a fault, and gives how many steps it has made.
func run(t *testing.T, f fault.Fault) (o fault.Outcome, made int) {
	t.Helper()
	nstest.RequireRoot(t)
	dir := t.TempDir()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), stepsVar+"="+dir)
	r, err := fault.Start(nil, cmd, f)
	must.Succeed(t, err)
	o = r.Wait()
	files, err := filepath.Glob(dir + "/*")
	must.Succeed(t, err)
	return o, len(files)
}

func TestWithoutAFaultTheCallsAreCounted(t *testing.T) {
	t.Parallel()
	o, made := run(t, fault.Fault{})
	expect.That(t, o.Err == nil && !o.Fired && o.Calls >= steps && made == steps, "%+v, %d steps", o, made)
}

func TestFaultBeyondTheLastCallDoesNotFire(t *testing.T) {
	t.Parallel()
	for _, kind := range fault.Kinds() {
		o, made := run(t, fault.Fault{At: 100000, Kind: kind})
		expect.That(t, o.Err == nil && !o.Fired && made == steps, "%s: %+v, %d steps", kind, o, made)
	}
}

// TestEachCallIsMet sweeps: every number of steps is what some fault leaves.
func TestEachCallIsMet(t *testing.T) {
	t.Parallel()
	whole, _ := run(t, fault.Fault{})
	for _, kind := range fault.Kinds() {
		left := map[int]bool{}
		for at := 1; at <= whole.Calls; at++ {
			o, made := run(t, fault.Fault{At: at, Kind: kind})
			if !o.Fired {
				// Which calls the runtime makes differs by one or two.
				continue
			}
			left[made] = true
			var exit *exec.ExitError
			isExit := errors.As(o.Err, &exit)
			mkdir := strings.HasPrefix(o.Call, "mkdirat(")
			switch kind {
			case fault.Kill:
				status, ok := exitStatus(exit)
				expect.That(t, isExit && ok && status.Signal() == syscall.SIGKILL && o.Calls >= at, "killed at %d: %+v", at, o)
			case fault.Error:
				// The test program's loader ends with 127.
				if mkdir && (!isExit || !strings.HasSuffix(o.Call, ": ENOSPC")) || isExit && exit.ExitCode() != made+1 && exit.ExitCode() != 127 {
					t.Errorf("an error at %d, with %d steps made: %+v", at, made, o)
				}
			}
			expect.That(t, !mkdir || strings.Contains(o.Call, fmt.Sprintf("/%d)", made)),
				"%s at %d, with %d steps made: %s", kind, at, made, o.Call)
		}
		for i := range steps {
			expect.That(t, left[i], "%s: no fault left %d steps", kind, i)
		}
	}
}

func exitStatus(exit *exec.ExitError) (syscall.WaitStatus, bool) {
	if exit == nil {
		return 0, false
	}
	status, ok := exit.Sys().(syscall.WaitStatus)
	return status, ok && status.Signaled()
}
