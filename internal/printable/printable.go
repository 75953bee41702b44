// Package printable makes text of any origin safe for a terminal and a log. Text from outside may contain control
// sequences for a terminal. Such text comes, for example, from a configuration, a file, the alias of a link, another
// program's rules, or the name of a process.
package printable

import (
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	// quoteMax is the maximum length, in bytes, of one quoted text or word in a message.
	quoteMax = 200
	// lineMax is the maximum length of a message in bytes.
	lineMax = 16 << 10
)

// Line returns a message in one line, with "; " in place of each line end. It cuts each quoted text or word after
// quoteMax bytes, and the message after lineMax bytes. It escapes characters that cannot be printed.
func Line(message string) string {
	text := escape(strings.ReplaceAll(message, "\n", "; "), "")
	text = cut(text)
	if len(text) > lineMax {
		text = whole(text[:lineMax]) + "…"
	}
	return text
}

// cut replaces each quoted text or word that is longer than quoteMax bytes by its first quoteMax bytes and "…".
func cut(text string) string {
	if len(text) <= quoteMax {
		return text
	}

	pieces := regexp.MustCompile(`"(?:\\.|[^"\\])*"?| ?[^ "]+`)
	return pieces.ReplaceAllStringFunc(text, func(piece string) string {
		quote, inner := "", piece
		if piece[0] == '"' {
			quote, inner = `"`, strings.TrimSuffix(piece[1:], `"`)
		}
		if len(inner) <= quoteMax {
			return piece
		}
		return quote + whole(inner[:quoteMax]) + "…" + quote
	})
}

// whole removes an incomplete rune from the end of a text. If one of the last five bytes is a backslash, whole cuts the
// text there, since an escape (such as \u00) may be incomplete.
func whole(text string) string {
	for len(text) > 0 && !utf8.ValidString(text) {
		text = text[:len(text)-1]
	}
	if i := strings.LastIndexByte(text, '\\'); i > len(text)-6 && i >= 0 {
		text = text[:i]
	}
	return text
}

// escape replaces each character that cannot be printed by its escape in JSON, such as \u001b. It does not replace the
// characters in keep. A byte that is not UTF-8 becomes \ufffd.
func escape(text, keep string) string {
	ok := func(r rune) bool {
		return r != utf8.RuneError && strconv.IsPrint(r) || strings.ContainsRune(keep, r)
	}
	if strings.IndexFunc(text, func(r rune) bool { return !ok(r) }) < 0 {
		return text
	}

	var out strings.Builder
	for _, r := range text {
		switch {
		case ok(r):
			out.WriteRune(r)
		case r > 0xffff:
			// A rune above U+FFFF needs two escapes in JSON (RFC 8259, section 7).
			r -= 0x10000
			fmt.Fprintf(&out, `\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
		default:
			fmt.Fprintf(&out, `\u%04x`, r)
		}
	}

	return out.String()
}

// Writer returns a writer that escapes characters that cannot be printed, except line ends and tabs, and writes the
// result to w. Each call of Write must pass whole characters.
func Writer(w io.Writer) io.Writer { return &writer{w} }

type writer struct{ to io.Writer }

func (w *writer) Write(p []byte) (int, error) {
	if _, err := io.WriteString(w.to, escape(string(p), "\n\t")); err != nil {
		return 0, err
	}
	return len(p), nil
}

// List joins the texts of all elements with a separator.
func List[T fmt.Stringer](all []T, between string) string { return strings.Join(Texts(all), between) }

// Texts returns the texts of all elements.
func Texts[T fmt.Stringer](all []T) []string {
	texts := make([]string, len(all))
	for i, one := range all {
		texts[i] = one.String()
	}
	return texts
}

// Fold breaks a text into lines of at most width bytes, between words. A word longer than width gets a line of its own.
func Fold(text string, width int) []string {
	var lines []string
	for _, word := range strings.Fields(text) {
		if last := len(lines) - 1; last >= 0 && len(lines[last])+1+len(word) <= width {
			lines[last] += " " + word
		} else {
			lines = append(lines, word)
		}
	}
	return lines
}

// Count returns a number with its noun as text: the noun one for 1, and many for any other number.
func Count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
