package strict

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"unicode/utf8"

	"github.com/tombolo-cni/tombolo/internal/jsontext"
)

// valueLimit is how much of an offending value an error shows, in bytes.
const valueLimit = 64

// UnknownFieldError reports a key that no field of the object has.
type UnknownFieldError struct {
	Path    string // the field with all its parents: "ipam.ranges[0][0].rangeStrat"
	Key     string // the last element of Path: "rangeStrat"
	Value   string // what was given, as compact JSON of at most some 64 bytes
	Nearest string // a field that the object has and that is spelt nearly alike; else empty
}

// Error names the field by its path, the value, and the field that was probably
// meant.
func (e *UnknownFieldError) Error() string {
	msg := fmt.Sprintf("unknown field %q: %s", e.Path, e.Value)
	if e.Nearest != "" {
		msg += fmt.Sprintf(" (did you mean %q?)", e.Nearest)
	}
	return msg
}

// DuplicateKeyError reports a key that one object has twice. Other decoders
// silently take the last of them.
type DuplicateKeyError struct {
	Path string // the field with all its parents
}

func (e *DuplicateKeyError) Error() string {
	return fmt.Sprintf("field %q is given twice", e.Path)
}

// ValueError reports a value of the wrong type, or one that its field refuses.
type ValueError struct {
	Path string // the field with all its parents; empty for the document itself
	Want string // what the field takes, for an operator: "a whole number"
	Got  string // what was there: `the string "1500"`
	Err  error  // the refusal of a type that unmarshals itself; else nil
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

// Unwrap returns the refusal of the type, so that its sentinels can be matched.
func (e *ValueError) Unwrap() error { return e.Err }

// SyntaxError reports bytes that are not JSON.
type SyntaxError = jsontext.SyntaxError

// valueError builds the error for raw, a whole JSON value found at the current
// path.
func (d *decoder) valueError(raw []byte, want string, err error) error {
	return &ValueError{Path: d.pathString(), Want: want, Got: describe(raw), Err: err}
}

// describe names a JSON value for an operator: its kind, and for a scalar the
// value itself.
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

// compact strips the white space of a valid JSON value and cuts it to
// valueLimit, at a rune's start.
func compact(raw []byte) string {
	var buf bytes.Buffer
	if err := json.Compact(&buf, raw); err != nil {
		// json.Compact refuses what nests deeper than it likes; such a value is
		// cut anyway.
		buf.Reset()
		buf.Write(raw)
	}
	out := buf.Bytes()
	if len(out) <= valueLimit {
		return string(bytes.ToValidUTF8(out, []byte("\uFFFD")))
	}
	cut := valueLimit
	for cut > 0 && !utf8.RuneStart(out[cut]) {
		cut--
	}
	return string(bytes.ToValidUTF8(out[:cut], []byte("\uFFFD"))) + "…"
}
