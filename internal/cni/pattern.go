package cni

import (
	"fmt"
	"strings"
)

// A pattern of the allowlist is a regular expression. Of these it may have characters, '.', classes
// such as [a-z0-9], escaped characters, '*', '+' and '?' behind one of these, '^' and '$': package regexp
// costs each ADD 2 % before main begins. Another is an error, so that it allows nothing by mistake.

// piece is one part of a pattern.
type piece struct {
	any    bool   // every character
	class  string // those of a class, as written; empty for char
	char   byte
	repeat byte // '*', '+', '?', or 0 for once
}

// matchesPattern says whether a pattern matches anywhere in a name.
func matchesPattern(pattern, name string) (bool, error) {
	pieces, head, tail, err := parsePattern(pattern)
	if err != nil {
		return false, err
	}
	for i := 0; i <= len(name); i++ {
		if matchPieces(pieces, name[i:], tail) {
			return true, nil
		}
		if head {
			break
		}
	}
	return false, nil
}

func parsePattern(pattern string) (pieces []piece, head, tail bool, _ error) {
	rest, head := strings.CutPrefix(pattern, "^")
	for len(rest) > 0 {
		if rest == "$" {
			return pieces, head, true, nil
		}
		p, size := piece{char: rest[0]}, 1
		switch c := rest[0]; {
		case c == '.':
			p.any = true
		case c == '[':
			end := strings.IndexByte(rest, ']')
			if end < 2 || strings.ContainsAny(rest[1:end], `[\^`) {
				return nil, false, false, fmt.Errorf("pattern %q: only classes such as [a-z0-9_] are known", pattern)
			}
			p.class, size = rest[1:end], end+1
		case c == '\\' && len(rest) > 1 && !isAlphanumeric(rest[1]):
			p.char, size = rest[1], 2
		case strings.IndexByte(`\^$*+?(){}|`, c) >= 0:
			return nil, false, false, fmt.Errorf("pattern %q: %q at this place is not known: write it with characters, '.', classes, '*', '+', '?', '^' and '$'", pattern, string(c))
		}
		if rest = rest[size:]; rest != "" && strings.IndexByte("*+?", rest[0]) >= 0 {
			p.repeat, rest = rest[0], rest[1:]
		}
		pieces = append(pieces, p)
	}
	return pieces, head, false, nil
}

// matchPieces says whether the beginning of a name matches, or with tail all of it.
func matchPieces(pieces []piece, name string, tail bool) bool {
	if len(pieces) == 0 {
		return !tail || name == ""
	}
	p := pieces[0]
	least, most := 1, 1
	switch p.repeat {
	case '*':
		least, most = 0, len(name)
	case '+':
		most = len(name)
	case '?':
		least = 0
	}
	for n := 0; ; n++ {
		if n >= least && matchPieces(pieces[1:], name[n:], tail) {
			return true
		}
		if n >= most || n >= len(name) || !p.has(name[n]) {
			return false
		}
	}
}

func (p *piece) has(c byte) bool {
	switch {
	case p.any:
		return true
	case p.class == "":
		return c == p.char
	}
	for i := 0; i < len(p.class); i++ {
		from, to := p.class[i], p.class[i]
		if i+2 < len(p.class) && p.class[i+1] == '-' {
			to = p.class[i+2]
			i += 2
		}
		if from <= c && c <= to {
			return true
		}
	}
	return false
}

func isAlphanumeric(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}
