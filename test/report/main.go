// Command report reads the events of go test -json from stdin, prints what failed
// in full and the rest in a line a package, and fails if a test failed, or was
// skipped without a reason on the list.
//
// A test that failed and, further down, passes was run again. It counts as flaky: it
// does not fail the run, and is named in the end, to be mended.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
)

// event is one line of go test -json (go doc test2json).
type event struct {
	Action     string
	Package    string
	ImportPath string
	Test       string
	Output     string
	Elapsed    float64
}

func main() {
	skips := flag.String("skips", "", "file of the tests that may be skipped")
	summary := flag.Bool("summary", false, "print the end only: what was flaky, and the counts")
	list := flag.String("failed", "", "file to write what failed to, as lines of PACKAGE TEST")
	flag.Parse()
	allowed, err := readSkips(*skips)
	if err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(2)
	}
	out := io.Writer(os.Stdout)
	if *summary {
		out = io.Discard
	}
	r := newRun(allowed, out)
	if err := r.read(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(2)
	}
	if *list != "" {
		if err := os.WriteFile(*list, []byte(strings.Join(r.toRunAgain(), "")), 0o600); err != nil {
			fmt.Fprintln(os.Stderr, "report:", err)
			os.Exit(2)
		}
	}
	if *summary {
		r.conclude(os.Stdout)
	}
	if len(r.failed) > 0 || r.passed == 0 {
		os.Exit(1)
	}
}

// readSkips reads lines of "package-suffix Test: reason".
func readSkips(path string) (map[string]bool, error) {
	allowed := map[string]bool{}
	if path == "" {
		return allowed, nil
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	for _, line := range strings.Split(string(data), "\n") {
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, reason, ok := strings.Cut(line, ": ")
		if !ok || strings.TrimSpace(reason) == "" {
			return nil, fmt.Errorf("%s: %q gives no reason", path, line)
		}
		allowed[name] = true
	}
	return allowed, nil
}

// run is the state of one reading.
type run struct {
	allowed         map[string]bool
	out             io.Writer
	output          map[string]*strings.Builder // by package and test
	failed, flaky   map[string]bool             // by package and test
	passed, skipped int
}

func newRun(allowed map[string]bool, out io.Writer) *run {
	return &run{allowed: allowed, out: out, output: map[string]*strings.Builder{}, failed: map[string]bool{}, flaky: map[string]bool{}}
}

func (r *run) read(in io.Reader) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			// The go command itself speaks here: a broken build, say.
			fmt.Fprintln(r.out, lines.Text())
			continue
		}
		r.take(&e)
	}
	return lines.Err()
}

func (r *run) take(e *event) {
	key := e.Package + e.ImportPath + " " + e.Test
	switch e.Action {
	case "output", "build-output":
		if r.output[key] == nil {
			r.output[key] = &strings.Builder{}
		}
		r.output[key].WriteString(e.Output)
	case "build-fail":
		r.failed[key] = true
		fmt.Fprint(r.out, r.output[key])
	case "fail":
		r.failed[key] = true
		if out := r.output[key]; out != nil {
			fmt.Fprint(r.out, out)
		}
		fmt.Fprintf(r.out, "FAIL  %s %s\n", e.Package, e.Test)
	case "skip":
		r.skip(e, key)
	case "pass":
		if r.failed[key] {
			delete(r.failed, key)
			r.flaky[key] = true
		}
		if e.Test != "" {
			r.passed++
		} else {
			fmt.Fprintf(r.out, "ok    %s  %.1fs\n", e.Package, e.Elapsed)
		}
		delete(r.output, key)
	}
}

func (r *run) skip(e *event, key string) {
	if e.Test == "" {
		return // a package without tests
	}
	r.skipped++
	for name := range r.allowed {
		suffix, test, _ := strings.Cut(name, " ")
		if strings.HasSuffix(e.Package, suffix) && (e.Test == test || strings.HasPrefix(e.Test, test+"/")) {
			return
		}
	}
	r.failed[key] = true
	fmt.Fprintf(r.out, "%sFAIL  %s %s was skipped, and is not on the list of tests that may be\n", r.output[key], e.Package, e.Test)
}

// toRunAgain lists the tests that failed, without those within others, and the packages
// that failed though none of their tests did, without a test's name: in one of them
// something hung, or the program died.
func (r *run) toRunAgain() []string {
	var lines []string
	blamed := map[string]bool{}
	for key := range r.failed {
		pkg, test, _ := strings.Cut(key, " ")
		if test == "" {
			continue
		}
		blamed[pkg] = true
		if !strings.Contains(test, "/") {
			lines = append(lines, key+"\n")
		}
	}
	for key := range r.failed {
		if pkg, test, _ := strings.Cut(key, " "); test == "" && !blamed[pkg] {
			lines = append(lines, pkg+"\n")
		}
	}
	slices.Sort(lines)
	return lines
}

// conclude names what was flaky, and counts.
func (r *run) conclude(out io.Writer) {
	flaky := 0
	for _, key := range slices.Sorted(maps.Keys(r.flaky)) {
		if _, test, _ := strings.Cut(key, " "); test != "" {
			flaky++
			fmt.Fprintf(out, "FLAKY %s failed, and passed when it was run again alone\n", key)
		}
	}
	fmt.Fprintf(out, "%d passed, %d failed, %d flaky, %d skipped\n", r.passed, len(r.failed), flaky, r.skipped)
}
