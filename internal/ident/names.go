package ident

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// ErrName says that a name cannot be used as one: it is empty, too long, or has characters that it
// must not have.
var ErrName = errors.New("bad name")

// IsIdentifier holds container IDs and network names to the specification's
// ^[a-zA-Z0-9][a-zA-Z0-9_.-]*$.
func IsIdentifier(s string) bool {
	for i := range len(s) {
		ch := s[i]
		alphanumeric := 'a' <= ch && ch <= 'z' || 'A' <= ch && ch <= 'Z' || '0' <= ch && ch <= '9'
		if !alphanumeric && (i == 0 || !strings.ContainsRune("_.-", rune(ch))) {
			return false
		}
	}
	return s != ""
}

// IsLinkName keeps to what the kernel takes (dev_valid_name()), but for percent signs: of
// a link that is made as "br%d" it chooses the number itself, a new one at each call.
func IsLinkName(s string) bool {
	return s != "" && len(s) <= 15 && s != "." && s != ".." && !strings.ContainsAny(s, "/:% \t\n\v\f\r\x00")
}

// IsHash says whether an attachment could have a hash like this.
func IsHash(s string) bool { return len(s) == Digits && strings.Trim(s, "0123456789abcdef") == "" }

// CheckHash accepts what Hash returns and nothing else, so that no hash leads out of a directory.
func CheckHash(hash string) error {
	if !IsHash(hash) {
		return fmt.Errorf("hash %.20q: %w: want %d lower-case hexadecimal digits", hash, ErrName, Digits)
	}
	return nil
}

// CheckText accepts a name that never becomes part of a path. It has to survive JSON, which holds
// UTF-8 only: else a record would not match its own hash.
func CheckText(what, name string) error {
	if name == "" {
		return fmt.Errorf("%s: %w: it is empty", what, ErrName)
	}
	if !utf8.ValidString(name) {
		return fmt.Errorf("%s %q: %w: it is not UTF-8", what, name, ErrName)
	}
	return nil
}
