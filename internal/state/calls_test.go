package state

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// What an ADD costs in system calls is kept by a test: each is some time of a run
// that has 2.5 ms.
func TestAnAddKeepsToItsSystemCalls(t *testing.T) {
	t.Parallel()
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Skip("needs strace, to count system calls")
	}
	dir := filepath.Join(t.TempDir(), "tombolo")
	d := must.Of(Open(dir)).Get(t)
	enter(t, d)
	must.Succeed(t, d.SaveNetwork(sampleNetwork("cbr0")))
	create(t, d, sample("there is one already"))
	exe := must.Of(os.Executable()).Get(t)
	trace := filepath.Join(t.TempDir(), "trace")
	cmd := exec.Command(strace, "-f", "-o", trace, exe, dir)
	cmd.Env = append(os.Environ(), helperVariable+"=add")
	out, err := cmd.CombinedOutput()
	must.That(t, err == nil, "strace: %v: %s", err, out)
	calls := between(mustRead(t, trace), "/tombolo-add-begins", "/tombolo-add-ends")
	want := []string{
		"openat", "fstat", "fcntl", "flock", // lock
		"openat", "fstat", "read", "close", // epoch
		"openat", "read", "close", // boot id
		"socket", "getsockopt", "close", // the namespace's cookie
		"openat", "flock", "write", "linkat", // create
		"openat", "fstat", "read", "close", // network
		"write", "fstat", "flock", "close", // commit
		"close", // unlock
	}
	expect.That(t, slices.Equal(calls, want), "%d calls: %v\nwant %d: %v", len(calls), calls, len(want), want)
}

// between returns the system calls of a trace between two marks, without those that
// the Go runtime makes of itself.
func between(trace, begin, end string) []string {
	var calls []string
	inside := false
	for line := range strings.Lines(trace) {
		switch {
		case strings.Contains(line, begin):
			inside = true
			continue
		case strings.Contains(line, end):
			return calls
		case !inside || strings.Contains(line, "resumed>"):
			continue
		}
		_, call, _ := strings.Cut(line, " ")
		name, _, isCall := strings.Cut(strings.TrimSpace(call), "(")
		switch name {
		case "futex", "nanosleep", "clone", "clone3", "rseq", "set_robust_list", "mprotect", "mmap", "munmap", "madvise", "tgkill", "getpid", "gettid",
			"rt_sigprocmask", "rt_sigaction", "rt_sigreturn", "sigaltstack", "sched_yield", "epoll_pwait",
			"sched_getaffinity", "pread64": // the last two see to GOMAXPROCS
			continue
		}
		if isCall {
			calls = append(calls, name)
		}
	}
	return append(calls, "and the end is missing")
}
