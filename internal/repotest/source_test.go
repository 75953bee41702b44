package repotest

import (
	"fmt"
	"go/ast"
	"go/token"
	"slices"
	"strings"
	"testing"
)

// checkGlobals finds what a package does or keeps before and beside its functions.
// A package-level variable may be an error for callers to compare with, or a
// compile-time assertion.
func checkGlobals(fset *token.FileSet, files []*ast.File) []string {
	var found []string
	for _, f := range files {
		for _, decl := range f.Decls {
			switch d := decl.(type) {
			case *ast.FuncDecl:
				if d.Recv == nil && d.Name.Name == "init" {
					found = append(found, fmt.Sprintf("%s: func init: what it does happens to every program that imports the package", position(fset, d)))
				}
			case *ast.GenDecl:
				if d.Tok != token.VAR {
					continue
				}
				for _, spec := range d.Specs {
					found = append(found, checkVars(fset, spec.(*ast.ValueSpec))...)
				}
			}
		}
	}
	return found
}

func checkVars(fset *token.FileSet, spec *ast.ValueSpec) []string {
	var found []string
	for i, name := range spec.Names {
		if name.Name == "_" {
			continue
		}
		if i < len(spec.Values) && isErrorName(name.Name) && isSentinel(spec.Values[i]) {
			continue
		}
		found = append(found, fmt.Sprintf("%s: var %s: state belongs to a value, and a table into a function", position(fset, name), name.Name))
	}
	return found
}

func isErrorName(name string) bool {
	return strings.HasPrefix(name, "Err") || strings.HasPrefix(name, "err")
}

// isSentinel takes errors.New(…), and the sentinel of another package.
func isSentinel(e ast.Expr) bool {
	if call, ok := e.(*ast.CallExpr); ok {
		return isSelector(call.Fun, "errors", "New")
	}
	s, ok := e.(*ast.SelectorExpr)
	return ok && isErrorName(s.Sel.Name)
}

func isSelector(e ast.Expr, pkg, name string) bool {
	s, ok := e.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	x, ok := s.X.(*ast.Ident)
	return ok && x.Name == pkg && s.Sel.Name == name
}

// position is a file's name, and the line.
func position(fset *token.FileSet, n ast.Node) string {
	p := fset.Position(n.Pos())
	return fmt.Sprintf("%s:%d", p.Filename, p.Line)
}

func TestPackagesKeepNoState(t *testing.T) {
	t.Parallel()
	for _, p := range shippedPackages(t) {
		fset, files := p.files(t)
		for _, finding := range checkGlobals(fset, files) {
			t.Error(short(t, finding))
		}
	}
}

func TestStateOfPackagesIsFound(t *testing.T) {
	t.Parallel()
	fset, files := parse(t, `package p

import "errors"

var ErrGone = errors.New("gone")
var errThere = other.ErrThere
var _ error = (*T)(nil)

var table = map[string]int{}
var ErrMutable error
var (
	errA, b = errors.New("a"), 1
)

func init() {}

func (T) init() {}
`)
	mustFind(t, []string{
		"made-up.go:9: var table: state belongs to a value, and a table into a function",
		"made-up.go:10: var ErrMutable: state belongs to a value, and a table into a function",
		"made-up.go:12: var b: state belongs to a value, and a table into a function",
		"made-up.go:15: func init: what it does happens to every program that imports the package",
	}, checkGlobals(fset, files))
}

// checkCalls finds calls that only some packages may make.
func checkCalls(fset *token.FileSet, files []*ast.File, pkg string, names ...string) []string {
	var found []string
	for _, f := range files {
		ast.Inspect(f, func(n ast.Node) bool {
			if call, ok := n.(*ast.CallExpr); ok && slices.ContainsFunc(names, func(name string) bool { return isSelector(call.Fun, pkg, name) }) {
				found = append(found, fmt.Sprintf("%s: %s.%s", position(fset, n), pkg, call.Fun.(*ast.SelectorExpr).Sel.Name))
			}
			return true
		})
	}
	return found
}

func TestThreadsAreLockedInOnePlace(t *testing.T) {
	t.Parallel()
	allowed := map[string]string{
		"netns": "it enters namespaces, which threads do",
	}
	for _, p := range shippedPackages(t) {
		fset, files := p.files(t)
		found := checkCalls(fset, files, "runtime", "LockOSThread")
		if allowed[p.rel()] != "" {
			if len(found) == 0 {
				t.Errorf("%s has an exception that it does not need", p.rel())
			}
			continue
		}
		for _, finding := range found {
			t.Errorf("%s: use (*netns.NS).Do", short(t, finding))
		}
	}
}

func TestOnlyCommandsEndTheProcess(t *testing.T) {
	t.Parallel()
	for _, p := range shippedPackages(t) {
		if p.Name == "main" {
			continue
		}
		fset, files := p.files(t)
		for _, finding := range checkCalls(fset, files, "os", "Exit") {
			t.Errorf("%s: return an error", short(t, finding))
		}
	}
}

func TestCallsAreFound(t *testing.T) {
	t.Parallel()
	fset, files := parse(t, `package p

func f() {
	go func() { runtime.LockOSThread() }()
	runtime.UnlockOSThread()
}
`)
	mustFind(t, []string{"made-up.go:4: runtime.LockOSThread"}, checkCalls(fset, files, "runtime", "LockOSThread"))
}
