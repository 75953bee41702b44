package strict

import (
	"bytes"
	"cmp"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"reflect"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json/jsontext"
)

// valueLimit is the maximum length, in bytes, of an offending value in an error.
const valueLimit = 64

// Kind classifies an Error: see the constants of this type.
type Kind int

const (
	Syntax    Kind = iota + 1 // the input is not valid JSON
	Unknown                   // a key names no field, and is not exempt
	Duplicate                 // a key occurs twice in one object; other decoders silently use the last value
	Value                     // a value has the wrong type, or the field's type rejects it
)

// Error is one error in a JSON document.
type Error struct {
	Kind Kind
	// Path is the field with all its parents: "ipam.ranges[0][0].rangeStrat". It is empty for the document itself, and
	// for an error of Kind Syntax.
	Path string
	Text string // the message
	Err  error  // the error of a type's own UnmarshalJSON or UnmarshalText, or of encoding/json; nil if none
}

func (e *Error) Error() string { return e.Text }

// Unwrap returns e.Err, so that errors.Is finds the errors that e.Err wraps.
func (e *Error) Unwrap() error { return e.Err }

// syntaxError returns an Error for an error of the JSON library, with the line and the column in its message. If err is
// nil, it returns nil.
func (d *decoder) syntaxError(err error) error {
	if err == nil {
		return nil
	}

	offset := d.json.InputOffset()
	var syntactic *jsontext.SyntacticError
	if errors.As(err, &syntactic) {
		offset, err = syntactic.ByteOffset, syntactic.Err
	}

	reason := strings.TrimPrefix(err.Error(), "jsontext: ")
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		reason = "it ends too early"
	case strings.HasPrefix(reason, "invalid character ',' at start"):
		reason = "a comma with no value before or after it"
	}
	return d.errorAt(int(offset), reason)
}

// errorAt returns an Error for invalid JSON at the byte at offset. The message has the byte's line and column, both
// counted from 1.
func (d *decoder) errorAt(offset int, reason string) error {
	before := d.data[:min(offset, len(d.data))]
	line, column := 1+bytes.Count(before, []byte{'\n'}), len(before)-bytes.LastIndexByte(before, '\n')
	return &Error{Kind: Syntax, Text: fmt.Sprintf("not valid JSON at line %d, column %d: %s", line, column, reason)}
}

// path returns the path of the key or value that was read last, such as ipam.ranges[0][1].subnet.
func (d *decoder) path() string { return d.words(d.json.StackPointer()) }

// words converts a JSON pointer into a path for an error, such as ipam.ranges[0]. The path begins at the top of the
// whole document.
func (d *decoder) words(pointer jsontext.Pointer) string {
	words := d.at
	depth := 0
	for token := range pointer.Tokens() {
		depth++
		switch kind, _ := d.json.StackIndex(depth); {
		case kind == '[':
			words += "[" + token + "]"
		case words != "":
			words += "." + token
		default:
			words = token
		}
	}

	return words
}

// valueError returns the error for raw, the value that was read last. want describes the accepted values, or is empty.
// err is the cause, or nil.
func (d *decoder) valueError(raw []byte, want string, err error) error {
	e := &Error{Kind: Value, Path: d.path(), Err: err}
	field := "the document"
	if e.Path != "" {
		field = "field " + strconv.Quote(e.Path)
	}

	e.Text = fmt.Sprintf("%s does not take %s", field, describe(raw))
	if want != "" {
		e.Text = fmt.Sprintf("%s: expected %s, got %s", field, want, describe(raw))
	}

	if err != nil {
		e.Text += ": " + err.Error()
	}
	return e
}

// refused returns the error for a value that a type's own UnmarshalJSON or UnmarshalText rejected with err. err is nil
// if UnmarshalText needs a string and the value is no string. u is a pointer to a value of the type, and raw is the
// JSON text.
func (d *decoder) refused(raw []byte, u any, err error) error {
	want := ""
	switch u := u.(type) {
	case Expecter:
		// The text of JSONExpects suffices; err would repeat it.
		return d.valueError(raw, u.JSONExpects(), nil)
	case *netip.Addr, *net.IP:
		return d.valueError(raw, "an IP address", nil)
	case *netip.Prefix:
		return d.valueError(raw, `an address with a prefix length, like "10.1.0.0/16"`, nil)
	case encoding.TextUnmarshaler:
		if raw[0] != '"' {
			want = "a string"
		}
	}

	// If a type's own method uses encoding/json, its errors contain Go type names, which an operator does not know.
	var inner *json.UnmarshalTypeError
	if errors.As(err, &inner) {
		return d.valueError(raw, expected(inner.Type), nil)
	}

	return d.valueError(raw, want, err)
}

// expected returns a description of the JSON values that a Go type accepts, for an operator. For integers of fewer than
// 64 bits it includes the limits.
func expected(t reflect.Type) string {
	switch kind := t.Kind(); {
	case kind == reflect.Pointer:
		return expected(t.Elem())
	case kind >= reflect.Int && kind <= reflect.Int64 && t.Bits() < 64:
		top := int64(1)<<(t.Bits()-1) - 1
		return fmt.Sprintf("a whole number from %d to %d", -top-1, top)
	case kind >= reflect.Uint && kind <= reflect.Uint64 && t.Bits() < 64:
		return fmt.Sprintf("a whole number from 0 to %d", uint64(1)<<t.Bits()-1)
	}

	words := map[reflect.Kind]string{
		reflect.String: "a string", reflect.Bool: "true or false", reflect.Slice: "a list", reflect.Array: "a list",
		reflect.Struct: "an object", reflect.Map: "an object", reflect.Int: "a whole number",
		reflect.Int64: "a whole number", reflect.Uint: "a whole number, not negative",
		reflect.Uint64: "a whole number, not negative",
	}
	return cmp.Or(words[t.Kind()], "another kind of value")
}

// describe returns a description of a JSON value for an operator: its kind and, for a scalar, the value itself.
func describe(raw []byte) string {
	switch raw[0] {
	case '"':
		return "the string " + compact(raw)
	case '{':
		return "an object"
	case '[':
		return "a list"
	case 't', 'f', 'n':
		return string(raw)
	default:
		return "the number " + compact(raw)
	}
}

// compact removes the white space of a valid JSON value. If the result has more than valueLimit bytes, compact cuts it
// at the start of a rune and appends "…".
func compact(raw []byte) string {
	value := jsontext.Value(bytes.Clone(raw))
	_ = value.Compact() // an error leaves the value as it is
	text := strings.ToValidUTF8(string(value), "\uFFFD")
	if len(text) <= valueLimit {
		return text
	}

	return strings.ToValidUTF8(text[:valueLimit], "") + "…"
}

// Nearest returns the first name that differs from key by at most one typing error, or "" if there is none. Such an
// error is a letter too much, a missing or wrong letter, or two swapped neighbours. Nearest ignores case, so
// "isgateway" finds "isGateway". It prefers a name that differs only in case. For a key of fewer than three letters, it
// returns only such a name, since every short name would be close.
func Nearest(key string, names []string) string {
	near := ""
	for _, name := range names {
		switch a, b := distinct(strings.ToLower(key), strings.ToLower(name)); {
		case a == b:
			return name
		case len(key) < 3:
		case max(len(a), len(b)) == 1, len(a) == 2 && len(b) == 2 && a[0] == b[1] && a[1] == b[0]:
			near = cmp.Or(near, name)
		}
	}
	return near
}

// distinct removes the common beginning and the common end of two texts.
func distinct(a, b string) (string, string) {
	for a != "" && b != "" && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	for a != "" && b != "" && a[len(a)-1] == b[len(b)-1] {
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	return a, b
}
