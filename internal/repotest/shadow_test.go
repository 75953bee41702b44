package repotest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"path"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// checkShadows finds names of functions, and of what is in them, that hide a builtin, such as
// len, or a package that the file imports. Fields and methods hide nothing.
func checkShadows(fset *token.FileSet, f *ast.File) []string {
	hidden := map[string]string{}
	for _, name := range types.Universe.Names() {
		hidden[name] = "builtin"
	}
	for _, spec := range f.Imports {
		imported := strings.Trim(spec.Path.Value, `"`)
		name := path.Base(imported)
		if len(name) == 2 && name[0] == 'v' {
			name = path.Base(path.Dir(imported)) // a module's major version
		}
		if spec.Name != nil {
			name = spec.Name.Name
		}
		hidden[name] = "package"
	}
	var found []string
	check := func(names ...ast.Expr) {
		for _, e := range names {
			if id, ok := e.(*ast.Ident); ok && id.Name != "_" && hidden[id.Name] != "" {
				found = append(found, fmt.Sprintf("%s: %s hides the %s", position(fset, id), id.Name, hidden[id.Name]))
			}
		}
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.AssignStmt:
			if n.Tok == token.DEFINE {
				check(n.Lhs...)
			}
		case *ast.RangeStmt:
			if n.Tok == token.DEFINE {
				check(n.Key, n.Value)
			}
		case *ast.ValueSpec:
			for _, id := range n.Names {
				check(id)
			}
		case *ast.TypeSpec:
			check(n.Name)
		case *ast.FuncDecl:
			if n.Recv == nil {
				check(n.Name)
				break
			}
			for _, id := range n.Recv.List[0].Names {
				check(id)
			}
		case *ast.FuncType:
			for _, list := range []*ast.FieldList{n.TypeParams, n.Params, n.Results} {
				if list == nil {
					continue
				}
				for _, field := range list.List {
					for _, id := range field.Names {
						check(id)
					}
				}
			}
		}
		return true
	})
	return found
}

func TestNamesHideNoBuiltinAndNoPackage(t *testing.T) {
	t.Parallel()
	walk(t, func(name string) bool { return strings.HasSuffix(name, ".go") }, func(name string) {
		fset := token.NewFileSet()
		f := must.Of(parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)).Get(t)
		for _, finding := range checkShadows(fset, f) {
			t.Error(short(t, finding))
		}
	})
}

func TestNamesThatHideAreFound(t *testing.T) {
	t.Parallel()
	fset, files := parse(t, `package p

import (
	"example.com/lib/v2"
	"net/url"
	_ "os"
	other "strings"
)

type T struct{ len, url int }

func (new *T) close() {}
func clear(max int) (min int) {
	new, url, _ := 1, new(T), v2
	for cap := range 3 {
		var make, lib = cap, 2
	}
	f := func(other int) { max = 5 }
}

type any struct{}
`)
	mustFind(t, []string{
		"made-up.go:12: new hides the builtin",
		"made-up.go:13: clear hides the builtin",
		"made-up.go:13: max hides the builtin",
		"made-up.go:13: min hides the builtin",
		"made-up.go:14: new hides the builtin",
		"made-up.go:14: url hides the package",
		"made-up.go:15: cap hides the builtin",
		"made-up.go:16: make hides the builtin",
		"made-up.go:16: lib hides the package",
		"made-up.go:18: other hides the package",
		"made-up.go:21: any hides the builtin",
	}, checkShadows(fset, files[0]))
}
