package state

import "fmt"

// The functions here take JSON apart that json.Valid has accepted, so they need
// not look for errors of syntax: only for values of the wrong kind.

// splitObject returns an object's members, in order.
func splitObject(raw []byte) ([]member, error) {
	if raw[0] != '{' {
		return nil, fmt.Errorf("want an object, not %.40q", raw)
	}
	members := make([]member, 0, 24)
	for i := skip(raw, 1); raw[i] != '}'; i = skip(raw, i) {
		end := valueEnd(raw, i)
		name, err := unquote(raw[i:end])
		if err != nil {
			return nil, err
		}
		i = skip(raw, end)
		end = valueEnd(raw, i)
		members = append(members, member{name: name, raw: raw[i:end]})
		i = end
	}
	return members, nil
}

// splitList calls item with each element of a list until it fails.
func splitList(raw []byte, item func([]byte) error) error {
	if raw[0] != '[' {
		return fmt.Errorf("want a list, not %.40q", raw)
	}
	for i := skip(raw, 1); raw[i] != ']'; i = skip(raw, i) {
		end := valueEnd(raw, i)
		if err := item(raw[i:end]); err != nil {
			return err
		}
		i = end
	}
	return nil
}

// skip passes over what stands between values.
func skip(raw []byte, i int) int {
	for {
		switch raw[i] {
		case ' ', '\t', '\r', '\n', ',', ':':
			i++
		default:
			return i
		}
	}
}

// valueEnd returns the index after the value that starts at i.
func valueEnd(raw []byte, i int) int {
	depth := 0
	for ; i < len(raw); i++ {
		switch raw[i] {
		case '{', '[':
			depth++
			continue
		case '}', ']':
			depth--
		case '"':
			i = stringEnd(raw, i) - 1
		case ' ', '\t', '\r', '\n', ',', ':':
			continue
		default:
			i = wordEnd(raw, i) - 1
		}
		if depth == 0 {
			return i + 1
		}
	}
	return len(raw)
}

// stringEnd returns the index after the string that starts at i.
func stringEnd(raw []byte, i int) int {
	for i++; raw[i] != '"'; i++ {
		if raw[i] == '\\' {
			i++
		}
	}
	return i + 1
}

// wordEnd returns the index after the number, true, false or null at i.
func wordEnd(raw []byte, i int) int {
	for ; i < len(raw); i++ {
		switch raw[i] {
		case ' ', '\t', '\r', '\n', ',', ':', '}', ']':
			return i
		}
	}
	return i
}
