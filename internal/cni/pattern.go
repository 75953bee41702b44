package cni

import (
	"fmt"
	"path"
	"strings"
)

// A pattern of the allowlist is a regular expression. Of these it may have characters, '.', classes
// such as [a-z0-9], escaped characters, '*', '+' and '?' behind one of these, '^' and '$': package regexp
// costs each ADD 2 % before main begins. Another is an error, so that it allows nothing by mistake.

// matchesPattern says whether a pattern matches anywhere in a name.
func matchesPattern(pattern, name string) (bool, error) {
	from, head := strings.CutPrefix(pattern, "^")
	for rest := from; rest != "" && rest != "$"; {
		var err error
		if _, rest, err = cutOne(rest); err != nil {
			return false, fmt.Errorf("pattern %q: %w", pattern, err)
		}
		if rest != "" && strings.Contains("*+?", rest[:1]) {
			rest = rest[1:]
		}
	}
	for i := 0; i <= len(name) && (i == 0 || !head); i++ {
		if matchesHere(from, name[i:]) {
			return true, nil
		}
	}
	return false, nil
}

// cutOne cuts off what stands for one character: a pattern of path.Match, or ".".
func cutOne(pattern string) (one, rest string, err error) {
	size := 1
	switch c := pattern[0]; {
	case c == '[':
		size = strings.IndexByte(pattern, ']') + 1
		if size < len("[a]") || strings.ContainsAny(pattern[1:size-1], `[\^`) {
			return "", "", fmt.Errorf("only classes such as [a-z0-9_] are known")
		}
		one = "[" + dashes(pattern[1:size-1]) + "]"
		_, err = path.Match(one, "")
		return one, pattern[size:], err
	case c == '\\' && len(pattern) > 1 && !isAlphanumeric(pattern[1]):
		size = 2
	case strings.IndexByte(`\^$*+?(){}|`, c) >= 0:
		err = fmt.Errorf("%q at this place is not known: write it with characters, '.', classes, '*', '+', '?', '^' and '$'", string(c))
	}
	return pattern[:size], pattern[size:], err
}

// dashes writes those at a class's ends, which stand for themselves, as path.Match has them.
func dashes(class string) string {
	if rest, first := strings.CutPrefix(class, "-"); first {
		return `\-` + dashes(rest)
	}
	if rest, last := strings.CutSuffix(class, "-"); last {
		return rest + `\-`
	}
	return class
}

// matchesHere says whether the beginning of a name matches, or with a "$" all of it.
func matchesHere(pattern, name string) bool {
	switch pattern {
	case "":
		return true
	case "$":
		return name == ""
	}
	one, rest, _ := cutOne(pattern)
	least, most := 1, 1
	if rest != "" {
		switch rest[0] {
		case '*':
			least, most, rest = 0, len(name), rest[1:]
		case '+':
			most, rest = len(name), rest[1:]
		case '?':
			least, rest = 0, rest[1:]
		}
	}
	for n := 0; ; n++ {
		if n >= least && matchesHere(rest, name[n:]) {
			return true
		}
		if n >= most || n >= len(name) {
			return false
		}
		if is, _ := path.Match(one, name[n:n+1]); !is && one != "." {
			return false
		}
	}
}

func isAlphanumeric(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}
