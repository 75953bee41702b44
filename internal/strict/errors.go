package strict

import (
	"bytes"
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
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
)

// valueLimit is the maximum length, in bytes, of an offending value in an error.
const valueLimit = 64

// UnknownFieldError reports a key that names no field of the object's struct.
type UnknownFieldError struct {
	Path    string // the field with all its parents: "ipam.ranges[0][0].rangeStrat"
	Key     string // the last element of Path: "rangeStrat"
	Value   string // the value, as compact JSON of at most some 64 bytes
	Nearest string // a field of the object with a similar spelling; empty if there is none
}

// Error returns the path of the field, its value, and the field with the closest spelling, if there is one.
func (e *UnknownFieldError) Error() string {
	msg := fmt.Sprintf("unknown field %q: %s", e.Path, e.Value)
	if e.Nearest != "" {
		msg += fmt.Sprintf(" (did you mean %q?)", e.Nearest)
	}
	return msg
}

// DuplicateKeyError reports a key that occurs twice in one object. Other decoders silently use the last value.
type DuplicateKeyError struct {
	Path string // the field with all its parents
}

func (e *DuplicateKeyError) Error() string {
	return fmt.Sprintf("field %q is given twice", e.Path)
}

// ValueError reports a value of the wrong type, or a value that the field's type rejects.
type ValueError struct {
	Path string // the field with all its parents; empty for the document itself
	Want string // values that the field accepts, for an operator: "a whole number"
	Got  string // the value found: `the string "1500"`
	Err  error  // the error of a type that unmarshals itself; else nil
}

func (e *ValueError) Error() string {
	what := "the document"
	if e.Path != "" {
		what = "field " + strconv.Quote(e.Path)
	}

	var msg string
	if e.Want != "" {
		msg = fmt.Sprintf("%s: expected %s, got %s", what, e.Want, e.Got)
	} else {
		msg = fmt.Sprintf("%s does not take %s", what, e.Got)
	}

	if e.Err != nil {
		msg += ": " + e.Err.Error()
	}
	return msg
}

// Unwrap returns the error of a type that unmarshals itself, so that errors.Is finds its sentinels.
func (e *ValueError) Unwrap() error { return e.Err }

// SyntaxError reports input that is not valid JSON.
type SyntaxError struct {
	Line   int    // line of the offending byte, from 1
	Column int    // column of the offending byte, in bytes from 1
	Reason string // the expected and the actual input
}

func (e *SyntaxError) Error() string {
	return fmt.Sprintf("not valid JSON at line %d, column %d: %s", e.Line, e.Column, e.Reason)
}

// syntaxError returns a SyntaxError for an error of the JSON library. It adds the line and the column.
func (d *decoder) syntaxError(err error) error {
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

// errorAt returns a SyntaxError for the byte at offset.
func (d *decoder) errorAt(offset int, reason string) error {
	before := d.data[:min(offset, len(d.data))]
	line := 1 + bytes.Count(before, []byte{'\n'})
	return &SyntaxError{Line: line, Column: len(before) - bytes.LastIndexByte(before, '\n'), Reason: reason}
}

// path returns the path of the key or value that was read last, such as ipam.ranges[0][1].subnet.
func (d *decoder) path() string { return d.words(d.json.StackPointer()) }

// words converts a JSON pointer into a path for an error, such as ipam.ranges[0]. The path begins at the top of the
// document.
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

// valueError returns the error for raw, the value that was read last. want describes the accepted values.
func (d *decoder) valueError(raw []byte, want string, err error) error {
	return &ValueError{Path: d.path(), Want: want, Got: describe(raw), Err: err}
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

	// A type that uses encoding/json inside reports Go type names, which an operator does not know.
	var inner *json.UnmarshalTypeError
	if errors.As(err, &inner) {
		return d.valueError(raw, kindWords(inner.Type), nil)
	}

	return d.valueError(raw, want, err)
}

// expected returns a description of the values that v accepts, for an operator. For integers of fewer than 64 bits it
// includes the limits.
func expected(v reflect.Value) string {
	bits := 64
	if v.CanInt() || v.CanUint() {
		bits = v.Type().Bits()
	}

	switch {
	case bits == 64:
		return kindWords(v.Type())
	case v.CanUint():
		return fmt.Sprintf("a whole number from 0 to %d", uint64(1)<<bits-1)
	}

	top := int64(1)<<(bits-1) - 1
	return fmt.Sprintf("a whole number from %d to %d", -top-1, top)
}

// kindWords returns a description of the JSON values that a Go type accepts, for an operator.
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

// compact removes the white space of a valid JSON value, and cuts the result to valueLimit bytes at the start of a
// rune.
func compact(raw []byte) string {
	var buf bytes.Buffer
	if json.Compact(&buf, raw) != nil {
		buf.Write(raw) // raw is nested deeper than json.Compact allows
	}

	text := strings.ToValidUTF8(buf.String(), "\uFFFD")
	if len(text) <= valueLimit {
		return text
	}

	cut := valueLimit
	for !utf8.RuneStart(text[cut]) {
		cut--
	}
	return text[:cut] + "…"
}

// Nearest returns the name with the spelling closest to key, or "" if none is close enough for a hint. It ignores
// case, so "isgateway" finds "isGateway".
func Nearest(key string, names []string) string {
	best, bestDistance := "", allowance(key)+1
	for _, name := range names {
		if d := distance(strings.ToLower(key), strings.ToLower(name)); d < bestDistance {
			best, bestDistance = name, d
		}
	}
	return best
}

// allowance returns the number of typing errors that a key may have: a quarter of its length, at least one and at
// most three. It returns 0 for a key of fewer than three letters, since every short name would be close.
func allowance(key string) int {
	if len(key) < 3 {
		return 0
	}
	return min(3, max(1, len(key)/4))
}

// distance returns the number of insertions, deletions, replacements and swaps of adjacent bytes that turn a into b
// (optimal string alignment). It works on bytes, since the names are ASCII. Strings longer than 64 bytes count as
// entirely different.
func distance(a, b string) int {
	const longest = 64
	if len(a) > longest || len(b) > longest {
		return longest
	}

	before := make([]int, len(b)+1)
	above := make([]int, len(b)+1)
	row := make([]int, len(b)+1)
	for j := range above {
		above[j] = j
	}

	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(above[j]+1, row[j-1]+1, above[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}

		before, above, row = above, row, before
	}

	return above[len(b)]
}
