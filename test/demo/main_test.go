package main

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// build builds this program and the plugin into a directory that every user may enter. It returns the beginning of
// their paths: "-demo" and "-cni" follow.
func build(t *testing.T) string {
	t.Helper()
	nstest.RequireRoot(t)
	dir := t.TempDir()
	for _, d := range []string{dir, filepath.Dir(dir)} {
		must.Succeed(t, os.Chmod(d, 0o755))
	}
	for name, pkg := range map[string]string{"tombolo-demo": "test/demo", "tombolo-cni": "cmd/tombolo-cni"} {
		c := exec.Command("go", "build", "-buildvcs=false", "-o", filepath.Join(dir, name), "github.com/tombolo-cni/tombolo/"+pkg)
		out, err := c.CombinedOutput()
		must.That(t, err == nil, "%v\n%s", err, out)
	}
	return filepath.Join(dir, "tombolo")
}

// broken writes a plugin, a shell script that may call the real one as $tombolo.
func broken(t *testing.T, tombolo, script string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "broken")
	content := fmt.Sprintf("#!/bin/sh\ntombolo='%s'\n%s\n", tombolo, script)
	must.Succeed(t, os.WriteFile(path, []byte(content), 0o755))
	return path
}

// outcome is how a run of the program ended.
type outcome struct {
	stdout, stderr string
	status         int
}

// start runs the program in a namespace, which stands for the host's.
func start(t *testing.T, host *netns.NS, attr *syscall.SysProcAttr, argv ...string) outcome {
	t.Helper()
	var stdout, stderr bytes.Buffer
	c := exec.Command(argv[0], argv[1:]...)
	c.Stdout, c.Stderr, c.SysProcAttr = &stdout, &stderr, attr
	// Nothing is needed but the program: there is no PATH to look for another.
	c.Env = []string{"PATH="}
	err := host.Do(c.Start)
	if err == nil {
		err = c.Wait()
	}
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return outcome{stdout.String(), stderr.String(), c.ProcessState.ExitCode()}
}

// wantUntouched fails if there is anything of the demonstration in a namespace, or
// mounted where the test runs. (Its mounts name it as their source.)
func wantUntouched(t *testing.T, host *netns.NS) {
	t.Helper()
	expect.Success(t, host.Do(func() error {
		links, err := net.Interfaces()
		expect.Equal(t, len(links), 1, "links on the host: %v", links)
		return err
	}))
	expect.Equal(t, nstest.Run(t, host, "nft", "list", "ruleset"), "", "rules on the host")
	expect.Equal(t, nstest.Sysctl(t, host, "net/ipv4/ip_forward"), "0", "ip_forward of the host is")
	mounts, err := os.ReadFile("/proc/thread-self/mountinfo")
	expect.Success(t, err)
	expect.That(t, !bytes.Contains(mounts, []byte("tombolo-demo")), "a mount is left:\n%s", mounts)
}
