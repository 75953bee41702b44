package jsontext

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
)

// A Scanner moves over a JSON document. Whatever moves over a value has found it valid by
// RFC 8259 when it returns, also where the value itself is of no interest.
type Scanner struct {
	data []byte
	json *jsontext.Decoder
}

// Scan begins at the start of a document.
func Scan(data []byte) *Scanner {
	// An object's keys are compared by the caller, which knows what a second one means. Bytes
	// that are no UTF-8 are replaced, as encoding/json does.
	return &Scanner{data: data, json: jsontext.NewDecoder(bytes.NewBuffer(data),
		jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))}
}

// SyntaxError reports bytes that are not JSON.
type SyntaxError struct {
	Offset int    // index of the offending byte
	Line   int    // its line, from 1
	Column int    // its column in bytes, from 1
	Reason string // what was expected there and what was found
}

func (e *SyntaxError) Error() string {
	return fmt.Sprintf("not valid JSON at line %d, column %d: %s", e.Line, e.Column, e.Reason)
}

// syntaxError says in which line and column the decoder met err.
func (s *Scanner) syntaxError(err error) error {
	offset := s.json.InputOffset()
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
	return s.errorAt(int(offset), reason)
}

// errorAt says in which line and column a byte is.
func (s *Scanner) errorAt(offset int, reason string) error {
	before := s.data[:min(offset, len(s.data))]
	return &SyntaxError{
		Offset: len(before),
		Line:   1 + bytes.Count(before, []byte{'\n'}),
		Column: len(before) - bytes.LastIndexByte(before, '\n'),
		Reason: reason,
	}
}

// Next tells the kind of the next value by its first byte; '0' stands for any number, and 0
// for what is not JSON, or the end.
func (s *Scanner) Next() byte { return byte(s.json.PeekKind()) }

// End fails where something other than white space follows.
func (s *Scanner) End() error {
	rest := bytes.TrimLeft(s.data[s.json.InputOffset():], " \t\r\n")
	if len(rest) == 0 {
		return nil
	}
	return s.errorAt(len(s.data)-len(rest), "there is more after its end")
}

// Value moves over one value of any kind and returns its bytes.
func (s *Scanner) Value() ([]byte, error) {
	value, err := s.json.ReadValue()
	if err != nil {
		return nil, s.syntaxError(err)
	}
	end := int(s.json.InputOffset())
	return s.data[end-len(value) : end], nil
}

// Object moves over an object that is next. member is called with each key when its value is
// next, and moves over that.
func (s *Scanner) Object(member func(key []byte) error) error {
	if err := s.delimiter(); err != nil {
		return err
	}
	for s.Next() != '}' {
		key, err := s.Value()
		if err != nil {
			return err
		}
		if err := member(Unquote(key)); err != nil {
			return err
		}
	}
	return s.delimiter()
}

// Array moves over a list that is next. element moves over one element.
func (s *Scanner) Array(element func() error) error {
	if err := s.delimiter(); err != nil {
		return err
	}
	for s.Next() != ']' {
		if err := element(); err != nil {
			return err
		}
	}
	return s.delimiter()
}

// delimiter moves over a bracket or a brace.
func (s *Scanner) delimiter() error {
	if _, err := s.json.ReadToken(); err != nil {
		return s.syntaxError(err)
	}
	return nil
}

// Unquote decodes a string that a Scanner has moved over, as a part of it where it can. What is not
// UTF-8 becomes U+FFFD.
func Unquote(quoted []byte) []byte {
	if inner := quoted[1 : len(quoted)-1]; bytes.IndexByte(inner, '\\') < 0 && utf8.Valid(inner) {
		return inner
	}
	// An error only says that there was such a replacement.
	text, _ := jsontext.AppendUnquote(nil, quoted)
	return text
}
