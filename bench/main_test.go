package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/nstest"
)

func TestMain(m *testing.M) {
	flag.Bool("update", false, "rewrite the golden files")
	nstest.Main(m)
}

func TestOptionsThatMakeNoSenseAreRefused(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"-n", "0"}, {"-scenarios", "ipv5"}, {"-contenders", "flannel"}, {"-gate", "add"}, {"ipv4"}, {"-nosuch"},
	} {
		var said bytes.Buffer
		if _, err := parseOptions(args, &said); err == nil {
			t.Errorf("%q was taken", args)
		}
		if said.Len() == 0 {
			t.Errorf("nothing was said about %q", args)
		}
	}
}

func TestQuickIsFewRounds(t *testing.T) {
	t.Parallel()
	o, err := parseOptions([]string{"-quick", "-peers", "x"}, os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	if o.rounds != quickRounds {
		t.Errorf("%d rounds", o.rounds)
	}
	if !filepath.IsAbs(o.binaries.peers) || !filepath.IsAbs(o.binaries.tombolo) {
		t.Errorf("paths are relative: %+v", o.binaries)
	}
}

// TestRun runs the program, since its sandbox is a process of its own, with the one
// contender that can be built without a network.
func TestRun(t *testing.T) {
	t.Parallel()
	nstest.RequireRoot(t)
	dir := t.TempDir()
	if out, err := exec.Command("go", "build", "-o", dir, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	buildC(t, dir, "floor")
	buildC(t, dir, "peak")
	for name, test := range map[string]func(*testing.T, string){
		"floor is measured and proven":               testFloorIsMeasured,
		"a gate that nobody can judge fails the run": testGateWithoutFigureFails,
		"a plugin that did nothing fails the run":    testIdlePluginFails,
		"nobody to measure fails the run":            testNobodyFails,
		"leases are measured and proven":             testTomboloLeases,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, dir)
		})
	}
}

// buildOurs builds a command of this module.
func buildOurs(t *testing.T, dir, name string) string {
	t.Helper()
	if out, err := exec.Command("go", "build", "-o", dir, "../cmd/"+name).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return filepath.Join(dir, name)
}

// runBench runs the program and gives its output, what it said of errors, and its exit
// status.
func runBench(t *testing.T, dir string, args ...string) (stdout, stderr string, status int) {
	t.Helper()
	var out, said bytes.Buffer
	c := exec.Command(filepath.Join(dir, "bench"), append([]string{"-peers", dir}, args...)...)
	c.Stdout, c.Stderr = &out, &said
	err := c.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return out.String(), said.String(), c.ProcessState.ExitCode()
}

// testFloorIsMeasured goes through every scenario. The program itself fails where a
// pod does not reach its gateway or something is left.
func testFloorIsMeasured(t *testing.T, dir string) {
	out, said, status := runBench(t, dir, "-json", "-n", "2", "-tombolo", filepath.Join(dir, "missing"),
		"-scenarios", "ipv4,dual,attach,pods=3,full=2")
	if status != 0 {
		t.Fatalf("exit status %d: %s", status, said)
	}
	var document struct {
		Figures []summary
		Ratios  []ratio
		Skipped []string
	}
	if err := json.Unmarshal([]byte(out), &document); err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	for _, f := range document.Figures {
		found[f.Scenario+" "+f.Metric+" "+f.Contender] = f.Median > 0
	}
	for _, want := range []string{
		"ipv4 add floor", "ipv4 del floor", "ipv4 add cpu floor", "ipv4 peak floor", "dual add floor",
		"attach attach floor", "attach attach tombolo", "attach detach tombolo", "pods=3 growth floor",
		"full=2 add at 0 floor", "full=2 add floor",
	} {
		if !found[want] {
			t.Errorf("no figure %q in %s", want, out)
		}
	}
	if len(document.Ratios) == 0 {
		t.Error("no ratios")
	}
	skipped := strings.Join(document.Skipped, "\n")
	for _, who := range []string{"tombolo in ipv4: ", "reference in ipv4: ", "chain-iptables in full=2: "} {
		if !strings.Contains(skipped, who) {
			t.Errorf("nothing is said of %s, which is missing: %q", who, document.Skipped)
		}
	}
	if strings.Contains(skipped, "reference in full=2") {
		t.Errorf("somebody is missed who has no part: %q", document.Skipped)
	}
}

func testGateWithoutFigureFails(t *testing.T, dir string) {
	out, _, status := runBench(t, dir, "-n", "1", "-contenders", "floor", "-scenarios", "ipv4", "-gate", "add/floor<=2.7")
	if status != exitFailed || !strings.Contains(out, "cannot be judged") {
		t.Errorf("exit status %d, and %s", status, out)
	}
}

func testIdlePluginFails(t *testing.T, dir string) {
	idle := filepath.Join(dir, "idle")
	if err := os.WriteFile(idle, []byte("#!/bin/sh\necho '{}'\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	_, said, status := runBench(t, dir, "-n", "1", "-tombolo", idle, "-contenders", "tombolo", "-scenarios", "ipv4")
	if status != exitFailed || !strings.Contains(said, "result has 0 addresses") {
		t.Errorf("exit status %d: %s", status, said)
	}
}

func testNobodyFails(t *testing.T, dir string) {
	_, said, status := runBench(t, dir, "-n", "1", "-contenders", "reference", "-scenarios", "ipv4")
	if status != exitFailed || !strings.Contains(said, "nothing was measured") {
		t.Errorf("exit status %d: %s", status, said)
	}
}
