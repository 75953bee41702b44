package strict

import (
	"encoding"
	"encoding/json"
	"reflect"
	"strconv"

	"github.com/go-json-experiment/json/jsontext"
)

// Append appends the struct that v points to as a JSON object, by tags of encoding/json. With
// omitempty or omitzero, a field that is zero, or an empty list, is left out. A struct or a list may
// be an [encoding.TextMarshaler]. What is no string, boolean, whole number, struct, or list of or
// pointer to one of these is left to encoding/json.
func Append(b []byte, v any) []byte {
	return new(types).append(b, reflect.ValueOf(v))
}

func (t *types) append(b []byte, v reflect.Value) []byte {
	kind := v.Kind()
	switch {
	case kind == reflect.Pointer && !v.IsNil():
		return t.append(b, v.Elem())
	case kind == reflect.String:
		return quote(b, v.String())
	case kind == reflect.Bool:
		return strconv.AppendBool(b, v.Bool())
	case kind == reflect.Struct || kind == reflect.Slice:
		return t.appendMany(b, v)
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

func (t *types) appendMany(b []byte, v reflect.Value) []byte {
	var marshaler encoding.TextMarshaler
	if v.Addr().NumMethod() > 0 {
		marshaler, _ = v.Addr().Interface().(encoding.TextMarshaler)
	}
	switch {
	case marshaler != nil:
		// It fails for a time beyond the year 9999, and then gives nothing.
		text, _ := marshaler.MarshalText()
		return quote(b, string(text))
	case v.Kind() == reflect.Struct:
		return t.appendObject(b, v)
	}
	return t.appendList(b, v)
}

func (t *types) appendObject(b []byte, v reflect.Value) []byte {
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

func (t *types) appendList(b []byte, v reflect.Value) []byte {
	b = append(b, '[')
	for i := range v.Len() {
		if i > 0 {
			b = append(b, ',')
		}
		b = t.append(b, v.Index(i))
	}
	return append(b, ']')
}

// quote appends a JSON string. What is not UTF-8 becomes U+FFFD, of which alone the error tells.
func quote(b []byte, s string) []byte {
	b, _ = jsontext.AppendQuote(b, s)
	return b
}
