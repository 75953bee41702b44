package nstest

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/netns"
)

// RunMain is set in the environment of a test's binary that is to be the program it tests.
const RunMain = "TOMBOLO_TEST_RUN_MAIN"

// ProgramMain is Main of a program's tests.
func ProgramMain(m *testing.M, program func()) {
	if os.Getenv(RunMain) != "" {
		program()
		return
	}
	Main(m)
}

// Finish runs a command with RunMain in a namespace, nil for the test's own, and says what became of it.
func Finish(tb testing.TB, ns *netns.NS, cmd *exec.Cmd) (status int, stdout, stderr string) {
	tb.Helper()
	var out, errOut bytes.Buffer
	cmd.Env = append([]string{RunMain + "=1"}, cmd.Env...)
	cmd.Stdout, cmd.Stderr = &out, &errOut
	start := cmd.Start
	if ns != nil {
		start = func() error { return ns.Do(cmd.Start) }
	}
	must.Succeed(tb, start())
	var exit *exec.ExitError
	err := cmd.Wait()
	must.That(tb, err == nil || errors.As(err, &exit), "%v", err)
	return cmd.ProcessState.ExitCode(), out.String(), errOut.String()
}
