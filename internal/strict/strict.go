package strict

import (
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/jsontext"
)

// Exempt says of a key that no field has to the letter whether it is to be passed
// over rather than to be an error. Where a field has it but for upper and lower case,
// it is that field's instead: a caller that passes over unknown keys has not written all
// of the object for us. path names the object that holds the key, as in
// [UnknownFieldError.Path]; it is empty for the document itself.
type Exempt func(path, key string) bool

// Expecter is implemented by types that unmarshal themselves and want a better
// message than their own when they refuse a value.
type Expecter interface {
	// JSONExpects says what the type takes, for an operator: `a duration like
	// "5s"`.
	JSONExpects() string
}

// Unmarshal decodes data, one JSON object, into v, a pointer to a struct. A nil
// exempt exempts nothing.
//
// The error is the first problem in the order of the document: *[SyntaxError],
// *[UnknownFieldError], *[DuplicateKeyError] or *[ValueError]. What came before
// it has been stored in v.
func Unmarshal(data []byte, v any, exempt Exempt) error {
	d := &decoder{Scanner: jsontext.Scan(data), exempt: exempt}
	return d.document(v)
}

// All is Unmarshal that goes on: its error joins all problems of the document, up to a
// *[SyntaxError]. What has none is stored in v.
func All(data []byte, v any, exempt Exempt) error {
	d := &decoder{Scanner: jsontext.Scan(data), lenient: true, exempt: exempt}
	err := d.document(v)
	return errors.Join(append(d.problems, err)...)
}

// Lenient decodes what can be decoded: it passes over unknown keys, takes the
// last of duplicate ones, and leaves fields alone whose value is of a wrong
// type or is refused. It is for teardown, which must not fail for what a config
// says.
//
// The error joins all problems that Unmarshal would have reported one by one,
// unknown keys excepted. Only a *[SyntaxError] among them means that the rest
// of the document is missing from v.
func Lenient(data []byte, v any) error {
	d := &decoder{Scanner: jsontext.Scan(data), lenient: true, exempt: func(string, string) bool { return true }}
	err := d.document(v)
	return errors.Join(append(d.problems, err)...)
}

// A decoder is one call's state.
type decoder struct {
	*jsontext.Scanner
	exempt   Exempt
	lenient  bool
	problems []error // collected if lenient
	tables   []table
	path     []step // to the value that is next
}

// A step of a path is a key, or an index where key is empty.
type step struct {
	key   string
	index int
}

// pathString prints the current path: ipam.ranges[0][1].subnet.
func (d *decoder) pathString() string {
	var b strings.Builder
	for i, s := range d.path {
		switch {
		case s.key == "":
			b.WriteString("[" + strconv.Itoa(s.index) + "]")
		case i > 0:
			b.WriteString("." + s.key)
		default:
			b.WriteString(s.key)
		}
	}
	return b.String()
}

// push and pop move the path one step down and up. Steps are cheap, since they
// are made for every value; the text of a path is made only for an error.
func (d *decoder) push(key string, index int) { d.path = append(d.path, step{key, index}) }
func (d *decoder) pop()                       { d.path = d.path[:len(d.path)-1] }

// problem ends the decoding with err, or notes it and lets the decoding go on.
func (d *decoder) problem(err error) error {
	if !d.lenient {
		return err
	}
	d.problems = append(d.problems, err)
	return nil
}

// document decodes the whole of data into v.
func (d *decoder) document(v any) error {
	target := reflect.ValueOf(v)
	if target.Kind() != reflect.Pointer || target.IsNil() || target.Elem().Kind() != reflect.Struct {
		return fmt.Errorf("decode JSON into %T: not a pointer to a struct", v)
	}
	d.path, d.tables = make([]step, 0, 8), make([]table, 0, 8)
	if d.Next() != '{' {
		raw, err := d.Value()
		if err != nil {
			return err
		}
		return d.valueError(raw, "an object", nil)
	}
	if err := d.structure(target.Elem()); err != nil {
		return err
	}
	return d.End()
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

// decode stores the value at the current position in v, which can be set.
//
// The order matters, and is that of encoding/json: pointers are followed before
// anything else, so that a type may unmarshal itself also where it is optional;
// null never reaches such a type through a pointer; and a type that unmarshals
// itself may be of any kind.
func (d *decoder) decode(v reflect.Value) error {
	first := d.Next()
	null := first == 'n'
	if v.Kind() == reflect.Pointer {
		if null {
			return d.null(v)
		}
		return d.pointer(v)
	}
	if done, err := d.self(v, null); done {
		return err
	}
	if null {
		return d.null(v)
	}
	switch v.Kind() {
	case reflect.Struct:
		if first == '{' {
			return d.structure(v)
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return d.other(v)
		}
		if first == '[' {
			return d.list(v)
		}
	case reflect.Map, reflect.Interface, reflect.Array:
		return d.other(v)
	}
	raw, err := d.Value()
	if err != nil {
		return err
	}
	if !setScalar(v, raw) {
		return d.problem(d.valueError(raw, wanted(v), nil))
	}
	return nil
}

// null does what encoding/json does for null: it clears what can be nil, and
// leaves anything else as it is.
func (d *decoder) null(v reflect.Value) error {
	if _, err := d.Value(); err != nil {
		return err
	}
	switch v.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Map, reflect.Interface:
		v.SetZero()
	}
	return nil
}

// self lets types that unmarshal themselves do so; done is false for all
// others.
func (d *decoder) self(v reflect.Value, null bool) (done bool, err error) {
	if v.Type().PkgPath() == "" || !v.CanAddr() || !v.Addr().CanInterface() {
		return false, nil
	}
	switch u := v.Addr().Interface().(type) {
	case json.Unmarshaler:
		raw, err := d.Value()
		if err != nil {
			return true, err
		}
		if err := u.UnmarshalJSON(raw); err != nil {
			return true, d.problem(d.refused(raw, u, err))
		}
		return true, nil
	case encoding.TextUnmarshaler:
		if null {
			return false, nil
		}
		raw, err := d.Value()
		if err != nil {
			return true, err
		}
		if raw[0] != '"' {
			return true, d.problem(d.refused(raw, u, nil))
		}
		if err := u.UnmarshalText(slices.Clone(jsontext.Unquote(raw))); err != nil {
			return true, d.problem(d.refused(raw, u, err))
		}
		return true, nil
	}
	return false, nil
}

// refused is the error for a value that the type of u does not take.
func (d *decoder) refused(raw []byte, u any, err error) error {
	want := ""
	switch u := u.(type) {
	case Expecter:
		// Its own words say it; its error would say it again.
		return d.valueError(raw, u.JSONExpects(), nil)
	case *netip.Addr, *net.IP:
		return d.valueError(raw, "an IP address", nil)
	case *netip.Prefix:
		return d.valueError(raw, `an address with a prefix length, like "10.1.0.0/16"`, nil)
	case *netip.AddrPort:
		return d.valueError(raw, `an address with a port, like "10.1.0.1:80"`, nil)
	case encoding.TextUnmarshaler:
		want = "a string"
	}
	// A type that uses encoding/json inside reports Go's names of types, which
	// mean nothing to an operator.
	var inner *json.UnmarshalTypeError
	if errors.As(err, &inner) {
		return d.valueError(raw, kindWords(inner.Type), nil)
	}
	if raw[0] == '"' {
		want = ""
	}
	return d.valueError(raw, want, err)
}

// structure decodes the object at the current position into the struct v.
func (d *decoder) structure(v reflect.Value) error {
	t := d.table(v.Type())
	seen := make([]bool, len(t.fields))
	return d.Object(func(name []byte) error {
		i := t.find(name)
		if i < 0 {
			key := string(name)
			exempt := d.exempt != nil && d.exempt(d.pathString(), key)
			if exempt {
				i = t.findFolded(key)
			}
			if i < 0 {
				return d.unknown(key, t, exempt)
			}
		}
		d.push(t.fields[i].name, 0)
		defer d.pop()
		if seen[i] {
			if err := d.problem(&DuplicateKeyError{Path: d.pathString()}); err != nil {
				return err
			}
		}
		seen[i] = true
		target, err := embeddedField(v, t.fields[i].index)
		if err != nil {
			return err
		}
		return d.decode(target)
	})
}

// embeddedField returns the field of v that index leads to, and makes the embedded
// structs on the way.
func embeddedField(v reflect.Value, index []int) (reflect.Value, error) {
	for n, i := range index {
		if n > 0 && v.Kind() == reflect.Pointer {
			if v.IsNil() {
				if !v.CanSet() {
					return v, fmt.Errorf("decode JSON into %s: an embedded pointer to a type that is not exported", v.Type())
				}
				v.Set(reflect.New(v.Type().Elem()))
			}
			v = v.Elem()
		}
		v = v.Field(i)
	}
	if v.Kind() == reflect.Pointer && !v.CanSet() {
		return v, fmt.Errorf("decode JSON into %s: an embedded pointer to a type that is not exported", v.Type())
	}
	return v, nil
}

// unknown passes over the value of a key that is not in t, or reports it.
func (d *decoder) unknown(key string, t table, exempt bool) error {
	raw, err := d.Value()
	if err != nil || exempt {
		return err
	}
	d.push(key, 0)
	defer d.pop()
	return d.problem(&UnknownFieldError{
		Path:    d.pathString(),
		Key:     key,
		Value:   compact(raw),
		Nearest: Nearest(key, t.names()),
	})
}

// list decodes the array at the current position into the slice v.
func (d *decoder) list(v reflect.Value) error {
	v.Set(reflect.MakeSlice(v.Type(), 0, 4))
	return d.Array(func() error {
		n := v.Len()
		v.Grow(1)
		v.SetLen(n + 1)
		d.push("", n)
		defer d.pop()
		return d.decode(v.Index(n))
	})
}

// other hands a value of a kind that is not looked into to encoding/json.
func (d *decoder) other(v reflect.Value) error {
	raw, err := d.Value()
	if err != nil {
		return err
	}
	if err := json.Unmarshal(raw, v.Addr().Interface()); err != nil {
		return d.problem(d.valueError(raw, wanted(v), err))
	}
	return nil
}

// setScalar stores a string, boolean or number in v, and reports whether its
// kind takes it.
func setScalar(v reflect.Value, raw []byte) bool {
	switch v.Kind() {
	case reflect.String:
		if raw[0] != '"' {
			return false
		}
		v.SetString(string(jsontext.Unquote(raw)))
		return true
	case reflect.Bool:
		if raw[0] != 't' && raw[0] != 'f' {
			return false
		}
		v.SetBool(raw[0] == 't')
		return true
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		n, err := strconv.ParseInt(string(raw), 10, v.Type().Bits())
		if err != nil {
			return false
		}
		v.SetInt(n)
		return true
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		n, err := strconv.ParseUint(string(raw), 10, v.Type().Bits())
		if err != nil {
			return false
		}
		v.SetUint(n)
		return true
	case reflect.Float32, reflect.Float64:
		n, err := strconv.ParseFloat(string(raw), v.Type().Bits())
		if err != nil || raw[0] == '"' {
			return false
		}
		v.SetFloat(n)
		return true
	default:
		return false
	}
}

// wanted says what v takes. For numbers of a small type it names the bounds
// too.
func wanted(v reflect.Value) string {
	switch v.Kind() {
	case reflect.Int8, reflect.Int16, reflect.Int32:
		top := int64(1)<<(v.Type().Bits()-1) - 1
		return fmt.Sprintf("a whole number from %d to %d", -top-1, top)
	case reflect.Uint8, reflect.Uint16, reflect.Uint32:
		return fmt.Sprintf("a whole number from 0 to %d", uint64(math.MaxUint64)>>(64-v.Type().Bits()))
	default:
		return kindWords(v.Type())
	}
}

// kindWords names the JSON values that a Go type takes, for an operator.
func kindWords(t reflect.Type) string {
	switch t.Kind() {
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return "a whole number"
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return "a whole number, not negative"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Struct, reflect.Map:
		return "an object"
	case reflect.Pointer:
		return kindWords(t.Elem())
	default:
		return "another kind of value"
	}
}
