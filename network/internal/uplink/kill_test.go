package uplink_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/fault"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/network/internal/uplink"
)

// helperVariable has what the test binary is to do as its own helper, and die of.
const helperVariable = "TOMBOLO_UPLINK_HELPER"

// mortal is a journal in a file that kills the process at one of its calls, with the
// record saved: what a kill -9 after it leaves is then the same as before the step.
type mortal struct {
	path string
	left int
}

func (m *mortal) Save(b []byte) error {
	if err := os.WriteFile(m.path+".new", b, 0o600); err != nil {
		return err
	}
	if err := os.Rename(m.path+".new", m.path); err != nil {
		return err
	}
	m.die()
	return nil
}

func (m *mortal) Remove() error {
	m.die()
	return os.Remove(m.path)
}

func (m *mortal) die() {
	if m.left--; m.left == 0 {
		unix.Kill(os.Getpid(), unix.SIGKILL)
		select {}
	}
}

// helper runs in the host's namespace: it takes eth0 over, or gives it back, until the
// journal kills it. It ends with 0 if it came to its end.
func helper() int {
	left, err := strconv.Atoi(os.Getenv(helperVariable + "_LEFT"))
	if err == nil {
		err = doomed(os.Getenv(helperVariable), &mortal{path: os.Getenv(helperVariable + "_JOURNAL"), left: left})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func doomed(what string, j *mortal) error {
	ctx := context.Background()
	socket, err := nl.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return err
	}
	defer socket.Close()
	conn := uplink.On(socket)
	if what == "take" {
		_, err = conn.Take(ctx, toBridge(), j)
		return err
	}
	b, err := os.ReadFile(j.path)
	if err != nil {
		return err
	}
	rec, err := uplink.ParseRecord(b)
	if err != nil {
		return err
	}
	return conn.Restore(ctx, rec, j)
}

// killAt runs the helper in the host's namespace, and is true if it was killed at the
// n-th call of its journal, false if it came to its end before.
func (l *lan) killAt(tb testing.TB, what string, n int, journal string) bool {
	tb.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), helperVariable+"="+what, helperVariable+"_LEFT="+strconv.Itoa(n), helperVariable+"_JOURNAL="+journal)
	cmd.Stderr = os.Stderr
	within(tb, l.host, cmd.Start)
	err := cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ProcessState.Sys() != nil && !exit.Exited() {
		return true
	}
	must.Succeed(tb, err)
	return false
}

func (l *lan) mustReach(tb testing.TB, when string) {
	tb.Helper()
	for _, a := range []string{"192.0.2.1", "2001:db8::1"} {
		if err := nstest.Ping(tb, l.host, nstest.Addr(a)); err != nil {
			tb.Errorf("%s: the host to %s: %v\n%s", when, a, err, state(tb, l.host))
		}
	}
	for _, a := range []string{"10.0.0.5", "fd00::5"} {
		if err := nstest.Ping(tb, l.router, nstest.Addr(a)); err != nil {
			tb.Errorf("%s: the router to %s: %v\n%s", when, a, err, state(tb, l.host))
		}
	}
}

func loadRecord(tb testing.TB, path string) *uplink.Record {
	tb.Helper()
	b := must.Of(os.ReadFile(path)).Get(tb)
	return must.Of(uplink.ParseRecord(b)).Get(tb)
}

// deaths are what may be killed.
func deaths() []death {
	taken := func(tb testing.TB, l *lan, journal string) {
		must.That(tb, !l.killAt(tb, "take", 0, journal), "killed too early")
	}
	return []death{
		{what: "take"},
		{what: "restore", setUp: taken},
	}
}

type death struct {
	what  string
	setUp func(testing.TB, *lan, string) // nil: nothing is taken over yet
}

// strides has kills at one step in four, and in test-long at each.
func strides(t *testing.T) (first, step int) {
	t.Helper()
	first, step, err := fault.Strides(4)
	must.Succeed(t, err)
	return first, step
}

func TestKilledAtAnyStepTheHostIsReachableAndNothingIsLeft(t *testing.T) {
	t.Parallel()
	for _, d := range deaths() {
		t.Run(d.what, func(t *testing.T) {
			t.Parallel()
			n, step := strides(t)
			for ; d.dies(t, n) && step > 0; n += step {
				must.That(t, n <= 100, "it never comes to its end")
			}
		})
	}
}

// dies kills it at the n-th call of its journal, recovers, and looks at what is left. It
// is false if it came to its end before.
func (d *death) dies(t *testing.T, n int) bool {
	t.Helper()
	l := newLAN(t)
	journal := filepath.Join(t.TempDir(), "journal")
	before := state(t, l.host)
	l.mustReach(t, "before")
	if d.setUp != nil {
		d.setUp(t, l, journal)
	}
	if !l.killAt(t, d.what, n, journal) {
		expect.That(t, n >= 5, "it came to its end at %d", n)
		return false
	}
	killed := loadRecord(t, journal)
	when := fmt.Sprintf("killed at %d, %s", n, killed.State)
	l.mustReach(t, when)
	if killed.State == uplink.Taken {
		l.mustBeTaken(t, when, killed)
	}
	must.Succeed(t, l.conn.Restore(t.Context(), killed, &mortal{path: journal}), "%s: restore", when)
	l.mustReach(t, when+", restored")
	expect.NoDiff(t, cmp.Diff(before, state(t, l.host)), "%s: the host in the end", when)
	expect.Is(t, expect.Err(os.Stat(journal)), os.ErrNotExist, "%s: the journal is still there", when)
	return true
}

// mustBeTaken fails unless a takeover is as one that was never interrupted.
func (l *lan) mustBeTaken(tb testing.TB, when string, rec *uplink.Record) {
	tb.Helper()
	expect.Equal(tb, rec.State, uplink.Taken, "%s: the record's state", when)
	shown := nstest.Run(tb, l.host, "ip", "addr", "show", "dev", "eth0")
	expect.That(tb, strings.Contains(shown, "master br0") && !strings.Contains(shown, "inet"), "%s: the NIC is\n%s", when, shown)
}
