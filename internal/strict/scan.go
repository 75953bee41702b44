package strict

import "encoding/json"

// maxDepth bounds the nesting, and with it the recursion. A netconf needs less
// than ten levels.
const maxDepth = 128

// space moves over white space.
func (d *decoder) space() {
	for d.pos < len(d.data) {
		switch d.data[d.pos] {
		case ' ', '\t', '\r', '\n':
			d.pos++
		default:
			return
		}
	}
}

// Scanning and checking are one: whatever moves over a value has found it valid
// by RFC 8259 when it returns, also where the value itself is of no interest.
// So there is no first pass over the document, as encoding/json has one.

// next moves over white space and returns the byte there, or 0 at the end (a 0
// byte is valid in no place where next is asked).
func (d *decoder) next() byte {
	d.space()
	if d.pos >= len(d.data) {
		return 0
	}
	return d.data[d.pos]
}

// enter counts a level of nesting; leave it again with d.depth--.
func (d *decoder) enter() error {
	if d.depth++; d.depth > maxDepth {
		return d.syntaxError(d.pos, "nested too deeply")
	}
	return nil
}

// value moves over one value of any kind, checks that it is valid, and returns
// its bytes.
func (d *decoder) value() ([]byte, error) {
	c := d.next()
	start := d.pos
	var err error
	switch {
	case c == '{':
		err = d.object(func([]byte) error { _, err := d.value(); return err })
	case c == '[':
		err = d.array(func() error { _, err := d.value(); return err })
	case c == '"':
		_, err = d.quoted()
	case c == 't':
		err = d.literal("true")
	case c == 'f':
		err = d.literal("false")
	case c == 'n':
		err = d.literal("null")
	case c == '-' || isDigit(c):
		err = d.number()
	default:
		err = d.expected("a value")
	}
	if err != nil {
		return nil, err
	}
	return d.data[start:d.pos], nil
}

// object moves over an object whose brace is at the current position. member is
// called with each key, still quoted, when the position is at its value, and
// moves over that.
func (d *decoder) object(member func(key []byte) error) error {
	if err := d.enter(); err != nil {
		return err
	}
	d.pos++
	for first := true; ; first = false {
		c := d.next()
		switch {
		case c == '}' && first:
			d.pos++
			d.depth--
			return nil
		case c != '"':
			return d.expected("a key in double quotes")
		}
		key, err := d.quoted()
		if err != nil {
			return err
		}
		if d.next() != ':' {
			return d.expected("':'")
		}
		d.pos++
		d.space()
		if err := member(key); err != nil {
			return err
		}
		switch d.next() {
		case ',':
			d.pos++
		case '}':
			d.pos++
			d.depth--
			return nil
		default:
			return d.expected("',' or '}'")
		}
	}
}

// array moves over a list whose bracket is at the current position. element
// moves over one element.
func (d *decoder) array(element func() error) error {
	if err := d.enter(); err != nil {
		return err
	}
	d.pos++
	if d.next() == ']' {
		d.pos++
		d.depth--
		return nil
	}
	for {
		if err := element(); err != nil {
			return err
		}
		switch d.next() {
		case ',':
			d.pos++
			d.space()
		case ']':
			d.pos++
			d.depth--
			return nil
		default:
			return d.expected("',' or ']'")
		}
	}
}

// quoted moves over a string and returns it with its quotes.
func (d *decoder) quoted() ([]byte, error) {
	start := d.pos
	for d.pos++; d.pos < len(d.data); d.pos++ {
		switch c := d.data[d.pos]; {
		case c == '"':
			d.pos++
			return d.data[start:d.pos], nil
		case c == '\\':
			if err := d.escape(); err != nil {
				return nil, err
			}
		case c < ' ':
			return nil, d.syntaxError(d.pos, "control character "+d.found()+" in a string")
		}
	}
	return nil, d.syntaxError(d.pos, "a string has no closing quote")
}

// escape moves from a backslash to the last byte of its sequence.
func (d *decoder) escape() error {
	if d.pos++; d.pos >= len(d.data) {
		return d.syntaxError(d.pos, "a string has no closing quote")
	}
	switch d.data[d.pos] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return nil
	case 'u':
		for range 4 {
			if d.pos++; d.pos >= len(d.data) || !isHex(d.data[d.pos]) {
				return d.expected("four hexadecimal digits after \\u")
			}
		}
		return nil
	default:
		return d.expected("an escape sequence")
	}
}

// literal moves over one of true, false and null.
func (d *decoder) literal(word string) error {
	for i := range len(word) {
		if d.pos >= len(d.data) || d.data[d.pos] != word[i] {
			return d.expected(word)
		}
		d.pos++
	}
	return nil
}

// number moves over a number in the grammar of RFC 8259, section 6: no leading
// zeros, no bare point.
func (d *decoder) number() error {
	if d.data[d.pos] == '-' {
		d.pos++
	}
	if d.pos < len(d.data) && d.data[d.pos] == '0' {
		d.pos++
	} else if err := d.digits(); err != nil {
		return err
	}
	if d.pos < len(d.data) && d.data[d.pos] == '.' {
		d.pos++
		if err := d.digits(); err != nil {
			return err
		}
	}
	if d.pos < len(d.data) && (d.data[d.pos] == 'e' || d.data[d.pos] == 'E') {
		d.pos++
		if d.pos < len(d.data) && (d.data[d.pos] == '+' || d.data[d.pos] == '-') {
			d.pos++
		}
		return d.digits()
	}
	return nil
}

// digits moves over one digit or more.
func (d *decoder) digits() error {
	start := d.pos
	for d.pos < len(d.data) && isDigit(d.data[d.pos]) {
		d.pos++
	}
	if d.pos == start {
		return d.expected("a digit")
	}
	return nil
}

// unquote decodes a string that quoted returned. Plain ASCII, the usual case,
// is only cut.
func unquote(quoted []byte) string {
	inner := quoted[1 : len(quoted)-1]
	if !plain(inner) {
		return unquoteSlow(quoted)
	}
	return string(inner)
}

// plain reports whether the inside of a string stands for itself: ASCII without
// escapes.
func plain(inner []byte) bool {
	for _, c := range inner {
		if c == '\\' || c >= 0x80 {
			return false
		}
	}
	return true
}

// unquoteSlow leaves escapes and invalid UTF-8 (which becomes U+FFFD) to
// encoding/json.
func unquoteSlow(quoted []byte) string {
	var s string
	// The bytes are known to be a valid string, so there is no error to have.
	_ = json.Unmarshal(quoted, &s)
	return s
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

func isHex(c byte) bool {
	return isDigit(c) || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F'
}
