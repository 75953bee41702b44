package cni

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestVerbLogsOneLine(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "log")
	logging := func(level string) string {
		return string(with(fmt.Sprintf(`"logFile": %q, "logLevel": %q`, path, level)))
	}
	run(t, &Plugin{Dial: noKernel}, attachmentEnv("DEL", "/run/netns/p"), logging("info"))
	run(t, &Plugin{Dial: noKernel}, map[string]string{"CNI_COMMAND": "GC"}, logging("info"))
	run(t, &Plugin{Dial: noKernel}, map[string]string{"CNI_COMMAND": "GC"}, logging("error")) // nothing went wrong

	data, err := os.ReadFile(path)
	must.Succeed(t, err)
	var got []map[string]any
	for line := range strings.Lines(string(data)) {
		var entry map[string]any
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			t.Fatalf("%v: %q", err, line)
		}
		for _, measured := range []string{"time", "total"} {
			_, ok := entry[measured]
			expect.That(t, ok, "no %q: %s", measured, line)
			delete(entry, measured)
		}
		got = append(got, entry)
	}
	want := []map[string]any{
		{"level": "ERROR", "msg": errNoKernel.Error(), "verb": "DEL", "network": "pods", "containerID": "c1", "ifName": "eth0",
			"netns": "/run/netns/p", "code": float64(codeKernel)},
		{"level": "INFO", "msg": "done", "verb": "GC", "network": "pods"},
	}
	expect.NoDiff(t, cmp.Diff(want, got), "log")
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the log's mode is %v, %v", info.Mode(), err)
	}
}

// logged opens the log of a call.
func logged(verb string, conf *Common) (*stepLog, error) {
	return (&call{verb: verb, conf: conf}).openLog()
}

func TestStepsAreLoggedInTheirOrder(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "log")
	l, err := logged("ADD", &Common{LogFile: path, Name: "pods"})
	must.Succeed(t, err)
	l.warn("worked around")
	for _, name := range []string{"open", "record", "ipam", "record"} {
		l.step(name)
	}
	l.close(nil)
	data, err := os.ReadFile(path)
	must.Succeed(t, err)
	at := -1
	for _, word := range []string{`"WARN","msg":"worked around"`, `"total":`, `"steps":{"open":`, `"record":`, `"ipam":`} {
		next := strings.Index(string(data), word)
		expect.That(t, next > at, "%s is not where it belongs: %s", word, data)
		at = next
	}
	n := strings.Count(string(data), `"record":`)
	expect.That(t, n == 1, "a step that was taken twice is there %d times: %s", n, data)
}

func TestLogThatCannotBeOpened(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		verb, file, level string
		want              string
	}{
		{"ADD", "/nowhere/at/all", "", "code 5: logFile: open /nowhere/at/all: no such file or directory"},
		// Teardown goes on without.
		{"DEL", "/nowhere/at/all", "loud", "no error"},
		{"GC", "/nowhere/at/all", "", "no error"},
		{"DEL", "relative", "", "no error"},
	} {
		l, err := logged(tt.verb, &Common{LogFile: tt.file, LogLevel: tt.level})
		expect.NoDiff(t, cmp.Diff(tt.want, describe(err)), "%s %s", tt.verb, tt.file)
		expect.That(t, l.file == nil, "%s %s: there is a log", tt.verb, tt.file)
	}
	entries, err := os.ReadDir(".")
	expect.That(t, err == nil && !slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() == "relative" }),
		"a log was begun in the working directory: %v", err)
}

func TestNoLogIsALogOfNothing(t *testing.T) {
	t.Parallel()
	l, err := logged("ADD", &Common{})
	expect.That(t, l.file == nil && err == nil, "without a logFile: %v, %v", l.file, err)
	l.step("open")
	l.warn("worked around")
	l.close(nil)
}
