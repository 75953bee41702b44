// Package strict reads JSON that people write by hand, and explains errors in it in words for an operator. It also
// reads and writes records.
//
// It follows the rules of encoding/json (tags, embedded structs, null, [json.Unmarshaler],
// [encoding.TextUnmarshaler]) with these differences:
//   - a key without a field is an [Error], unless the caller allows the key (see [Exempt]);
//   - keys match exactly: "isgateway" matches "isGateway" only if the caller allows the key;
//   - a key that occurs twice in an object is an [Error];
//   - an empty array sets a slice to nil;
//   - the top level must be an object.
//
// These differences do not apply inside raw messages, maps, Go arrays, interfaces and types that unmarshal themselves.
// The package does not support embedded pointers, fields that hide others, fractions and lists of bytes.
//
// A plugin is a process that reads a few documents and exits. encoding/json builds a decoder for each type, which
// such a process uses once. This costs 5 % of an ADD. This package builds no decoders.
package strict

import (
	"bytes"
	"cmp"
	"encoding"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json/jsontext"
)

// Exempt reports whether a key is allowed although no field has exactly this name. If not, the key is an error. An
// allowed key that differs from a field's name only in case sets that field. Any other allowed key is skipped. path is
// the path of the object with the key, as in [Error.Path]. It is empty for the document itself.
type Exempt func(path, key string) bool

// Everything is an Exempt that allows every key.
func Everything(string, string) bool { return true }

// Expecter is an interface for types with an UnmarshalJSON or UnmarshalText of their own. In errors about a value, the
// text of JSONExpects replaces the error of that method.
type Expecter interface {
	// JSONExpects returns a description of the accepted values for an operator, such as `a duration like "5s"`.
	JSONExpects() string
}

// Problems lists all errors of a document, in its order. Each is an *[Error], unless the caller passed a v that is no
// pointer to a struct.
type Problems []error

// First returns the first problem, or nil if there is none.
func (p Problems) First() error { return cmp.Or(p...) }

// Unmarshal decodes data, which is one JSON object, into the struct that v points to. If exempt is nil, every unknown
// key is an error. Unmarshal sets each field whose value has no problem. It stops at an error of Kind Syntax, which is
// always the last problem.
func Unmarshal(data []byte, v any, exempt Exempt) Problems { return Part("", data, v, exempt) }

// Part decodes a part of a document: a field that another call stored as a [json.RawMessage]. path is the path of that
// field, which begins all paths in errors. In all other respects Part works like Unmarshal.
func Part(path string, data []byte, v any, exempt Exempt) Problems {
	// Allow duplicate names, since this package finds them itself. Like encoding/json, replace bytes that are not
	// UTF-8.
	options := []jsontext.Options{jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true)}
	d := &decoder{at: path, data: data, json: jsontext.NewDecoder(bytes.NewBuffer(data), options...), exempt: exempt,
		types: types{}}
	if err := d.document(v); err != nil {
		d.problem(err)
	}
	return d.problems
}

// decoder is the state of one call of Part.
type decoder struct {
	at       string // the path of the decoded part in the whole document (see Part)
	data     []byte
	json     *jsontext.Decoder
	exempt   Exempt
	problems Problems
	text     []byte // buffer of unquote
	types    types
}

// problem stores an error of the document. A method that decodes returns an error only if decoding cannot continue.
func (d *decoder) problem(err error) { d.problems = append(d.problems, err) }

// document decodes all of data into v.
func (d *decoder) document(v any) error {
	target := reflect.ValueOf(v)
	if target.Kind() != reflect.Pointer || target.IsNil() || target.Elem().Kind() != reflect.Struct {
		return fmt.Errorf("decode JSON into %T: not a pointer to a struct", v)
	}

	if d.json.PeekKind() != '{' {
		raw, err := d.value()
		if err != nil {
			return err
		}
		return d.valueError(raw, "an object", nil)
	}

	if err := d.structure(target.Elem()); err != nil {
		return err
	}

	if rest := bytes.TrimLeft(d.data[d.json.InputOffset():], " \t\r\n"); len(rest) > 0 {
		return d.errorAt(len(d.data)-len(rest), "there is more after its end")
	}

	return nil
}

// value reads one value of any kind, or a key, and returns its bytes. The result is valid until the next call.
func (d *decoder) value() ([]byte, error) {
	raw, err := d.json.ReadValue()
	return raw, d.syntaxError(err)
}

// delimiter reads the beginning or the end of an object or array.
func (d *decoder) delimiter() error {
	_, err := d.json.ReadToken()
	return d.syntaxError(err)
}

// unquote decodes a string. The result is valid until the next call. Bytes that are not UTF-8 become U+FFFD, so the
// only possible error can be ignored.
func (d *decoder) unquote(raw []byte) []byte {
	d.text, _ = jsontext.AppendUnquote(d.text[:0], raw)
	return d.text
}

// pointer decodes a value into *v. If v is nil, it allocates a new value, and sets v to it only if decoding caused no
// problem.
func (d *decoder) pointer(v reflect.Value) error {
	if !v.IsNil() {
		return d.decode(v.Elem())
	}
	made := reflect.New(v.Type().Elem())
	problems := len(d.problems)
	err := d.decode(made.Elem())
	if len(d.problems) == problems {
		v.Set(made)
	}
	return err
}

// decode stores the JSON value at the current position in v, which must be settable. Like encoding/json, it follows
// pointers before it calls a type's own UnmarshalJSON or UnmarshalText. So it calls these methods for a pointer's
// target, but not if the value is null.
func (d *decoder) decode(v reflect.Value) error {
	first := d.json.PeekKind()
	null := first == 'n'
	if v.Kind() == reflect.Pointer && !null {
		return d.pointer(v)
	}

	if done, err := d.self(v, null); done {
		return err
	}

	kind := v.Kind()
	switch {
	case null:
		return d.null(v)
	case kind == reflect.Struct && first == '{':
		return d.structure(v)
	case kind == reflect.Slice && first == '[':
		return d.list(v)
	}

	raw, err := d.value()
	if err != nil {
		return err
	}

	ok := false
	switch kind {
	case reflect.Map, reflect.Interface, reflect.Array:
		err = json.Unmarshal(raw, v.Addr().Interface())
		ok = err == nil
	default:
		ok = d.setScalar(v, raw)
	}

	if !ok {
		d.problem(d.valueError(raw, expected(v.Type()), err))
	}

	return nil
}

// null handles null like encoding/json: it clears v if v can be nil, and otherwise leaves it unchanged.
func (d *decoder) null(v reflect.Value) error {
	switch v.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Map, reflect.Interface:
		v.SetZero()
	}
	_, err := d.value()
	return err
}

// self decodes the next value by the UnmarshalJSON or UnmarshalText of v's type. done is false if the type has neither
// method, or if the value is null and the type has only UnmarshalText.
func (d *decoder) self(v reflect.Value, null bool) (done bool, err error) {
	// Most types have no method. Test this first, since the first test of a type for an interface is slow.
	if v.Addr().NumMethod() == 0 {
		return false, nil
	}

	target := v.Addr().Interface()
	object, isObject := target.(json.Unmarshaler)
	text, isText := target.(encoding.TextUnmarshaler)
	if !isObject && (!isText || null) {
		return false, nil
	}

	raw, err := d.value()
	switch {
	case err != nil:
		return true, err
	case isObject:
		err = object.UnmarshalJSON(raw)
	case raw[0] != '"':
		d.problem(d.refused(raw, target, nil))
	default:
		err = text.UnmarshalText(d.unquote(raw))
	}

	if err != nil {
		d.problem(d.refused(raw, target, err))
	}

	return true, nil
}

// structure decodes the object at the current position into the struct v.
func (d *decoder) structure(v reflect.Value) error {
	fields := d.types.fields(v.Type())
	seen := make([]bool, len(fields))
	if err := d.delimiter(); err != nil {
		return err
	}

	for d.json.PeekKind() != '}' {
		key, err := d.value()
		if err == nil {
			err = d.member(v, fields, seen, d.unquote(key))
		}
		if err != nil {
			return err
		}
	}

	return d.delimiter()
}

// member decodes the value that follows a key into the field with the key's name. If seen shows that the object has had
// the field before, member also stores a problem. If no field fits, member calls unknown.
func (d *decoder) member(v reflect.Value, fields []field, seen []bool, key []byte) error {
	i := slices.IndexFunc(fields, func(f field) bool { return f.name == string(key) })
	if i < 0 {
		path := d.json.StackPointer()
		exempt := d.exempt != nil && d.exempt(d.words(path.Parent()), string(key))
		if exempt {
			// Some programs write "HostPort" for "hostPort" of the CNI conventions, since encoding/json accepts that.
			i = slices.IndexFunc(fields, func(f field) bool { return strings.EqualFold(f.name, string(key)) })
		}
		if i < 0 {
			return d.unknown(string(key), fields, exempt)
		}
	}

	if seen[i] {
		d.problem(&Error{Kind: Duplicate, Path: d.path(), Text: fmt.Sprintf("field %q is given twice", d.path())})
	}

	seen[i] = true
	return d.decode(v.FieldByIndex(fields[i].index))
}

// unknown skips the value of a key without a field. Unless the key is exempt, it stores an error, which names a field
// with a similar name if there is one.
func (d *decoder) unknown(key string, fields []field, exempt bool) error {
	raw, err := d.value()
	if err != nil || exempt {
		return err
	}

	names := make([]string, len(fields))
	for i := range fields {
		names[i] = fields[i].name
	}

	text := fmt.Sprintf("unknown field %q: %s", d.path(), compact(raw))
	if near := Nearest(key, names); near != "" {
		text += fmt.Sprintf(" (did you mean %q?)", near)
	}
	d.problem(&Error{Kind: Unknown, Path: d.path(), Text: text})
	return nil
}

// list decodes the array at the current position into the slice v. An empty array becomes nil, like a missing one.
func (d *decoder) list(v reflect.Value) error {
	v.Set(reflect.MakeSlice(v.Type(), 0, 4))
	if err := d.delimiter(); err != nil {
		return err
	}

	for n := 0; d.json.PeekKind() != ']'; n++ {
		v.Grow(1)
		v.SetLen(n + 1)
		if err := d.decode(v.Index(n)); err != nil {
			return err
		}
	}

	if v.Len() == 0 {
		v.SetZero()
	}

	return d.delimiter()
}

// setScalar stores a string, boolean or number in v. It reports whether v's type accepts the value.
func (d *decoder) setScalar(v reflect.Value, raw []byte) bool {
	switch {
	case v.Kind() == reflect.String && raw[0] == '"':
		v.SetString(string(d.unquote(raw)))
	case v.Kind() == reflect.Bool && (raw[0] == 't' || raw[0] == 'f'):
		v.SetBool(raw[0] == 't')
	case v.CanInt():
		n, err := strconv.ParseInt(string(raw), 10, v.Type().Bits())
		if err != nil {
			return false
		}
		v.SetInt(n)
	case v.CanUint():
		n, err := strconv.ParseUint(string(raw), 10, v.Type().Bits())
		if err != nil {
			return false
		}
		v.SetUint(n)
	default:
		return false
	}

	return true
}
