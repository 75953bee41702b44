package state

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/ident"
)

// ErrName says that a name cannot be used as one: it is empty, too long, or has
// characters that have no business in a file name.
var ErrName = errors.New("bad name")

const (
	// maxNetworkName leaves room for ".json" in NAME_MAX (255).
	maxNetworkName = 250
)

// checkNetwork accepts what the CNI specification allows as a network's name
// (section 1: alphanumeric first, then alphanumeric, '_', '.' or '-'). That keeps
// "..", '/', NUL and our own ".tmp-" out of paths.
func checkNetwork(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("network: %w: it is empty", ErrName)
	case len(name) > maxNetworkName:
		return fmt.Errorf("network %.20q…: %w: %d bytes, at most %d fit in a file name", name, ErrName, len(name), maxNetworkName)
	case !isAlphanumeric(name[0]):
		return fmt.Errorf("network %q: %w: it must start with a letter or a digit", name, ErrName)
	}
	for i := range len(name) {
		if c := name[i]; !isAlphanumeric(c) && c != '_' && c != '.' && c != '-' {
			return fmt.Errorf("network %q: %w: only letters, digits, '_', '.' and '-' are allowed", name, ErrName)
		}
	}
	return nil
}

// maxNIC is IFNAMSIZ without its NUL.
const maxNIC = unix.IFNAMSIZ - 1

// checkNIC accepts what the kernel takes for a link's name (dev_valid_name in
// net/core/dev.c), but for what is not UTF-8 and for "eth%d", in which it would choose a
// number. That keeps ".." and '/' out of paths.
func checkNIC(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("uplink: %w: it is empty", ErrName)
	case len(name) > maxNIC:
		return fmt.Errorf("uplink %.20q: %w: %d bytes, at most %d are a link's name", name, ErrName, len(name), maxNIC)
	case name == "." || name == "..":
		return fmt.Errorf("uplink %q: %w: no link has it", name, ErrName)
	case !utf8.ValidString(name), strings.ContainsAny(name, "/:%\x00 \t\n\v\f\r"):
		return fmt.Errorf("uplink %q: %w: '/', ':', '%%', white space and what is no text are not allowed", name, ErrName)
	}
	return nil
}

// checkMember checks the other two names of an attachment. They never become
// part of a path, but they have to survive JSON, which holds UTF-8 only: else the
// record would no longer match its own hash.
func checkMember(what, name string) error {
	if name == "" {
		return fmt.Errorf("%s: %w: it is empty", what, ErrName)
	}
	if !utf8.ValidString(name) {
		return fmt.Errorf("%s %q: %w: it is not UTF-8", what, name, ErrName)
	}
	return nil
}

// IsHash says whether an attachment could have a hash like this.
func IsHash(hash string) bool { return checkHash(hash) == nil }

// checkHash accepts what Hash returns and nothing else.
func checkHash(hash string) error {
	if len(hash) != ident.Digits {
		return fmt.Errorf("hash %.20q: %w: %d characters, want %d", hash, ErrName, len(hash), ident.Digits)
	}
	for i := range len(hash) {
		if c := hash[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return fmt.Errorf("hash %q: %w: only lower-case hexadecimal digits are allowed", hash, ErrName)
		}
	}
	return nil
}

func isAlphanumeric(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
}
