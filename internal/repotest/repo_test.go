// Package repotest holds the repository to its own rules: what may import what, what
// the exported API is, that it is documented, and what the binary is made of. It
// has tests only.
package repotest

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// module is the path of the main module, which the names of our packages are
// relative to: "." is its root, "internal/nl" a package of it.
const module = "github.com/tombolo-cni/tombolo"

func root(t *testing.T) string {
	t.Helper()
	return must.Of(filepath.Abs("../..")).Get(t)
}

// publicPackages are what other modules may import.
func publicPackages() []string {
	return []string{".", "netns", "addr", "route", "bridge", "bridge/bandwidth", "bridge/share", "bridge/vlan", "nft", "nft/foreign", "hostport", "ipam", "network", "dhcpc", "dhcpc/transport"}
}

// tools are programs of the repository that nobody is given.
func tools() []string { return []string{"bench", "test/demo", "test/report"} }

// fixture reports whether the package is what tests share.
func fixture(name string) bool {
	return name == "internal/lockorder" || within(name, "internal/testutil")
}

// pkg is a package, ours or another, as go list has it.
type pkg struct {
	ImportPath   string
	Name         string
	Dir          string
	Imports      []string
	Deps         []string
	TestImports  []string
	XTestImports []string
	GoFiles      []string
	Standard     bool
	DepOnly      bool
	Module       *struct{ Path string }
}

// rel is the package's name relative to the module, empty if it is not ours.
func (p *pkg) rel() string { return relative(p.ImportPath) }

func relative(importPath string) string {
	if importPath == module {
		return "."
	}
	name, ours := strings.CutPrefix(importPath, module+"/")
	if !ours {
		return ""
	}
	return name
}

// shipped says whether the package ends up with users: in the binary, or imported.
func (p *pkg) shipped() bool {
	return p.rel() != "" && len(p.GoFiles) > 0 && !slices.Contains(tools(), p.rel()) && !fixture(p.rel())
}

// goCommand runs the go command as it is run for the binary.
func goCommand(t *testing.T, env []string, args ...string) []byte {
	t.Helper()
	// A test's result is kept until a file changes that the test itself has read, and
	// it does not see what this command reads.
	walk(t, func(path string) bool { return strings.HasSuffix(path, ".go") }, func(path string) {
		expect.Success(t, expect.Err(os.Stat(path)))
	})
	cmd := exec.Command("go", args...)
	cmd.Dir = root(t)
	cmd.Env = append(append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux"), env...)
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(cmd.Args, " "), err, errOut.Bytes())
	}
	return out
}

// packages lists the main module's packages and all that they import.
func packages(t *testing.T) []*pkg {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(goCommand(t, nil, "list", "-deps",
		"-json=ImportPath,Name,Dir,Imports,Deps,TestImports,XTestImports,GoFiles,Standard,DepOnly,Module", "./...")))
	var list []*pkg
	for {
		p := new(pkg)
		if err := d.Decode(p); errors.Is(err, io.EOF) {
			return list
		} else if err != nil {
			t.Fatal(err)
		}
		list = append(list, p)
	}
}

func shippedPackages(t *testing.T) []*pkg {
	t.Helper()
	list := slices.DeleteFunc(packages(t), func(p *pkg) bool { return !p.shipped() })
	must.That(t, len(list) >= 10, "only %d packages are shipped: the list cannot be right", len(list))
	return list
}

// files parses a package's files without its tests.
func (p *pkg) files(t *testing.T) (*token.FileSet, []*ast.File) {
	t.Helper()
	fset := token.NewFileSet()
	var list []*ast.File
	for _, name := range p.GoFiles {
		f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.ParseComments|parser.SkipObjectResolution)
		must.Succeed(t, err)
		list = append(list, f)
	}
	return fset, list
}

// parse makes a file of source text, for proofs that a rule finds what it forbids.
func parse(t *testing.T, source string) (*token.FileSet, []*ast.File) {
	t.Helper()
	fset := token.NewFileSet()
	f := must.Of(parser.ParseFile(fset, "made-up.go", source, parser.ParseComments|parser.SkipObjectResolution)).Get(t)
	return fset, []*ast.File{f}
}

// walk calls visit for the repository's files that match, nested modules included,
// with their paths.
func walk(t *testing.T, match func(path string) bool, visit func(path string)) {
	t.Helper()
	must.Succeed(t, filepath.WalkDir(root(t), func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.IsDir() && (e.Name() == ".git" || e.Name() == ".cache" || e.Name() == "bin"):
			return filepath.SkipDir
		case e.Type().IsRegular() && match(path):
			visit(path)
		}
		return nil
	}))
}

func short(t *testing.T, path string) string {
	t.Helper()
	rel, err := filepath.Rel(root(t), path)
	if err != nil {
		return path
	}
	return rel
}

// mustFind fails the test unless the findings are those that are wanted: it is for
// made-up violations, without which a rule might find nothing for want of looking.
func mustFind(t *testing.T, want, got []string) {
	t.Helper()
	expect.NoDiff(t, cmp.Diff(want, got), "findings")
}
