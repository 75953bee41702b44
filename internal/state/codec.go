package state

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"time"

	"github.com/tombolo-cni/tombolo/internal/jsontext"
)

// A codec moves the fields of a record to the members of a JSON object, or back.
// A record type lists its fields once, in a method that takes a codec.
//
// It stands in for encoding/json because an exec'd plugin marshals each type
// just once, and the first use of a type costs encoding/json 20 to 90 µs of
// reflection: 130 µs of an ADD that may take 2,500. The tests hold it to what
// encoding/json writes and reads with the struct tags.
//
// Members are matched by exact name, unknown ones are ignored, null counts as
// absent, and of several with one name the last counts. Zero values are left out.
type codec struct {
	decoding bool
	members  []member
	out      *jsontext.Object
	err      error
}

// A member is a member of a JSON object: its name, and its value as text.
type member struct {
	name []byte // without quotes and escapes
	raw  []byte
}

// version is that of the records and files that we write.
const version = 1

// encode returns the object with these fields, on one line that ends in a newline.
func encode(fields func(*codec)) []byte {
	c := &codec{out: jsontext.OpenObject(make([]byte, 0, 1024))}
	written := version
	c.int("version", &written)
	fields(c)
	return append(c.out.Close(), '\n')
}

// decode sets the fields from an object. It fails with ErrVersion if a newer
// version wrote the object, else with ErrDamaged.
func decode(data []byte, fields func(*codec)) error {
	members, err := membersOf(data)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	c := &codec{decoding: true, members: members}
	found := 0
	c.int("version", &found)
	if c.err == nil && found > version {
		return fmt.Errorf("%w: version %d, and this tombolo reads up to %d", ErrVersion, found, version)
	}
	if c.err == nil && found < 1 {
		c.err = errors.New("it has no version")
	}
	fields(c)
	if c.err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, c.err)
	}
	return nil
}

func (c *codec) string(name string, v *string)    { field(c, name, v, jsontext.AppendString, parseString) }
func (c *codec) int(name string, v *int)          { field(c, name, v, appendInt, parseInt) }
func (c *codec) uint64(name string, v *uint64)    { field(c, name, v, appendUint, parseUint) }
func (c *codec) bool(name string, v *bool)        { field(c, name, v, strconv.AppendBool, parseBool) }
func (c *codec) optional(name string, v **bool)   { field(c, name, v, appendOptional, parseOptional) }
func (c *codec) time(name string, v *time.Time)   { field(c, name, v, appendTime, parseTime) }
func (c *codec) addr(name string, v *netip.Addr)  { field(c, name, v, appendText, parseAddr) }
func (c *codec) prefix(n string, v *netip.Prefix) { field(c, n, v, appendText, parsePrefix) }

func (c *codec) optionalInt(name string, v **int) {
	field(c, name, v, func(b []byte, v *int) []byte { return appendInt(b, *v) }, func(raw []byte) (*int, error) {
		n, err := parseInt(raw)
		return &n, err
	})
}

func (c *codec) duration(name string, v *time.Duration) {
	n := int(*v)
	c.int(name, &n)
	*v = time.Duration(n)
}

func (c *codec) prefixes(name string, v *[]netip.Prefix) {
	list(c, name, v, appendText[netip.Prefix], parsePrefix)
}

// object is a nested object; one without members is left out.
func (c *codec) object(name string, fields func(*codec)) {
	if c.decoding {
		if raw, ok := c.find(name); ok {
			c.fail(name, decodeNested(raw, fields))
		}
		return
	}
	if body := encodeNested(nil, fields); len(body) > len("{}") {
		c.out.Done(append(c.out.Key(name), body...))
	}
}

// objects is a list of nested objects.
func objects[T any](c *codec, name string, v *[]T, fields func(*T, *codec)) {
	list(c, name, v,
		func(b []byte, item T) []byte {
			return encodeNested(b, func(c *codec) { fields(&item, c) })
		},
		func(raw []byte) (T, error) {
			var item T
			err := decodeNested(raw, func(c *codec) { fields(&item, c) })
			return item, err
		})
}

func encodeNested(b []byte, fields func(*codec)) []byte {
	c := &codec{out: jsontext.OpenObject(b)}
	fields(c)
	return c.out.Close()
}

func decodeNested(raw []byte, fields func(*codec)) error {
	members, err := membersOf(raw)
	if err != nil {
		return err
	}
	c := &codec{decoding: true, members: members}
	fields(c)
	return c.err
}

// field moves one value, leaving out the zero value.
func field[T comparable](c *codec, name string, v *T, put func([]byte, T) []byte, parse func([]byte) (T, error)) {
	if c.decoding {
		if raw, ok := c.find(name); ok {
			value, err := parse(raw)
			c.fail(name, err)
			*v = value
		}
		return
	}
	var zero T
	if *v != zero {
		c.out.Done(put(c.out.Key(name), *v))
	}
}

// list moves a list, leaving out the empty one.
func list[T any](c *codec, name string, v *[]T, put func([]byte, T) []byte, parse func([]byte) (T, error)) {
	if c.decoding {
		if raw, ok := c.find(name); ok {
			*v = nil
			c.fail(name, eachOf(raw, func(item []byte) error {
				value, err := parse(item)
				*v = append(*v, value)
				return err
			}))
		}
		return
	}
	jsontext.List(c.out, name, *v, put)
}

// eachOf calls item with each element of a list until it fails.
func eachOf(raw []byte, item func([]byte) error) error {
	if raw[0] != '[' {
		return fmt.Errorf("want a list, not %.40q", raw)
	}
	s := jsontext.Scan(raw)
	return s.Array(func() error {
		value, err := s.Value()
		if err == nil {
			err = item(value)
		}
		return err
	})
}

// membersOf takes an object apart, and checks that it is whole.
func membersOf(raw []byte) ([]member, error) {
	s := jsontext.Scan(raw)
	if s.Next() != '{' {
		if _, err := s.Value(); err != nil {
			return nil, notWhole(raw)
		}
		return nil, fmt.Errorf("want an object, not %.40q", raw)
	}
	members := make([]member, 0, 24)
	err := s.Object(func(name []byte) error {
		value, err := s.Value()
		members = append(members, member{name: name, raw: value})
		return err
	})
	if err != nil || s.End() != nil {
		return nil, notWhole(raw)
	}
	return members, nil
}

func notWhole(raw []byte) error { return fmt.Errorf("it is not whole JSON: %.60q", raw) }

func (c *codec) find(name string) ([]byte, bool) {
	for i := len(c.members) - 1; i >= 0; i-- {
		if m := c.members[i]; string(m.name) == name {
			return m.raw, !bytes.Equal(m.raw, []byte("null"))
		}
	}
	return nil, false
}

// fail keeps the first error.
func (c *codec) fail(name string, err error) {
	if err != nil && c.err == nil {
		c.err = fmt.Errorf("%s: %w", name, err)
	}
}

func parseString(raw []byte) (string, error) {
	if raw[0] != '"' {
		return "", fmt.Errorf("want a string, not %.40q", raw)
	}
	return string(jsontext.Unquote(raw)), nil
}

func appendInt(b []byte, n int) []byte     { return strconv.AppendInt(b, int64(n), 10) }
func appendUint(b []byte, n uint64) []byte { return strconv.AppendUint(b, n, 10) }
func parseInt(raw []byte) (int, error)     { return strconv.Atoi(string(raw)) }
func parseUint(raw []byte) (uint64, error) { return strconv.ParseUint(string(raw), 10, 64) }

func parseBool(raw []byte) (bool, error) {
	switch string(raw) {
	case "true":
		return true, nil
	case "false":
		return false, nil
	}
	return false, fmt.Errorf("want true or false, not %.40q", raw)
}

func appendOptional(b []byte, v *bool) []byte { return strconv.AppendBool(b, *v) }

func parseOptional(raw []byte) (*bool, error) {
	v, err := parseBool(raw)
	return &v, err
}

// appendTime writes UTC: the local zone would cost a read of /etc/localtime.
func appendTime(b []byte, t time.Time) []byte {
	b = append(b, '"')
	b = t.UTC().AppendFormat(b, time.RFC3339Nano)
	return append(b, '"')
}

func parseTime(raw []byte) (time.Time, error) {
	t, err := parseText(raw, func(s string) (time.Time, error) { return time.Parse(time.RFC3339Nano, s) })
	if t = t.UTC(); err == nil && (t.Year() < 0 || t.Year() > 9999) {
		err = fmt.Errorf("the year of %.40q is beyond RFC 3339", raw)
	}
	return t, err
}

// appendText writes an address or a prefix; an invalid one would not be read back.
func appendText[T fmt.Stringer](b []byte, v T) []byte { return jsontext.AppendString(b, v.String()) }

func parseAddr(raw []byte) (netip.Addr, error)     { return parseText(raw, netip.ParseAddr) }
func parsePrefix(raw []byte) (netip.Prefix, error) { return parseText(raw, netip.ParsePrefix) }

func parseText[T any](raw []byte, parse func(string) (T, error)) (T, error) {
	s, err := parseString(raw)
	if err != nil {
		var zero T
		return zero, err
	}
	return parse(s)
}
