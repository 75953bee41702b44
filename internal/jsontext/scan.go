package jsontext

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"unicode/utf8"
)

// maxDepth bounds the nesting, and with it the recursion. A netconf needs less
// than ten levels, a record fewer.
const maxDepth = 128

// A Scanner moves over a JSON document. Scanning and checking are one: whatever moves
// over a value has found it valid by RFC 8259 when it returns, also where the value itself
// is of no interest. So there is no first pass over the document, as encoding/json has
// one.
type Scanner struct {
	Data  []byte
	pos   int
	depth int
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

// syntaxError builds the error for the byte at the current position.
func (s *Scanner) syntaxError(reason string) error {
	before := s.Data[:min(s.pos, len(s.Data))]
	return &SyntaxError{
		Offset: s.pos,
		Line:   1 + bytes.Count(before, []byte{'\n'}),
		Column: s.pos - bytes.LastIndexByte(before, '\n'),
		Reason: reason,
	}
}

// expected is the syntax error for a token that should have been at the current
// position.
func (s *Scanner) expected(what string) error {
	return s.syntaxError("expected " + what + ", found " + s.found())
}

// found names the character at the current position.
func (s *Scanner) found() string {
	if s.pos >= len(s.Data) {
		return "the end"
	}
	r, _ := utf8.DecodeRune(s.Data[s.pos:])
	return strconv.QuoteRune(r)
}

// space moves over white space.
func (s *Scanner) space() {
	for s.pos < len(s.Data) {
		switch s.Data[s.pos] {
		case ' ', '\t', '\r', '\n':
			s.pos++
		default:
			return
		}
	}
}

// Next moves over white space and returns the byte there, or 0 at the end (a 0
// byte is valid in no place where next is asked).
func (s *Scanner) Next() byte {
	s.space()
	if s.pos >= len(s.Data) {
		return 0
	}
	return s.Data[s.pos]
}

// End fails where something other than white space follows.
func (s *Scanner) End() error {
	if s.Next(); s.pos < len(s.Data) {
		return s.syntaxError("trailing data after the end of the object: " + s.found())
	}
	return nil
}

// enter counts a level of nesting; leave it again with s.depth--.
func (s *Scanner) enter() error {
	if s.depth++; s.depth > maxDepth {
		return s.syntaxError("nested too deeply")
	}
	return nil
}

// Value moves over one value of any kind, checks that it is valid, and returns
// its bytes.
func (s *Scanner) Value() ([]byte, error) {
	c := s.Next()
	start := s.pos
	var err error
	switch {
	case c == '{':
		err = s.Object(func([]byte) error { _, err := s.Value(); return err })
	case c == '[':
		err = s.Array(func() error { _, err := s.Value(); return err })
	case c == '"':
		_, err = s.quoted()
	case c == 't':
		err = s.Literal("true")
	case c == 'f':
		err = s.Literal("false")
	case c == 'n':
		err = s.Literal("null")
	case c == '-' || isDigit(c):
		err = s.number()
	default:
		err = s.expected("a value")
	}
	if err != nil {
		return nil, err
	}
	return s.Data[start:s.pos], nil
}

// Object moves over an object whose brace is at the current position. member is
// called with each key, still quoted, when the position is at its value, and
// moves over that.
func (s *Scanner) Object(member func(key []byte) error) error {
	if err := s.enter(); err != nil {
		return err
	}
	s.pos++
	for first := true; ; first = false {
		c := s.Next()
		switch {
		case c == '}' && first:
			s.pos++
			s.depth--
			return nil
		case c != '"':
			return s.expected("a key in double quotes")
		}
		key, err := s.quoted()
		if err != nil {
			return err
		}
		if s.Next() != ':' {
			return s.expected("':'")
		}
		s.pos++
		s.space()
		if err := member(key); err != nil {
			return err
		}
		switch s.Next() {
		case ',':
			s.pos++
		case '}':
			s.pos++
			s.depth--
			return nil
		default:
			return s.expected("',' or '}'")
		}
	}
}

// Array moves over a list whose bracket is at the current position. element
// moves over one element.
func (s *Scanner) Array(element func() error) error {
	if err := s.enter(); err != nil {
		return err
	}
	s.pos++
	if s.Next() == ']' {
		s.pos++
		s.depth--
		return nil
	}
	for {
		if err := element(); err != nil {
			return err
		}
		switch s.Next() {
		case ',':
			s.pos++
			s.space()
		case ']':
			s.pos++
			s.depth--
			return nil
		default:
			return s.expected("',' or ']'")
		}
	}
}

// quoted moves over a string and returns it with its quotes.
func (s *Scanner) quoted() ([]byte, error) {
	start := s.pos
	for s.pos++; s.pos < len(s.Data); s.pos++ {
		switch c := s.Data[s.pos]; {
		case c == '"':
			s.pos++
			return s.Data[start:s.pos], nil
		case c == '\\':
			if err := s.escape(); err != nil {
				return nil, err
			}
		case c < ' ':
			return nil, s.syntaxError("control character " + s.found() + " in a string")
		}
	}
	return nil, s.syntaxError("a string has no closing quote")
}

// escape moves from a backslash to the last byte of its sequence.
func (s *Scanner) escape() error {
	if s.pos++; s.pos >= len(s.Data) {
		return s.syntaxError("a string has no closing quote")
	}
	switch s.Data[s.pos] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return nil
	case 'u':
		for range 4 {
			if s.pos++; s.pos >= len(s.Data) || !isHex(s.Data[s.pos]) {
				return s.expected("four hexadecimal digits after \\u")
			}
		}
		return nil
	default:
		return s.expected("an escape sequence")
	}
}

// Literal moves over one of true, false and null.
func (s *Scanner) Literal(word string) error {
	for i := range len(word) {
		if s.pos >= len(s.Data) || s.Data[s.pos] != word[i] {
			return s.expected(word)
		}
		s.pos++
	}
	return nil
}

// number moves over a number in the grammar of RFC 8259, section 6: no leading
// zeros, no bare point.
func (s *Scanner) number() error {
	if s.Data[s.pos] == '-' {
		s.pos++
	}
	if s.pos < len(s.Data) && s.Data[s.pos] == '0' {
		s.pos++
	} else if err := s.digits(); err != nil {
		return err
	}
	if s.pos < len(s.Data) && s.Data[s.pos] == '.' {
		s.pos++
		if err := s.digits(); err != nil {
			return err
		}
	}
	if s.pos < len(s.Data) && (s.Data[s.pos] == 'e' || s.Data[s.pos] == 'E') {
		s.pos++
		if s.pos < len(s.Data) && (s.Data[s.pos] == '+' || s.Data[s.pos] == '-') {
			s.pos++
		}
		return s.digits()
	}
	return nil
}

// digits moves over one digit or more.
func (s *Scanner) digits() error {
	start := s.pos
	for s.pos < len(s.Data) && isDigit(s.Data[s.pos]) {
		s.pos++
	}
	if s.pos == start {
		return s.expected("a digit")
	}
	return nil
}

// Unquote decodes a string that a Scanner has moved over, as a part of it where it can. What
// is not UTF-8 becomes U+FFFD.
func Unquote(quoted []byte) []byte {
	inner := quoted[1 : len(quoted)-1]
	if bytes.IndexByte(inner, '\\') < 0 && utf8.Valid(inner) {
		return inner
	}
	var text string
	// The bytes are known to be a valid string, so there is no error to have.
	_ = json.Unmarshal(quoted, &text)
	return []byte(text)
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

func isHex(c byte) bool {
	return isDigit(c) || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F'
}
