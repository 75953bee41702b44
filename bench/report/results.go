package main

import (
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/perf/benchfmt"
)

// results are the benchmarks' lines: the values of each name by their units. What was run
// more than once has several.
type results struct {
	names  []string // in the order of the run
	values map[string]map[string][]float64
	config map[string]string // what the run says of itself
}

// loadBefore is the key of how many CPUs others used right before a scenario, with two digits after the point.
const loadBefore = "load-before"

func newResults() *results {
	return &results{values: map[string]map[string][]float64{}, config: map[string]string{}}
}

// processors is what package testing adds to a name: GOMAXPROCS.
var processors = regexp.MustCompile(`-\d+$`)

func (r *results) read(from io.Reader, name string) error {
	lines := benchfmt.NewReader(from, name)
	for lines.Scan() {
		switch line := lines.Result().(type) {
		case *benchfmt.SyntaxError: // the line of a benchmark that failed
			fmt.Fprintln(os.Stderr, "report: passed over:", line)
		case *benchfmt.Result:
			r.add(line)
		}
	}
	return lines.Err()
}

func (r *results) add(line *benchfmt.Result) {
	name := processors.ReplaceAllString(line.Name.String(), "")
	if r.values[name] == nil {
		r.names = append(r.names, name)
		r.values[name] = map[string][]float64{}
	}
	for _, c := range line.Config {
		value := string(c.Value)
		if c.Key == loadBefore { // there is one before each scenario
			value = max(value, r.config[c.Key])
		}
		r.config[c.Key] = value
	}
	for _, v := range line.Values {
		unit, value := v.Unit, v.Value
		if v.OrigUnit != "" { // before benchfmt made seconds of nanoseconds
			unit, value = v.OrigUnit, v.OrigValue
		}
		r.values[name][unit] = append(r.values[name][unit], value)
	}
}

// get gives the median of a value, and whether there is one.
func (r *results) get(name, unit string) (float64, bool) {
	values := slices.Sorted(slices.Values(r.values[name][unit]))
	if len(values) == 0 {
		return 0, false
	}
	half := len(values) / 2
	if len(values)%2 == 0 {
		return (values[half-1] + values[half]) / 2, true
	}
	return values[half], true
}

// compared is the name of a contender's line in a scenario.
func compared(scenario, contender string) string {
	return "Exec/scenario=" + scenario + "/contender=" + contender
}

// under lists the names that begin with a benchmark's, less that beginning.
func (r *results) under(benchmark string) []string {
	var list []string
	for _, name := range r.names {
		if rest, ok := strings.CutPrefix(name, benchmark); ok {
			list = append(list, rest)
		}
	}
	return list
}
