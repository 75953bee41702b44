// Package printable makes text of any origin fit for a terminal and a log. What comes
// from outside, a configuration, a file, the alias of a link, another program's rules,
// the name of a process, may hold what a terminal obeys.
package printable

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// lineMax is how many bytes a message has at most.
const lineMax = 4 << 10

// Line is a message on one line: joined errors, which come a line each, are set apart
// by semicolons, and what cannot be printed is escaped. It is cut after 4 KiB.
func Line(message string) string {
	text := escape(strings.ReplaceAll(message, "\n", "; "), "")
	if len(text) > lineMax {
		return strings.ToValidUTF8(text[:lineMax], "") + "…"
	}
	return text
}

// escape writes what cannot be printed as \u and four digits, which is an escape in
// JSON too (RFC 8259, section 7), but for the characters of keep. A byte that is no UTF-8 is \ufffd.
func escape(text, keep string) string {
	var out strings.Builder
	for _, r := range text {
		if r != utf8.RuneError && strconv.IsPrint(r) || strings.ContainsRune(keep, r) {
			out.WriteRune(r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			fmt.Fprintf(&out, `\u%04x`, unit)
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
