package nstest

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// Main runs a package's tests and then fails if they left file descriptors or
// goroutines behind:
//
//	func TestMain(m *testing.M) { nstest.Main(m) }
func Main(m *testing.M) {
	if !flag.Parsed() {
		flag.Parse()
	}
	// Fuzzing has processes and goroutines of its own.
	for _, name := range []string{"test.fuzz", "test.fuzzworker"} {
		if f := flag.Lookup(name); f != nil && f.Value.String() != f.DefValue {
			os.Exit(m.Run())
		}
	}
	before := FDs()
	code := m.Run()
	if code == 0 {
		code = leaks(before)
	}
	os.Exit(code)
}

func leaks(before map[string]string) int {
	// Goroutines that have been told to end may need a moment to do so, and have files
	// open as long.
	for deadline := time.Now().Add(patience); runtime.NumGoroutine() > 1; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<20)
			fmt.Fprintf(os.Stderr, "leak: %d goroutines:\n%s\n", runtime.NumGoroutine(), buf[:runtime.Stack(buf, true)])
			return 1
		}
	}
	code := 0
	profiles := profiles()
	for fd, what := range FDs() {
		if before[fd] != what && !slices.Contains(profiles, what) {
			fmt.Fprintf(os.Stderr, "leak: file descriptor %s: %s\n", fd, what)
			code = 1
		}
	}
	return code
}

// profiles are the files that package testing writes while tests and benchmarks run, and
// leaves open when they have ended.
func profiles() []string {
	var paths []string
	dir := flag.Lookup("test.outputdir").Value.String()
	for _, name := range []string{"test.cpuprofile", "test.trace", "test.testlogfile"} {
		path := flag.Lookup(name).Value.String()
		if !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		if path, err := filepath.Abs(path); err == nil {
			paths = append(paths, path)
		}
	}
	return paths
}

// FDs gives the process's open file descriptors and what they are, without those
// of the Go runtime's poller.
func FDs() map[string]string {
	fds := map[string]string{}
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		panic(err) // no /proc, no tests
	}
	for _, e := range entries {
		what, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name()))
		// The directory's own descriptor is closed by now.
		if err != nil || strings.HasPrefix(what, "anon_inode:[event") {
			continue
		}
		fds[e.Name()] = what
	}
	return fds
}
