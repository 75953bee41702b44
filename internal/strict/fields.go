package strict

import (
	"cmp"
	"encoding"
	"encoding/json"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json/jsontext"
)

// field is one field of a struct, with its JSON key.
type field struct {
	name  string
	index []int // for reflect: the path through embedded structs to the field
	omit  bool  // Append leaves the field out if it is zero or an empty list
}

// types caches the fields of struct types during one call of Part or Append.
type types map[reflect.Type][]field

// fields returns the fields of a struct type in the order of the source code. It caches them.
func (t types) fields(typ reflect.Type) []field {
	if t[typ] == nil {
		t[typ] = collect(make([]field, 0, typ.NumField()), typ, nil)
	}
	return t[typ]
}

// collect appends the fields of the struct type typ, and of its embedded structs, to fields. If typ is an embedded
// struct itself, prefix is the path to it from the outermost struct.
func collect(fields []field, typ reflect.Type, prefix []int) []field {
	for i := range typ.NumField() {
		f := typ.Field(i)
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

// Names returns the JSON keys of a struct type, and those of the structs in its fields.
func Names(typ reflect.Type) (names []string) {
	switch typ.Kind() {
	case reflect.Pointer, reflect.Slice:
		return Names(typ.Elem())
	case reflect.Struct:
		for _, f := range collect(nil, typ, nil) {
			names = append(append(names, f.name), Names(typ.FieldByIndex(f.index).Type)...)
		}
	}
	return names
}

// Append appends the struct that v points to as a JSON object. It follows the tags of encoding/json. A field with
// omitempty or omitzero is left out if it is zero or an empty list. Any value may be an [encoding.TextMarshaler].
// Append encodes strings, booleans, integers, structs, lists and pointers itself, and uses encoding/json for all
// other values.
func Append(b []byte, v any) []byte {
	return types{}.append(b, reflect.ValueOf(v))
}

// append appends one value as JSON.
func (t types) append(b []byte, v reflect.Value) []byte {
	kind := v.Kind()
	if text, ok := textOf(v); ok {
		return quote(b, string(text))
	}

	switch {
	case kind == reflect.Pointer && !v.IsNil():
		return t.append(b, v.Elem())
	case kind == reflect.String:
		return quote(b, v.String())
	case kind == reflect.Bool:
		return strconv.AppendBool(b, v.Bool())
	case kind == reflect.Struct:
		return t.appendObject(b, v)
	case kind == reflect.Slice:
		return t.appendList(b, v)
	case v.CanInt():
		return strconv.AppendInt(b, v.Int(), 10)
	case v.CanUint():
		return strconv.AppendUint(b, v.Uint(), 10)
	}

	other, err := json.Marshal(v.Interface())
	if err != nil {
		return append(b, "null"...)
	}

	return append(b, other...)
}

// textOf returns the text of a value that implements [encoding.TextMarshaler]. ok is false for all other values. If
// MarshalText returns an error, as for a time beyond the year 9999, the text is empty.
func textOf(v reflect.Value) (text []byte, ok bool) {
	// Most types have no method. Test this first, since the first test of a type for an interface is slow.
	if !v.CanAddr() || v.Addr().NumMethod() == 0 {
		return nil, false
	}
	marshaler, ok := v.Addr().Interface().(encoding.TextMarshaler)
	if ok {
		text, _ = marshaler.MarshalText()
	}
	return text, ok
}

func (t types) appendObject(b []byte, v reflect.Value) []byte {
	b = append(b, '{')
	separator := ""
	for _, f := range t.fields(v.Type()) {
		member := v.FieldByIndex(f.index)
		if f.omit && (member.IsZero() || member.Kind() == reflect.Slice && member.Len() == 0) {
			continue
		}
		b = quote(append(b, separator...), f.name)
		b = t.append(append(b, ':'), member)
		separator = ","
	}

	return append(b, '}')
}

func (t types) appendList(b []byte, v reflect.Value) []byte {
	b = append(b, '[')
	for i := range v.Len() {
		if i > 0 {
			b = append(b, ',')
		}
		b = t.append(b, v.Index(i))
	}
	return append(b, ']')
}

// quote appends a JSON string. Bytes that are not UTF-8 become U+FFFD, so the only possible error can be ignored.
func quote(b []byte, s string) []byte {
	b, _ = jsontext.AppendQuote(b, s)
	return b
}
