package nstest_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

// leakVariable has the tests of a second process leave a file open.
const leakVariable = "TOMBOLO_TEST_LEAK"

var left *os.File

func TestLeavesAFileOpen(t *testing.T) {
	path := os.Getenv(leakVariable)
	if path == "" {
		return
	}
	var err error
	if left, err = os.Create(path); err != nil {
		t.Fatal(err)
	}
}

// TestProfilesAreNoLeak runs this program again: package testing never closes the files
// that it writes profiles to.
func TestProfilesAreNoLeak(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	again := func(leak string, args ...string) (string, error) {
		cmd := exec.Command(os.Args[0], append([]string{"-test.run", "^TestLeavesAFileOpen$"}, args...)...)
		cmd.Env = append(os.Environ(), leakVariable+"="+leak)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := again("", "-test.cpuprofile", "cpu", "-test.trace", filepath.Join(dir, "trace")); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if out, err := again("", "-test.cpuprofile", "cpu", "-test.outputdir", dir); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	out, err := again(filepath.Join(dir, "other"), "-test.cpuprofile", "cpu")
	expect.That(t, err != nil && strings.Contains(out, "leak: file descriptor") && strings.Contains(out, "other"),
		"a file that was left open beside a profile: %v, %s", err, out)
}
