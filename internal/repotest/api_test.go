package repotest

import (
	"fmt"
	"go/importer"
	"go/token"
	"go/types"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// The exported API is in testdata/api, a line a symbol, so that a change of it is
// seen in a review. No type of an internal package is in it: an embedder could
// neither name nor make one.
func TestExportedAPI(t *testing.T) {
	t.Parallel()
	imp := compiled(t)
	for _, name := range publicPackages() {
		path := module
		if name != "." {
			path += "/" + name
		}
		p := must.Of(imp.Import(path)).Get(t)
		lines := describe(p)
		for _, line := range internalTypes(lines) {
			t.Errorf("package %s: an exported symbol mentions an internal type: %s", p.Name(), line)
		}
		golden.Compare(t, filepath.Join("api", p.Name()+".txt"), strings.Join(lines, "\n")+"\n")
	}
}

// compiled imports the public packages, and what they import, as the compiler
// left them.
func compiled(t *testing.T) types.Importer {
	t.Helper()
	args := []string{"list", "-export", "-deps", "-f", "{{.ImportPath}} {{.Export}}"}
	for _, name := range publicPackages() {
		args = append(args, "./"+name)
	}
	files := map[string]string{}
	// As the test itself was compiled, since nothing is to be compiled again for this.
	env := []string{"CGO_ENABLED=" + os.Getenv("CGO_ENABLED")}
	for line := range strings.Lines(string(goCommand(t, env, args...))) {
		if path, file, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			files[path] = file
		}
	}
	return importer.ForCompiler(token.NewFileSet(), "gc", func(path string) (io.ReadCloser, error) {
		return os.Open(files[path])
	})
}

// internalTypes are the lines of a description that mention a type of an internal package.
func internalTypes(lines []string) []string {
	return slices.DeleteFunc(slices.Clone(lines), func(line string) bool { return !strings.Contains(line, "/internal/") })
}

// describe gives a line for each exported symbol of a package, field and method. Of an
// internal package it gives the path, of another one the name.
func describe(p *types.Package) []string {
	qualify := func(other *types.Package) string {
		if other == p {
			return ""
		}
		if strings.Contains(other.Path(), "/internal/") {
			return other.Path()
		}
		return other.Name()
	}
	var list []string
	for _, name := range p.Scope().Names() {
		obj := p.Scope().Lookup(name)
		if !obj.Exported() {
			continue
		}
		switch obj := obj.(type) {
		case *types.Const:
			list = append(list, fmt.Sprintf("const %s %s = %s", name, types.TypeString(obj.Type(), qualify), obj.Val().ExactString()))
		case *types.TypeName:
			list = append(list, describeType(obj, qualify)...)
		default:
			list = append(list, types.ObjectString(obj, qualify))
		}
	}
	slices.Sort(list)
	return list
}

func describeType(obj *types.TypeName, qualify types.Qualifier) []string {
	name := obj.Name()
	if obj.IsAlias() {
		return []string{fmt.Sprintf("type %s = %s", name, types.TypeString(types.Unalias(obj.Type()), qualify))}
	}
	var list []string
	switch under := obj.Type().Underlying().(type) {
	case *types.Struct:
		line := "type " + name + " struct"
		for i := range under.NumFields() {
			f := under.Field(i)
			switch {
			case !f.Exported():
				line = "type " + name + " struct with fields of its own"
			case f.Embedded():
				list = append(list, fmt.Sprintf("field %s.%s embedded", name, types.TypeString(f.Type(), qualify)))
			default:
				list = append(list, fmt.Sprintf("field %s.%s %s", name, f.Name(), types.TypeString(f.Type(), qualify)))
			}
		}
		if !types.Comparable(under) {
			line += ", not comparable"
		}
		list = append(list, line)
	case *types.Interface:
		list = append(list, "type "+name+" interface")
	default:
		list = append(list, fmt.Sprintf("type %s %s", name, types.TypeString(under, qualify)))
	}
	return append(list, describeMethods(obj, qualify)...)
}

// describeMethods gives those of the value and of the pointer, also where they come
// from an embedded field.
func describeMethods(obj *types.TypeName, qualify types.Qualifier) []string {
	var list []string
	value := types.NewMethodSet(obj.Type())
	all := value
	if !types.IsInterface(obj.Type()) {
		all = types.NewMethodSet(types.NewPointer(obj.Type()))
	}
	for m := range all.Methods() {
		f := m.Obj().(*types.Func)
		if !f.Exported() {
			continue
		}
		receiver := obj.Name()
		if value.Lookup(f.Pkg(), f.Name()) == nil {
			receiver = "*" + receiver
		}
		list = append(list, fmt.Sprintf("method (%s) %s%s", receiver, f.Name(), strings.TrimPrefix(types.TypeString(f.Type(), qualify), "func")))
	}
	return list
}

func TestDescriptionOfAnAPI(t *testing.T) {
	t.Parallel()
	fset, files := parse(t, `package p

const C Flags = 1 << 4
const text = "not exported"

var ErrGone error

type Flags uint8
func (f Flags) Has(other Flags) bool { return f&other != 0 }

type S struct {
	A, B int
	Flags
	c func()
}
func (s *S) Do(fn func() error) (changed bool, _ error) { return false, fn() }
func (s *S) hidden() {}

type I interface{ Next() (*S, error) }
type Alias = S
func New(names ...string) *S { return nil }
`)
	p := must.Of(new(types.Config).Check("p", fset, files, nil)).Get(t)
	mustFind(t, []string{
		"const C Flags = 16",
		"field S.A int",
		"field S.B int",
		"field S.Flags embedded",
		"func New(names ...string) *S",
		"method (*S) Do(fn func() error) (changed bool, _ error)",
		"method (Flags) Has(other Flags) bool",
		"method (I) Next() (*S, error)",
		"method (S) Has(other Flags) bool", // from what it embeds
		"type Alias = S",
		"type Flags uint8",
		"type I interface",
		"type S struct with fields of its own, not comparable",
		"var ErrGone error",
	}, describe(p))
}

func TestInternalTypesInAnAPIAreFound(t *testing.T) {
	t.Parallel()
	hidden := types.NewPackage(module+"/internal/nl", "nl")
	name := types.NewTypeName(token.NoPos, hidden, "Conn", nil)
	types.NewNamed(name, types.NewStruct(nil, nil), nil)
	hidden.Scope().Insert(name)
	hidden.MarkComplete()
	fset, files := parse(t, `package p

import "`+module+`/internal/nl"

type Shown struct { conn *nl.Conn }
type Field struct { Conn *nl.Conn }
type Embedded struct { *nl.Conn }
type Alias = nl.Conn
type Result func() []nl.Conn
type I interface { Do(map[string]nl.Conn) }
func On(c *nl.Conn) *Shown { return nil }
func (s *Shown) Use(func(...nl.Conn)) {}
func (s *Shown) use(nl.Conn) {}
var ErrGone error
`)
	conf := types.Config{Importer: importerFunc(func(string) (*types.Package, error) { return hidden, nil })}
	p := must.Of(conf.Check("p", fset, files, nil)).Get(t)
	conn := module + "/internal/nl.Conn"
	mustFind(t, []string{
		"field Embedded.*" + conn + " embedded",
		"field Field.Conn *" + conn,
		"func On(c *" + conn + ") *Shown",
		"method (*Shown) Use(func(..." + conn + "))",
		"method (I) Do(map[string]" + conn + ")",
		"type Alias = " + conn,
		"type Result func() []" + conn,
	}, internalTypes(describe(p)))
}

type importerFunc func(path string) (*types.Package, error)

func (f importerFunc) Import(path string) (*types.Package, error) { return f(path) }
