package repotest

import (
	"fmt"
	"go/ast"
	"go/token"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// exportedTypes lists the exported types of a package.
func exportedTypes(files []*ast.File) []string {
	var names []string
	for _, f := range files {
		for _, decl := range f.Decls {
			if d, ok := decl.(*ast.GenDecl); ok && d.Tok == token.TYPE {
				for _, spec := range d.Specs {
					names = append(names, spec.(*ast.TypeSpec).Name.Name)
				}
			}
		}
	}
	return slices.DeleteFunc(names, func(name string) bool { return !ast.IsExported(name) })
}

// typesThatMeet lists the names that a file uses for types of two packages. Conn and Config are what every package calls
// its own. types has each package's.
func typesThatMeet(f *ast.File, types map[string][]string) []string {
	paths := map[string]string{}
	for _, spec := range f.Imports {
		path, _ := strconv.Unquote(spec.Path.Value)
		name := path[strings.LastIndexByte(path, '/')+1:]
		if spec.Name != nil {
			name = spec.Name.Name
		}
		paths[name] = path
	}
	used := map[string]map[string]bool{"Conn": nil, "Config": nil}
	ast.Inspect(f, func(n ast.Node) bool {
		s, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if x, ok := s.X.(*ast.Ident); ok && slices.Contains(types[paths[x.Name]], s.Sel.Name) {
			if _, known := used[s.Sel.Name]; !known {
				used[s.Sel.Name] = map[string]bool{}
			}
			if used[s.Sel.Name] != nil {
				used[s.Sel.Name][relative(paths[x.Name])] = true
			}
		}
		return true
	})
	var met []string
	for name, packages := range used {
		if len(packages) > 1 {
			met = append(met, fmt.Sprint(name, " ", slices.Sorted(maps.Keys(packages))))
		}
	}
	return met
}

// A type's name means one thing in a file. The list of exceptions may only become shorter.
func TestNamesOfTypesDoNotMeet(t *testing.T) {
	t.Parallel()
	types := map[string][]string{}
	for _, p := range shippedPackages(t) {
		_, files := p.files(t)
		types[p.ImportPath] = exportedTypes(files)
	}
	met := map[string]bool{}
	for _, p := range shippedPackages(t) {
		_, files := p.files(t)
		for _, f := range files {
			for _, one := range typesThatMeet(f, types) {
				met[one] = true
			}
		}
	}
	for _, known := range []string{
		"Address [addr ipam]", "Attachment [bridge internal/state]", "Epoch [internal/state ipam]",
		"Filter [addr route]", "Link [bridge bridge/vlan]",
		"Network [internal/state nft]", "Route [dhcpc route]", "Share [bridge/share nft]",
	} {
		delete(met, known)
	}
	mustFind(t, nil, slices.Sorted(maps.Keys(met)))
}

func TestTypesThatMeetAreFound(t *testing.T) {
	t.Parallel()
	_, files := parse(t, strings.ReplaceAll(`package p
import ("a/x"; other "a/y"; "a/z")
var _, _, _, _ = x.T{}, other.T{}, x.Conn{}, z.Conn{}
var _, _ = x.U{}, z.V{}`, "a/", module+"/"))
	types := map[string][]string{module + "/x": {"T", "U", "Conn"}, module + "/y": {"T", "V"}, module + "/z": {"U", "V", "Conn"}}
	mustFind(t, []string{"T [x y]"}, typesThatMeet(files[0], types))
}
