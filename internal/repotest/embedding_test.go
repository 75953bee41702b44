package repotest

import (
	"fmt"
	"go/parser"
	"go/token"
	goversion "go/version"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// unwelcome are packages that no program should get for importing one of the public ones, with
// what is below them.
func unwelcome() map[string]string {
	return map[string]string{
		"net/http":                           "nothing is served or fetched",
		"crypto/tls":                         "nothing is encrypted",
		"os/exec":                            "nothing is started",
		"os/signal":                          "signals are the program's",
		"flag":                               "the command line is the program's",
		"testing":                            "fixtures are for tests",
		"expvar":                             "metrics are the program's",
		"compress":                           "nothing is compressed",
		"archive":                            "nothing is unpacked",
		"text/template":                      "it keeps the linker from dropping methods",
		"encoding/gob":                       "state is JSON",
		"database/sql":                       "state is files",
		"github.com/containernetworking":     "a program that embeds these packages need not speak CNI",
		"github.com/prometheus":              "metrics are the program's",
		"github.com/klauspost":               "nothing is compressed",
		"github.com/pierrec":                 "nothing is compressed",
		"github.com/vishvananda":             "netlink is mdlayher's",
		module + "/internal/cni":             "a program that embeds these packages need not speak CNI",
		module + "/internal/ipam/delegate":   "nothing is started",
		module + "/internal/testutil/nstest": "fixtures are for tests",
		module + "/internal/testutil/golden": "fixtures are for tests",
		module + "/internal/testutil/nltest": "fixtures are for tests",
		module + "/internal/testutil/must":   "fixtures are for tests",
		module + "/internal/testutil/expect": "fixtures are for tests",
	}
}

// comesWith are what is unwelcome and cannot be had otherwise, for the packages that import
// the one named.
func comesWith() map[string]string {
	return map[string]string{
		// dhcpv4 reads packets by a lexer of u-root/uio, whose package has a reader of archives as
		// well. The linker leaves 3 kB of it.
		"github.com/pierrec": "github.com/insomniacslk/dhcp/dhcpv4",
	}
}

// checkEmbedding finds what is unwelcome in what the public packages bring along.
func checkEmbedding(public []string, list []*pkg) []string {
	var found []string
	for _, p := range list {
		if !slices.Contains(public, p.rel()) {
			continue
		}
		for _, dep := range p.Deps {
			for banned, why := range unwelcome() {
				excuse := comesWith()[banned]
				if within(dep, banned) && (excuse == "" || !slices.Contains(p.Deps, excuse)) {
					found = append(found, fmt.Sprintf("%s brings %s along: %s", p.rel(), dep, why))
				}
			}
		}
	}
	return sorted(found)
}

// What a program gets that imports a public package: the modules of all that the package
// needs, a line a package, so that another one is seen in a review.
func TestWhatEmbeddersGet(t *testing.T) {
	t.Parallel()
	list := packages(t)
	for _, finding := range checkEmbedding(publicPackages(), list) {
		t.Error(finding)
	}
	module := map[string]string{}
	for _, p := range list {
		if p.Module != nil && p.rel() == "" {
			module[p.ImportPath] = p.Module.Path
		}
	}
	var lines []string
	for _, p := range list {
		if !slices.Contains(publicPackages(), p.rel()) {
			continue
		}
		var modules []string
		for _, dep := range p.Deps {
			if m := module[dep]; m != "" {
				modules = append(modules, m)
			}
		}
		slices.Sort(modules)
		lines = append(lines, strings.TrimSpace(p.rel()+": "+strings.Join(slices.Compact(modules), " ")))
	}
	slices.Sort(lines)
	golden.Compare(t, "embedding.txt", strings.Join(lines, "\n")+"\n")
}

func TestWhatIsUnwelcomeToEmbeddersIsFound(t *testing.T) {
	t.Parallel()
	made := func(name string, deps ...string) *pkg { return &pkg{ImportPath: module + "/" + name, Deps: deps} }
	mustFind(t, []string{
		"bridge brings compress/gzip along: nothing is compressed",
		"bridge brings github.com/pierrec/lz4/v4 along: nothing is compressed",
		"bridge brings net/http along: nothing is served or fetched",
		"dhcpc brings github.com/prometheus/client_golang/prometheus along: metrics are the program's",
	}, checkEmbedding([]string{"bridge", "dhcpc"}, []*pkg{
		made("bridge", "fmt", "net/http", "compress/gzip", "github.com/pierrec/lz4/v4"),
		made("dhcpc", "github.com/insomniacslk/dhcp/dhcpv4", "github.com/pierrec/lz4/v4", "github.com/prometheus/client_golang/prometheus"),
		made("internal/cni", "os/exec"),
	}))
}

// The go line of go.mod is not the newest Go but the least that the modules which users get
// allow: a new one is a decision that is seen here.
func TestTheLeastGoIsThatOfTheDependencies(t *testing.T) {
	t.Parallel()
	const format = "{{with .Module}}{{if .Main}}main {{end}}{{.GoVersion}} {{.Path}}{{end}}"
	least, ours := "", ""
	for line := range strings.Lines(string(goCommand(t, nil, "list", "-deps", "-f", format, "./cmd/..."))) {
		if version, main := strings.CutPrefix(strings.TrimSpace(line), "main "); main {
			ours, _, _ = strings.Cut(version, " ")
			continue
		}
		version, _, _ := strings.Cut(line, " ")
		if goversion.Compare("go"+version, "go"+least) > 0 {
			least = version
		}
	}
	expect.That(t, ours == least, "go.mod says go %s, and the modules of the programs need %s", ours, least)
}

// A reader who copies an example can import what it imports.
func TestExamplesImportNothingInternal(t *testing.T) {
	t.Parallel()
	seen := 0
	for _, name := range publicPackages() {
		paths := must.Of(filepath.Glob(filepath.Join(root(t), name, "example*_test.go"))).Get(t)
		for _, path := range paths {
			seen++
			file := must.Of(parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)).Get(t)
			for _, imported := range file.Imports {
				expect.That(t, !strings.Contains(imported.Path.Value, "/internal/"),
					"%s imports %s", short(t, path), imported.Path.Value)
			}
			expect.That(t, strings.HasSuffix(file.Name.Name, "_test"),
				"%s is in package %s, where it sees what users do not", short(t, path), file.Name.Name)
		}
	}
	expect.That(t, seen >= 5, "only %d files of examples: the list cannot be right", seen)
}
