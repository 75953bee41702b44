package repotest

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// coming are dependencies that docs/dev/dependencies.md has already, and go.mod has not.
func coming() []string { return nil }

// tables gives the rows of a page's tables, below their headings.
func tables(t *testing.T, page string) [][][]string {
	t.Helper()
	text := must.Of(os.ReadFile(filepath.Join(root(t), page))).Get(t)
	var all [][][]string
	within := false
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "|") {
			within = false
			continue
		}
		var row []string
		for cell := range strings.SplitSeq(strings.Trim(strings.TrimSpace(line), "|"), "|") {
			row = append(row, strings.TrimSpace(cell))
		}
		if !within {
			all = append(all, nil)
		}
		within = true
		all[len(all)-1] = append(all[len(all)-1], row)
	}
	for i := range all {
		all[i] = all[i][min(2, len(all[i])):] // the heading, and the line below it
	}
	return all
}

// direct gives a module's direct requirements, but for ours: "path version".
func direct(t *testing.T, dir string) []string {
	t.Helper()
	text := must.Of(os.ReadFile(filepath.Join(root(t), dir, "go.mod"))).Get(t)
	var list []string
	for _, m := range regexp.MustCompile(`(?m)^(?:require )?\s*(\S+\.\S+/\S+) (v\S+)(\s*// indirect)?$`).FindAllStringSubmatch(string(text), -1) {
		if m[3] == "" && m[1] != module {
			list = append(list, m[1]+" "+m[2])
		}
	}
	return list
}

func TestDependenciesPageIsThatOfTheModules(t *testing.T) {
	t.Parallel()
	all := tables(t, "docs/dev/dependencies.md")
	must.That(t, len(all) == 3, "%d tables, want 3", len(all))
	var told []string
	for _, row := range all[0] {
		told = append(told, row[0]+" "+row[1])
	}
	have := direct(t, ".")
	told = slices.DeleteFunc(told, func(line string) bool {
		name, _, _ := strings.Cut(line, " ")
		return slices.Contains(coming(), name) && !slices.Contains(have, line)
	})
	slices.Sort(told)
	slices.Sort(have)
	mustFind(t, have, told)

	var inNested []string
	for _, dir := range []string{"bench/report", "docs/dev/upstream", "test/cni", "test/containerd", "test/embed"} {
		for _, line := range direct(t, dir) {
			inNested = append(inNested, line+" "+dir)
		}
	}
	var toldNested []string
	for _, row := range all[1] {
		for dir := range strings.SplitSeq(row[2], ", ") {
			toldNested = append(toldNested, row[0]+" "+row[1]+" "+dir)
		}
	}
	slices.Sort(inNested)
	slices.Sort(toldNested)
	mustFind(t, inNested, toldNested)
}

func TestDependenciesPageKnowsWhatIsByHand(t *testing.T) {
	t.Parallel()
	for _, row := range tables(t, "docs/dev/dependencies.md")[2] {
		if len(row) != 5 || row[4] == "" {
			t.Errorf("%v has no reason", row)
			continue
		}
		told, err := strconv.Atoi(row[2])
		expect.Success(t, err)
		lines := 0
		for path := range strings.SplitSeq(row[1], ", ") {
			lines += linesOf(t, path)
		}
		// The page is to be true, and not to be touched with each line.
		if diff := lines - told; diff > told/4+10 || -diff > told/4+10 {
			t.Errorf("%s: %s has %d lines, the page says %d", row[0], row[1], lines, told)
		}
	}
}

// linesOf counts those of a file, or of a folder's Go files without its tests and the
// folders within it.
func linesOf(t *testing.T, path string) int {
	t.Helper()
	full := filepath.Join(root(t), path)
	lines := 0
	walk(t, func(p string) bool {
		return p == full || strings.HasPrefix(p, full+"/") && strings.HasSuffix(p, ".go") && !strings.HasSuffix(p, "_test.go")
	}, func(p string) {
		data := must.Of(os.ReadFile(p)).Get(t)
		lines += strings.Count(string(data), "\n")
	})
	expect.That(t, lines != 0, "docs/dev/dependencies.md names %s, which is not there", path)
	return lines
}

// report is one of docs/dev/upstream.
type report struct {
	page, library, test, path, symbol string
}

func reports(t *testing.T) []report {
	t.Helper()
	pages := must.Of(filepath.Glob(filepath.Join(root(t), "docs", "dev", "upstream", "*.md"))).Get(t)
	says := regexp.MustCompile("\n`(.+)` fails with (.+)\\.\n\nWorked around in `(.+)`: `(.+)`\\.\n$")
	var list []report
	for _, page := range pages {
		if filepath.Base(page) == "README.md" {
			continue
		}
		r := report{page: short(t, page)}
		text := must.Of(os.ReadFile(page)).Get(t)
		if m := says.FindStringSubmatch(string(text)); m != nil {
			r.test, r.library, r.path, r.symbol = m[1], m[2], m[3], m[4]
		}
		list = append(list, r)
	}
	must.That(t, len(list) >= 20, "%d reports: the search cannot be right", len(list))
	return list
}

// checkReport finds what a report says that is not so.
func checkReport(r report, index string, versions, tests []string, declared func(path, symbol string) bool) []string {
	var found []string
	say := func(format string, args ...any) {
		found = append(found, r.page+": "+fmt.Sprintf(format, args...))
	}
	if !slices.Contains(versions, r.library) {
		say("%q is not what go.mod of docs/dev/upstream has", r.library)
	}
	if !slices.Contains(tests, r.test) {
		say("%q is no test of docs/dev/upstream", r.test)
	}
	if r.path == "" || !declared(r.path, r.symbol) {
		say("%s declares no %q: has the workaround moved, or can the report go?", r.path, r.symbol)
	}
	if !strings.Contains(index, "("+filepath.Base(r.page)+")") {
		say("the index has no link to it")
	}
	return found
}

func TestUpstreamReportsAreTrue(t *testing.T) {
	t.Parallel()
	index := must.Of(os.ReadFile(filepath.Join(root(t), "docs", "dev", "upstream", "README.md"))).Get(t)
	versions := direct(t, "docs/dev/upstream")
	own := direct(t, ".")
	for _, line := range versions {
		name, _, _ := strings.Cut(line, " ")
		expect.That(t, slices.Contains(own, line) || slices.Contains(coming(), name),
			"docs/dev/upstream has %s, and the module another version: see whether its tests still fail", line)
	}
	tests := upstreamTests(t)
	named := map[string]bool{}
	for _, r := range reports(t) {
		named[r.test] = true
		for _, finding := range checkReport(r, string(index), versions, tests, func(path, symbol string) bool { return declares(t, path, symbol) }) {
			t.Error(finding)
		}
	}
	for _, name := range tests {
		expect.That(t, named[name], "%s of docs/dev/upstream is named by no report", name)
	}
}

func TestUpstreamReportsThatAreNotTrueAreFound(t *testing.T) {
	t.Parallel()
	r := report{page: "docs/dev/upstream/a.md", library: "example.com/lib v1.0.0", test: "TestA", path: "nl", symbol: "read"}
	yes := func(string, string) bool { return true }
	no := func(string, string) bool { return false }
	mustFind(t, nil, checkReport(r, "(a.md)", []string{"example.com/lib v1.0.0"}, []string{"TestA"}, yes))
	mustFind(t, []string{
		`docs/dev/upstream/a.md: "example.com/lib v1.0.0" is not what go.mod of docs/dev/upstream has`,
		`docs/dev/upstream/a.md: "TestA" is no test of docs/dev/upstream`,
		`docs/dev/upstream/a.md: nl declares no "read": has the workaround moved, or can the report go?`,
		"docs/dev/upstream/a.md: the index has no link to it",
	}, checkReport(r, "(b.md)", []string{"example.com/lib v1.1.0"}, []string{"TestB"}, no))
}

func upstreamTests(t *testing.T) []string {
	t.Helper()
	files := must.Of(filepath.Glob(filepath.Join(root(t), "docs", "dev", "upstream", "*_test.go"))).Get(t)
	var list []string
	for _, path := range files {
		list = append(list, functions(t, path, "Test")...)
	}
	return list
}

// declares says whether a file, or one of a folder's, has a function, method, type,
// constant or variable of that name.
func declares(t *testing.T, path, symbol string) bool {
	t.Helper()
	full, found := filepath.Join(root(t), path), false
	declaration := regexp.MustCompile(`(?m)^(func (\([^)]*\) )?|type |const |var |\t)` + regexp.QuoteMeta(symbol) + `\b( +[a-z.A-Z*\[]| *=|\()`)
	walk(t, func(p string) bool {
		return (p == full || strings.HasPrefix(p, full+"/")) && strings.HasSuffix(p, ".go") && !strings.HasSuffix(p, "_test.go")
	}, func(p string) {
		data := must.Of(os.ReadFile(p)).Get(t)
		found = found || declaration.Match(data)
	})
	return found
}
