package ident

import "strings"

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
