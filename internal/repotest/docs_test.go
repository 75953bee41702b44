package repotest

import (
	"fmt"
	"go/ast"
	"go/doc/comment"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// checkDocs finds exported symbols without a comment of their own, or, for those of
// a group, of the group or on their line.
func checkDocs(fset *token.FileSet, files []*ast.File) []string {
	var found []string
	bare := func(n ast.Node, name string) {
		found = append(found, fmt.Sprintf("%s: %s is exported and has no comment", position(fset, n), name))
	}
	for _, f := range files {
		for _, decl := range f.Decls {
			switch d := decl.(type) {
			case *ast.FuncDecl:
				if d.Name.IsExported() && d.Doc == nil && (d.Recv == nil || ast.IsExported(receiver(d)) && !isStandardMethod(d.Name.Name)) {
					bare(d, d.Name.Name)
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					checkSpec(d, spec, bare)
				}
			}
		}
	}
	return found
}

func checkSpec(d *ast.GenDecl, spec ast.Spec, bare func(ast.Node, string)) {
	switch s := spec.(type) {
	case *ast.TypeSpec:
		if s.Name.IsExported() && d.Doc == nil && s.Doc == nil {
			bare(s, s.Name.Name)
		}
	case *ast.ValueSpec:
		for _, name := range s.Names {
			if name.IsExported() && d.Doc == nil && s.Doc == nil && s.Comment == nil {
				bare(name, name.Name)
			}
		}
	}
}

// isStandardMethod takes methods whose interface says what they do.
func isStandardMethod(name string) bool {
	return slices.Contains([]string{"Error", "Unwrap", "String"}, name)
}

func receiver(d *ast.FuncDecl) string {
	t := d.Recv.List[0].Type
	if star, ok := t.(*ast.StarExpr); ok {
		t = star.X
	}
	if generic, ok := t.(*ast.IndexExpr); ok {
		t = generic.X
	}
	if name, ok := t.(*ast.Ident); ok {
		return name.Name
	}
	return ""
}

func TestEverythingExportedIsDocumented(t *testing.T) {
	t.Parallel()
	for _, p := range packages(t) {
		if p.rel() == "" || p.Name == "main" {
			continue
		}
		fset, files := p.files(t)
		for _, finding := range checkDocs(fset, files) {
			t.Error(short(t, finding))
		}
	}
}

func TestMissingDocumentationIsFound(t *testing.T) {
	t.Parallel()
	fset, files := parse(t, `package p

// A is documented.
type A struct{}

type B struct{}

func (B) Error() string { return "" }
func (B) Method()       {}
func (b *B) Other()     {}
func (c) Method()       {}

// Both are documented.
const (
	C = 1
	D = 2
)

const (
	E = 1
	F = 2 // is documented
)

func G() {}
func h() {}
`)
	mustFind(t, []string{
		"made-up.go:6: B is exported and has no comment",
		"made-up.go:9: Method is exported and has no comment",
		"made-up.go:10: Other is exported and has no comment",
		"made-up.go:20: E is exported and has no comment",
		"made-up.go:24: G is exported and has no comment",
	}, checkDocs(fset, files))
}

func TestPackagesHaveAComment(t *testing.T) {
	t.Parallel()
	for _, p := range packages(t) {
		if p.rel() == "" || len(p.GoFiles) == 0 {
			continue
		}
		fset, files := p.files(t)
		var where []string
		for _, f := range files {
			if f.Doc != nil {
				where = append(where, filepath.Base(fset.Position(f.Package).Filename))
			}
		}
		if len(where) != 1 {
			t.Errorf("%s has package comments in %v, want one", p.rel(), where)
			continue
		}
		// Where a reader looks first.
		if public := slices.Contains(publicPackages(), p.rel()); public && where[0] != "doc.go" && where[0] != p.Name+".go" {
			t.Errorf("%s has its package comment in %s, want doc.go", p.rel(), where[0])
		}
	}
}

// TestPackageDocsBeginWithAnExample holds the program of a package's doc to its Example, which has all of its lines,
// compiled, in that order, and handles errors besides.
func TestPackageDocsBeginWithAnExample(t *testing.T) {
	t.Parallel()
	words := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	for _, p := range packages(t) {
		if !slices.Contains(publicPackages(), p.rel()) {
			continue
		}
		_, files := p.files(t)
		doc := files[slices.IndexFunc(files, func(f *ast.File) bool { return f.Doc != nil })].Doc.Text()
		content := new(comment.Parser).Parse(doc).Content
		program, _ := content[1].(*comment.Code)
		must.That(t, program != nil && strings.Count(program.Text, "\n") < 11, "%s: no program of ten lines", p.ImportPath)
		var example []string
		for _, path := range must.Of(filepath.Glob(filepath.Join(p.Dir, "*_test.go"))).Get(t) {
			if slices.Contains(functions(t, path, "Example"), "Example") {
				example = strings.Split(string(must.Of(os.ReadFile(path)).Get(t)), "\n")
			}
		}
		for line := range strings.Lines(program.Text) {
			at := slices.IndexFunc(example, func(s string) bool { return words(s) == words(line) })
			must.That(t, at >= 0, "%s: its Example has no such line, or not in this order: %s", p.ImportPath, line)
			example = example[at+1:]
		}
	}
}

// functions are those of a file whose names begin so.
func functions(t *testing.T, path, prefix string) []string {
	t.Helper()
	f := must.Of(parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)).Get(t)
	var names []string
	for _, decl := range f.Decls {
		if d, ok := decl.(*ast.FuncDecl); ok && d.Recv == nil && strings.HasPrefix(d.Name.Name, prefix) {
			names = append(names, d.Name.Name)
		}
	}
	return names
}

func TestFilesAreShort(t *testing.T) {
	t.Parallel()
	walk(t, func(path string) bool { return strings.HasSuffix(path, ".go") }, func(path string) {
		limit := 700
		if strings.HasSuffix(path, "_test.go") {
			limit = 1000
		}
		data := must.Of(os.ReadFile(path)).Get(t)
		lines := strings.Count(string(data), "\n")
		expect.That(t, lines <= limit, "%s has %d lines, where %d are the most", short(t, path), lines, limit)
	})
}

// A fuzz target without a corpus finds on its first second what was found before.
func TestFuzzTargetsHaveACorpus(t *testing.T) {
	t.Parallel()
	targets := 0
	walk(t, func(path string) bool { return strings.HasSuffix(path, "_test.go") }, func(path string) {
		for _, name := range functions(t, path, "Fuzz") {
			targets++
			dir := filepath.Join(filepath.Dir(path), "testdata", "fuzz", name)
			entries, err := os.ReadDir(dir)
			expect.That(t, err == nil && len(entries) > 0, "%s has no corpus in %s", name, short(t, dir))
		}
	})
	expect.That(t, targets >= 10, "only %d fuzz targets found: the search cannot be right", targets)
}
