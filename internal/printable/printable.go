// Package printable makes text of any origin fit for a terminal and a log. Text from outside, such as a
// configuration, a file, the alias of a link, another program's rules, or the name of a process, may have control
// sequences for a terminal.
package printable

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	// quoteMax is how many bytes a message keeps of one quoted piece, or of one word.
	quoteMax = 200
	// lineMax is how many it has at most.
	lineMax = 16 << 10
)

// Line is a message on one line: joined errors, which come a line each, are set apart by semicolons; quoted texts
// and words are cut after 200 bytes, and characters that cannot be printed are escaped.
func Line(message string) string {
	text := escape(strings.ReplaceAll(message, "\n", "; "), "")
	text = cut(text)
	if len(text) > lineMax {
		text = whole(text[:lineMax]) + "…"
	}
	return text
}

// cut shortens quoted pieces and words.
func cut(text string) string {
	if len(text) <= quoteMax {
		return text
	}
	var out strings.Builder
	quoted, start := false, 0
	flush := func(end int) {
		piece := text[start:end]
		if len(piece) > quoteMax {
			piece = whole(piece[:quoteMax]) + "…"
		}
		out.WriteString(piece)
		start = end
	}
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '\\' && quoted:
			i++ // what follows is no end
		case c == '"':
			flush(i)
			out.WriteByte(c)
			start = i + 1
			quoted = !quoted
		case c == ' ' && !quoted:
			flush(i)
		}
	}
	flush(len(text))
	return out.String()
}

// whole drops the beginning of a rune, or of an escape, at the end.
func whole(text string) string {
	for len(text) > 0 && !utf8.ValidString(text) {
		text = text[:len(text)-1]
	}
	if i := strings.LastIndexByte(text, '\\'); i > len(text)-6 && i >= 0 {
		text = text[:i]
	}
	return text
}

// escape writes what cannot be printed as \u and four digits, which is an escape in
// JSON too, but for the characters of keep. A byte that is no UTF-8 is \ufffd.
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
			// Such have two in JSON (RFC 8259, section 7).
			r -= 0x10000
			fmt.Fprintf(&out, `\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
		default:
			fmt.Fprintf(&out, `\u%04x`, r)
		}
	}
	return out.String()
}

// Writer gives a writer that escapes what cannot be printed, line ends and tabs
// excepted. Each Write has to be of whole characters.
func Writer(w io.Writer) io.Writer { return &writer{w} }

type writer struct{ to io.Writer }

func (w *writer) Write(p []byte) (int, error) {
	if _, err := io.WriteString(w.to, escape(string(p), "\n\t")); err != nil {
		return 0, err
	}
	return len(p), nil
}

// List gives the texts of some in one.
func List[T fmt.Stringer](all []T, between string) string { return strings.Join(Texts(all), between) }

// Texts gives the text of each.
func Texts[T fmt.Stringer](all []T) []string {
	texts := make([]string, len(all))
	for i, one := range all {
		texts[i] = one.String()
	}
	return texts
}

// Count says how many there are of something.
func Count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
