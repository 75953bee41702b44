package state

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/ident"
)

// benchDir is a state directory on a tmpfs, as /run is one.
func benchDir(b *testing.B) *Dir {
	b.Helper()
	d := newDir(b)
	if dir, err := os.MkdirTemp("/dev/shm", "tombolo"); err == nil {
		b.Cleanup(func() { os.RemoveAll(dir) })
		d.path = dir
	} else {
		b.Logf("not on a tmpfs: %v", err)
	}
	d.sources = hostSources()
	enter(b, d)
	return d
}

func BenchmarkCreateCommitRemove(b *testing.B) {
	for _, others := range []int{0, 1000} {
		b.Run(fmt.Sprintf("others=%d", others), func(b *testing.B) {
			d := benchDir(b)
			for i := range others {
				create(b, d, sample(fmt.Sprint("other", i)))
			}
			a := sample("c1")
			hash := a.Hash()
			b.ReportAllocs()
			for b.Loop() {
				p, err := d.Create(a)
				if err != nil {
					b.Fatal(err)
				}
				if err := p.Commit(a); err != nil {
					b.Fatal(err)
				}
				if err := d.Remove(a.Network, hash); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkLoad(b *testing.B) {
	d := benchDir(b)
	a := sample("c1")
	p, err := d.Create(a)
	if err != nil {
		b.Fatal(err)
	}
	if err := p.Commit(a); err != nil {
		b.Fatal(err)
	}
	hash := a.Hash()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := d.Load("cbr0", hash); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkList(b *testing.B) {
	for _, n := range []int{10, 1000} {
		b.Run(fmt.Sprintf("records=%d", n), func(b *testing.B) {
			d := benchDir(b)
			for i := range n {
				create(b, d, sample(fmt.Sprint("c", i)))
			}
			b.ReportAllocs()
			for b.Loop() {
				if found, _, err := d.List("cbr0"); err != nil || len(found) != n {
					b.Fatal(len(found), err)
				}
			}
		})
	}
}

func BenchmarkLoadNetwork(b *testing.B) {
	d := benchDir(b)
	if err := d.SaveNetwork(sampleNetwork("cbr0")); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := d.LoadNetwork("cbr0"); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkSaveNetwork(b *testing.B) {
	d := benchDir(b)
	n := sampleNetwork("cbr0")
	b.ReportAllocs()
	for b.Loop() {
		if err := d.SaveNetwork(n); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkLock(b *testing.B) {
	for _, mode := range []Mode{Shared, Exclusive} {
		b.Run(mode.String(), func(b *testing.B) {
			d := benchDir(b)
			b.ReportAllocs()
			for b.Loop() {
				l, err := d.Lock(b.Context(), mode)
				if err != nil {
					b.Fatal(err)
				}
				l.Close()
			}
		})
	}
}

func BenchmarkEnter(b *testing.B) {
	d := benchDir(b)
	b.ReportAllocs()
	for b.Loop() {
		l, _, err := d.Enter(b.Context(), nil)
		if err != nil {
			b.Fatal(err)
		}
		l.Close()
	}
}

func BenchmarkHash(b *testing.B) {
	id := strings.Repeat("0123456789abcdef", 4)
	b.ReportAllocs()
	for b.Loop() {
		ident.Hash("cbr0", id, "eth0")
	}
}

// What an ADD costs in system calls is kept by a test: each is some time of a run
// that has 2.5 ms.
func TestAnAddKeepsToItsSystemCalls(t *testing.T) {
	t.Parallel()
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Skip("needs strace, to count system calls")
	}
	dir := filepath.Join(t.TempDir(), "tombolo")
	d, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	enter(t, d)
	if err := d.SaveNetwork(sampleNetwork("cbr0")); err != nil {
		t.Fatal(err)
	}
	create(t, d, sample("there is one already"))
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	trace := filepath.Join(t.TempDir(), "trace")
	cmd := exec.Command(strace, "-f", "-o", trace, exe, dir)
	cmd.Env = append(os.Environ(), helperVariable+"=add")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("strace: %v: %s", err, out)
	}
	calls := between(mustRead(t, trace), "/tombolo-add-begins", "/tombolo-add-ends")
	want := []string{
		"openat", "fstat", "fcntl", "flock", // lock
		"openat", "fstat", "read", "close", // epoch
		"openat", "read", "close", // boot id
		"socket", "getsockopt", "close", // the namespace's cookie
		"openat", "flock", "write", "linkat", // create
		"openat", "fstat", "read", "close", // network
		"write", "fstat", "close", // commit
		"close", // unlock
	}
	if !slices.Equal(calls, want) {
		t.Errorf("%d calls: %v\nwant %d: %v", len(calls), calls, len(want), want)
	}
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
