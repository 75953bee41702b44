// Package strict reads JSON that people write by hand, and explains in their words what is wrong
// with it. It writes and reads records too.
//
// It follows the rules of encoding/json (tags, embedded structs, null, [json.Unmarshaler],
// [encoding.TextUnmarshaler]) with these differences:
//   - a key that no field has is an [UnknownFieldError], which names the nearest field;
//   - keys match exactly: "isgateway" is not taken for "isGateway", but where unknown keys are
//     passed over (see [Exempt]);
//   - a key given twice in one object is a [DuplicateKeyError];
//   - the top level must be an object.
//
// Raw messages, maps, interfaces and types that unmarshal themselves are opaque: nothing is looked
// up inside of them. Not supported are embedded pointers, fields
// that hide others, fractions and lists of bytes.
//
// A plugin is a process that reads a few documents and exits. encoding/json builds decoders that
// would be used once, which is 5 % of an ADD; this package keeps nothing.
package strict

import (
	"bytes"
	"encoding"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strconv"

	"github.com/go-json-experiment/json/jsontext"
)

// Exempt says whether a key that is no field's exact name is passed over; otherwise it is an error. An exempt key
// that differs from a field's name only in case is that field's. path names the object that holds the key, as in
// [UnknownFieldError.Path]; it is empty for the document itself.
type Exempt func(path, key string) bool

// Everything exempts every key.
func Everything(string, string) bool { return true }

// Expecter is implemented by types that unmarshal themselves and want a better
// message than their own when they refuse a value.
type Expecter interface {
	// JSONExpects says what the type takes, for an operator: `a duration like
	// "5s"`.
	JSONExpects() string
}

// Problems are all that is wrong with a document, in its order: *[SyntaxError], *[UnknownFieldError],
// *[DuplicateKeyError] and *[ValueError].
type Problems []error

// First is the first problem; nil if there is none.
func (p Problems) First() error {
	if len(p) == 0 {
		return nil
	}
	return p[0]
}

// Unmarshal decodes data, one JSON object, into v, a pointer to a struct. A nil exempt exempts nothing. Fields
// without a problem are stored in v, up to a *[SyntaxError], which is the last problem.
func Unmarshal(data []byte, v any, exempt Exempt) Problems { return Part("", data, v, exempt) }

// Part is Unmarshal of a part of a document that was kept as it came, in a [json.RawMessage]. The field that
// has it is the path, by which errors call what is in it.
func Part(path string, data []byte, v any, exempt Exempt) Problems {
	// Keys are compared by us. Bytes that are no UTF-8 are replaced, as encoding/json does.
	options := []jsontext.Options{jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true)}
	d := &decoder{at: path, data: data, json: jsontext.NewDecoder(bytes.NewBuffer(data), options...), exempt: exempt}
	if err := d.document(v); err != nil {
		d.problem(err)
	}
	return d.problems
}

// A decoder is one call's state.
type decoder struct {
	at       string // see Part
	data     []byte
	json     *jsontext.Decoder
	exempt   Exempt
	problems Problems
	text     []byte // see unquote
	types    types
}

// problem notes what the decoding goes on after. Methods give the errors that end it.
func (d *decoder) problem(err error) { d.problems = append(d.problems, err) }

// document decodes the whole of data into v.
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

// value moves over one value of any kind, a key too, and returns its bytes, which are valid until
// the next call.
func (d *decoder) value() ([]byte, error) {
	raw, err := d.json.ReadValue()
	if err != nil {
		return nil, d.syntaxError(err)
	}
	return raw, nil
}

// delimiter moves over a bracket or a brace.
func (d *decoder) delimiter() error {
	if _, err := d.json.ReadToken(); err != nil {
		return d.syntaxError(err)
	}
	return nil
}

// unquote decodes a string, until the next call. Bytes that are not UTF-8 become U+FFFD, which is the only error.
func (d *decoder) unquote(raw []byte) []byte {
	d.text, _ = jsontext.AppendUnquote(d.text[:0], raw)
	return d.text
}

// pointer decodes into what v points to, which is made if there is nothing, and
// only kept if the value was not refused.
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

// decode stores the value at the current position in v, which can be set. The order is that of
// encoding/json: pointers are followed first, so that a type may unmarshal itself also where it is
// optional, and null never reaches such a type through a pointer.
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
		d.problem(d.valueError(raw, wanted(v), err))
	}
	return nil
}

// null does what encoding/json does for null: it clears what can be nil, and
// leaves anything else as it is.
func (d *decoder) null(v reflect.Value) error {
	switch v.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Map, reflect.Interface:
		v.SetZero()
	}
	_, err := d.value()
	return err
}

// self lets types that unmarshal themselves do so; done is false for all
// others.
func (d *decoder) self(v reflect.Value, null bool) (done bool, err error) {
	// Most types have no method, and to ask a type for an interface takes long for the first time.
	if v.Addr().NumMethod() == 0 {
		return false, nil
	}
	of := v.Addr().Interface()
	object, isObject := of.(json.Unmarshaler)
	text, isText := of.(encoding.TextUnmarshaler)
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
		d.problem(d.refused(raw, of, nil))
	default:
		err = text.UnmarshalText(d.unquote(raw))
	}
	if err != nil {
		d.problem(d.refused(raw, of, err))
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

// member decodes a member of an object, whose value is next.
func (d *decoder) member(v reflect.Value, fields []field, seen []bool, key []byte) error {
	i := slices.IndexFunc(fields, func(f field) bool { return f.name == string(key) })
	if i < 0 {
		path := d.json.StackPointer()
		exempt := d.exempt != nil && d.exempt(d.words(path.Parent()), string(key))
		if exempt {
			i = folded(fields, key)
		}
		if i < 0 {
			return d.unknown(string(key), fields, exempt)
		}
	}
	if seen[i] {
		d.problem(&DuplicateKeyError{Path: d.path()})
	}
	seen[i] = true
	return d.decode(v.FieldByIndex(fields[i].index))
}

// unknown passes over the value of a key that no field has, or reports it.
func (d *decoder) unknown(key string, fields []field, exempt bool) error {
	raw, err := d.value()
	if err != nil || exempt {
		return err
	}
	names := make([]string, len(fields))
	for i := range fields {
		names[i] = fields[i].name
	}
	d.problem(&UnknownFieldError{Path: d.path(), Key: key, Value: compact(raw), Nearest: Nearest(key, names)})
	return nil
}

// list decodes the array at the current position into the slice v, an empty one
// to nil: it says as much as a missing one.
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

// setScalar stores a string, boolean or number in v, and reports whether its
// kind takes it.
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
