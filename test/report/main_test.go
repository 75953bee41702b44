package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

// reported reads lines of ACTION PACKAGE TEST.
func reported(t *testing.T, lines ...string) (*run, string) {
	t.Helper()
	var out strings.Builder
	r := newRun(map[string]bool{"p TestMay": true}, &out)
	for _, line := range lines {
		f := append(strings.Fields(line), "", "")
		r.take(&event{Action: f[0], Package: f[1], Test: f[2], Output: "output of " + f[1] + " " + f[2] + "\n"})
	}
	return r, out.String()
}

func TestRunIsToldByWhatItsTestsDid(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name       string
		events     []string
		again      string // what is to be run again
		conclusion string
	}{
		{"all passed", []string{"pass p TestA", "pass p"}, "", "1 passed, 0 failed, 0 flaky, 0 skipped"},
		{"one failed", []string{"pass p TestA", "fail p TestB", "fail p"}, "p TestB", "1 passed, 2 failed, 0 flaky, 0 skipped"},
		{"a case of one failed", []string{"fail p TestB/c", "fail p TestB", "fail p"}, "p TestB", "0 passed, 3 failed, 0 flaky, 0 skipped"},
		{"a package died", []string{"pass p TestA", "fail p", "pass q TestA", "pass q"}, "p", "2 passed, 1 failed, 0 flaky, 0 skipped"},
		{"it does not build", []string{"build-fail p", "fail p"}, "p", "0 passed, 1 failed, 0 flaky, 0 skipped"},
		{"it passes the second time", []string{"pass p TestA", "fail p TestB/c", "fail p TestB", "fail p", "pass p TestB/c", "pass p TestB", "pass p"}, "",
			"FLAKY p TestB failed, and passed when it was run again alone\nFLAKY p TestB/c failed, and passed when it was run again alone\n3 passed, 0 failed, 2 flaky, 0 skipped"},
		{"it fails the second time", []string{"fail p TestB", "fail p", "fail p TestB", "fail p"}, "p TestB", "0 passed, 2 failed, 0 flaky, 0 skipped"},
		{"one of two passes the second time", []string{"fail p TestA", "fail p TestB", "fail p", "pass p TestA", "pass p", "fail p TestB", "fail p"}, "p TestB",
			"FLAKY p TestA failed, and passed when it was run again alone\n1 passed, 2 failed, 1 flaky, 0 skipped"},
		{"skipped for a reason", []string{"pass p TestA", "skip p TestMay", "skip p TestMay/c", "pass p"}, "", "1 passed, 0 failed, 0 flaky, 2 skipped"},
		{"skipped for none", []string{"pass p TestA", "skip p TestB", "pass p"}, "p TestB", "1 passed, 1 failed, 0 flaky, 1 skipped"},
		{"a package without tests", []string{"pass p TestA", "skip q"}, "", "1 passed, 0 failed, 0 flaky, 0 skipped"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r, _ := reported(t, tt.events...)
			expect.NoDiff(t, cmp.Diff(tt.again, strings.TrimSpace(strings.Join(r.toRunAgain(), ""))), "to be run again")
			var out strings.Builder
			r.conclude(&out)
			expect.NoDiff(t, cmp.Diff(tt.conclusion+"\n", out.String()), "conclusion")
		})
	}
}

func TestWhatFailedIsPrintedAndWhatPassedIsNot(t *testing.T) {
	t.Parallel()
	_, out := reported(t, "output p TestA", "output p TestB", "pass p TestA", "fail p TestB", "output p", "fail p")
	expect.That(t, strings.Contains(out, "output of p TestB\n") && !strings.Contains(out, "output of p TestA"),
		"printed:\n%s", out)
	expect.That(t, slices.Contains(strings.Split(out, "\n"), "FAIL  p TestB"), "the test is not named in:\n%s", out)
}
