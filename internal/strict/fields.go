package strict

import (
	"cmp"
	"reflect"
	"slices"
	"strings"
)

// A field is one key that a struct takes.
type field struct {
	name  string
	index []int // for reflect: through the embedded structs down to the field
	omit  bool  // Append leaves it out where it is zero
}

// types has the fields of the struct types that a call met.
type types []struct {
	of     reflect.Type
	fields []field
}

// fields returns the fields of a struct type in the order of the source.
func (t *types) fields(of reflect.Type) []field {
	for _, known := range *t {
		if known.of == of {
			return known.fields
		}
	}
	fields := collect(make([]field, 0, of.NumField()), of, nil)
	*t = append(*t, types{{of, fields}}...)
	return fields
}

// collect appends the fields of a struct type that is embedded through prefix.
func collect(fields []field, of reflect.Type, prefix []int) []field {
	for i := range of.NumField() {
		f := of.Field(i)
		name, option, _ := strings.Cut(f.Tag.Get("json"), ",")
		index := f.Index
		if len(prefix) > 0 {
			index = append(slices.Clip(prefix), i)
		}
		switch {
		case f.Anonymous && name == "" && f.Type.Kind() == reflect.Struct:
			fields = collect(fields, f.Type, index)
		case name != "-" && f.IsExported():
			fields = append(fields, field{cmp.Or(name, f.Name), index, option != ""})
		}
	}
	return fields
}

// folded returns the index of the field that has this name but for upper and lower case, or -1.
// Some programs write "HostPort" where the CNI conventions have "hostPort", since encoding/json
// takes one for the other.
func folded(fields []field, name []byte) int {
	return slices.IndexFunc(fields, func(f field) bool { return strings.EqualFold(f.name, string(name)) })
}
