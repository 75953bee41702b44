package delegate_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// TestTheDeadlineKillsThePluginAndItsChildren also shows that a child that holds stdout does not hold up the caller.
func TestTheDeadlineKillsThePluginAndItsChildren(t *testing.T) {
	t.Parallel()
	pidFile := filepath.Join(t.TempDir(), "pid")
	must.Succeed(t, syscall.Mkfifo(pidFile, 0o600))
	plugin, _ := fakePlugin(t, map[string]string{"ADD": "hang:" + pidFile})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	failed := make(chan error, 1)
	go func() {
		_, err := plugin.Add(ctx)
		failed <- err
	}()
	// The fake writes the child's id once it runs; only then is there something to kill.
	text := must.Of(os.ReadFile(pidFile)).Get(t)
	child := must.Of(strconv.Atoi(string(text))).Get(t)
	cancel()
	err := <-failed
	expect.That(t, errors.Is(err, context.Canceled) && strings.Contains(err.Error(), "waiting for a server"),
		"got %v; want the context's error, with what the plugin had said", err)
	// The signal was sent before Add returned, but a process takes a moment to die. One that was not killed sleeps on until
	// the test binary's own timeout names this line.
	for alive(child) {
		runtime.Gosched()
	}
}

// alive reports whether the process runs. A zombie that waits for init does not.
func alive(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return false
	}
	_, state, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(state, "Z") && !strings.HasPrefix(state, "X")
}

func TestAChildThatKeepsStdoutDoesNotHoldUpTheResult(t *testing.T) {
	t.Parallel()
	plugin, _ := fakePlugin(t, map[string]string{"ADD": `linger:{"cniVersion":"1.1.0","ips":[{"address":"10.1.0.2/24"}]}`})
	result, err := plugin.Add(context.Background())
	expect.That(t, err == nil && len(result.IPs) == 1, "got %v, %v", result, err)
}

func TestAContextThatHasEndedStartsNothing(t *testing.T) {
	t.Parallel()
	plugin, calls := fakePlugin(t, nil)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	expect.Is(t, plugin.Run(ctx, "CHECK"), context.Canceled, "got")
	if got := calls(); len(got) != 0 {
		t.Errorf("ran %q", verbs(got))
	}
}

func TestEndlessOutputEndsThePlugin(t *testing.T) {
	t.Parallel()
	plugin, _ := fakePlugin(t, map[string]string{"ADD": "flood"})
	_, err := plugin.Add(context.Background())
	expect.That(t, err != nil && strings.Contains(err.Error(), "it printed more than 4194304 bytes"), "got %v", err)
}
