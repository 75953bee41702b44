package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// shell starts a script as a daemon, which is ready when it has written READY.
func shell(t *testing.T, ns *netns.NS, script string) (*daemon, error) {
	t.Helper()
	output := filepath.Join(t.TempDir(), "output")
	ready := func() bool {
		text, _ := os.ReadFile(output)
		return strings.Contains(string(text), "READY")
	}
	return startDaemon(namedNS{NS: ns}, output, ready, "/bin/sh", "-c", script)
}

func TestDaemonRunsInItsNamespaceUntilItIsStopped(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	nstest.Run(t, ns, "ip", "link", "add", "here0", "type", "bridge")
	d, err := shell(t, ns, "cat /proc/net/dev; echo READY; exec sleep 1000")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(d.said(), "here0") {
		t.Errorf("it sees other links: %s", d.said())
	}
	select {
	case <-d.ended:
		t.Error("it has ended")
	default:
	}
	pid := d.cmd.Process.Pid
	d.stop()
	if err := unix.Kill(pid, 0); err != unix.ESRCH {
		t.Errorf("process %d after the stop: %v", pid, err)
	}
}

func TestDaemonThatEndsTooEarlySaysWhy(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	_, err := shell(t, ns, "echo no such network >&2; exit 3")
	if err == nil || !strings.Contains(err.Error(), "no such network") || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("got %v", err)
	}
	if _, err := startDaemon(namedNS{NS: ns}, filepath.Join(t.TempDir(), "output"), nil, "/no/such/daemon"); err == nil {
		t.Error("a program that is not there runs")
	}
}

// TestCostsOfADaemonAreItsOwn takes a shell that has worked, and then stops itself. It
// may have more files open than it was told to: it keeps some for itself.
func TestCostsOfADaemonAreItsOwn(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	d, err := shell(t, ns, "exec 7</dev/null 8</dev/null; i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; echo READY; kill -STOP $$")
	if err != nil {
		t.Fatal(err)
	}
	defer d.stop()
	cpu, err := d.cpu()
	if err != nil || cpu <= 0 {
		t.Errorf("CPU time %s, %v", cpu, err)
	}
	h, err := d.holding()
	if err != nil {
		t.Fatal(err)
	}
	if h.threads != 1 || h.descriptors < 5 || h.resident < 100 || h.resident > 10<<10 {
		t.Errorf("a shell with two files takes up %+v", h)
	}
	d.stop()
	if _, err := d.cpu(); err == nil {
		t.Error("a process that is gone has CPU time")
	}
	if _, err := d.holding(); err == nil {
		t.Error("a process that is gone takes up something")
	}
}

func TestStatusFieldsAreRead(t *testing.T) {
	t.Parallel()
	const status = "Name:\tVmRSS\nVmHWM:\t  999 kB\nVmRSS:\t    1234 kB\nThreads:\t7\nEmpty:\nWord:\tmany\n"
	for name, want := range map[string]int{"VmRSS": 1234, "Threads": 7} {
		if got, err := statusField(status, name); err != nil || got != want {
			t.Errorf("%s: %d, %v; want %d", name, got, err, want)
		}
	}
	for _, name := range []string{"Vm", "Empty", "Word", ""} {
		if got, err := statusField(status, name); err == nil {
			t.Errorf("%q: %d", name, got)
		}
	}
}
