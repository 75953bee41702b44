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

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
)

func TestExecReturnsStdout(t *testing.T) {
	t.Parallel()
	script := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(script, []byte("#!/bin/sh\necho \"$CNI_COMMAND:$HOME:$(cat)\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	got, err := delegate.Exec(context.Background(), script, []string{"CNI_COMMAND=VERSION", "PATH=/usr/bin:/bin"}, []byte("stdin"))
	if err != nil || string(got) != "VERSION::stdin\n" {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestExecReturnsTheErrorObject(t *testing.T) {
	t.Parallel()
	script := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(script, []byte("#!/bin/sh\necho '{\"code\":7,\"msg\":\"no\"}'\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	var own *types.Error
	if _, err := delegate.Exec(context.Background(), script, nil, nil); !errors.As(err, &own) || own.Code != 7 {
		t.Errorf("got %v", err)
	}
}

func TestExecOfWhatCannotBeStartedIsAnError(t *testing.T) {
	t.Parallel()
	for name, path := range map[string]string{"missing": filepath.Join(t.TempDir(), "x"), "directory": t.TempDir()} {
		if _, err := delegate.Exec(context.Background(), path, nil, nil); err == nil || !strings.Contains(err.Error(), "run plugin") {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

// TestTheDeadlineKillsThePluginAndItsChildren also shows that a child that holds stdout does not hold up the caller.
func TestTheDeadlineKillsThePluginAndItsChildren(t *testing.T) {
	t.Parallel()
	pidFile := filepath.Join(t.TempDir(), "pid")
	if err := syscall.Mkfifo(pidFile, 0o600); err != nil {
		t.Fatal(err)
	}
	plugin, _ := fakePlugin(t, map[string]string{"ADD": "hang:" + pidFile})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	failed := make(chan error, 1)
	go func() {
		_, err := plugin.Add(ctx)
		failed <- err
	}()
	// The fake writes the child's id once it runs; only then is there something to kill.
	text, err := os.ReadFile(pidFile)
	if err != nil {
		t.Fatal(err)
	}
	child, err := strconv.Atoi(string(text))
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	err = <-failed
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "waiting for a server") {
		t.Errorf("got %v; want the context's error, with what the plugin had said", err)
	}
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
	if err != nil || len(result.IPs) != 1 {
		t.Errorf("got %v, %v", result, err)
	}
}

func TestAFloodOfOutputIsCutOff(t *testing.T) {
	t.Parallel()
	plugin, _ := fakePlugin(t, map[string]string{"CHECK": "flood"})
	if err := plugin.Check(context.Background()); !errors.Is(err, delegate.ErrOutputTooLong) {
		t.Errorf("got %v, want ErrOutputTooLong", err)
	}
}

func TestAContextThatHasEndedStartsNothing(t *testing.T) {
	t.Parallel()
	plugin, calls := fakePlugin(t, nil)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := plugin.Check(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if got := calls(); len(got) != 0 {
		t.Errorf("ran %q", verbs(got))
	}
}
