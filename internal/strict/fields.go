package strict

import (
	"reflect"
	"slices"
	"strings"
	"unicode"
)

// A field is one key that a struct takes.
type field struct {
	name   string
	index  []int // for reflect: through the embedded structs down to the field
	tagged bool  // named by a tag, which wins over a Go name at the same depth
}

// A table holds the fields of one struct type, those of embedded structs
// included, in the order of the source.
type table struct {
	typ    reflect.Type
	fields []field
}

// table returns the fields of t. They are kept for one call only: the hot path
// decodes one document in a process.
func (d *decoder) table(t reflect.Type) table {
	for i := range d.tables {
		if d.tables[i].typ == t {
			return d.tables[i]
		}
	}
	fields, embeds := collect(make([]field, 0, t.NumField()), t, nil, nil)
	if embeds {
		fields = dominant(fields)
	}
	made := table{typ: t, fields: fields}
	d.tables = append(d.tables, made)
	return made
}

// find returns the index of the field that has this name, or -1. It compares with one name after the other: an object has few
// fields, and a map would cost more to build than it saves in its one use.
func (t table) find(name []byte) int {
	for i := range t.fields {
		if t.fields[i].name == string(name) {
			return i
		}
	}
	return -1
}

// findFolded returns the index of the field that has this name but for upper and
// lower case, or -1. There are programs that write "HostPort" where the CNI
// conventions have "hostPort", since encoding/json takes one for the other.
func (t table) findFolded(name string) int {
	return slices.IndexFunc(t.fields, func(f field) bool { return strings.EqualFold(f.name, name) })
}

// names lists the keys that the struct takes.
func (t table) names() []string {
	names := make([]string, len(t.fields))
	for i := range t.fields {
		names[i] = t.fields[i].name
	}
	return names
}

// collect appends the fields of t, which is embedded through prefix within the
// types in parents, and says whether t embeds structs at all.
func collect(fields []field, t reflect.Type, prefix []int, parents []reflect.Type) ([]field, bool) {
	embeds := false
	depth := len(prefix) + 1
	indexes := make([]int, 0, depth*t.NumField()) // one allocation for all
	for i := range t.NumField() {
		sf := t.Field(i)
		structural := embedded(&sf)
		if !sf.IsExported() && structural == nil {
			continue
		}
		tag := sf.Tag.Get("json")
		if tag == "-" {
			continue
		}
		name, _, _ := strings.Cut(tag, ",")
		if !validName(name) {
			name = ""
		}
		indexes = append(append(indexes, prefix...), i)
		index := indexes[len(indexes)-depth : len(indexes) : len(indexes)]
		if name == "" && structural != nil {
			embeds = true
			if !contains(parents, structural) {
				fields, _ = collect(fields, structural, index, append(parents, t))
			}
			continue
		}
		f := field{name: name, index: index, tagged: name != ""}
		if name == "" {
			f.name = sf.Name
		}
		fields = append(fields, f)
	}
	return fields, embeds
}

// embedded returns the struct type that sf embeds, itself or by a pointer, or
// nil.
func embedded(sf *reflect.StructField) reflect.Type {
	if !sf.Anonymous {
		return nil
	}
	t := sf.Type
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return nil
	}
	return t
}

// contains reports whether t is in types.
func contains(types []reflect.Type, t reflect.Type) bool {
	for _, other := range types {
		if other == t {
			return true
		}
	}
	return false
}

// dominant keeps of several fields with one name the one that Go's rules and
// encoding/json's choose: the shallowest, of these the one that has a tag, and
// none at all where that leaves two.
func dominant(fields []field) []field {
	kept := make([]field, 0, len(fields))
	for i, f := range fields {
		wins := true
		for j, other := range fields {
			if i != j && other.name == f.name && !dominates(f, other) {
				wins = false
			}
		}
		if wins {
			kept = append(kept, f)
		}
	}
	return kept
}

// dominates reports whether f hides other, a field of the same name.
func dominates(f, other field) bool {
	if len(f.index) != len(other.index) {
		return len(f.index) < len(other.index)
	}
	return f.tagged && !other.tagged
}

// validName reports whether encoding/json would take this name from a tag.
func validName(name string) bool {
	for _, c := range name {
		if !unicode.IsLetter(c) && !unicode.IsDigit(c) && !strings.ContainsRune("!#$%&()*+-./:;<=>?@[]^_{|}~ ", c) {
			return false
		}
	}
	return name != ""
}
