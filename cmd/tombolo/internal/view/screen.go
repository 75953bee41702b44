package view

import (
	"cmp"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/printable"
)

// Screen describes the terminal or file that a map is drawn for.
type Screen struct {
	Width   int  // in columns
	Colour  bool // the output is a terminal with colours, and the user wants them
	Unicode bool // the output may contain non-ASCII characters
}

const (
	minWidth     = 40
	defaultWidth = 80
)

// ScreenOf returns the Screen for an open file. A terminal has its own width. For other files, the width is COLUMNS, or
// defaultWidth without COLUMNS. The width is at least minWidth. NO_COLOR and TERM=dumb switch colours off. The locale
// determines whether UTF-8 is available.
func ScreenOf(file *os.File, getenv func(string) string) Screen {
	s := Screen{Width: defaultWidth}
	if size, err := unix.IoctlGetWinsize(int(file.Fd()), unix.TIOCGWINSZ); err == nil {
		s.Colour = getenv("NO_COLOR") == "" && getenv("TERM") != "dumb"
		if size.Col > 0 {
			s.Width = int(size.Col)
		}
	} else if n, err := strconv.Atoi(getenv("COLUMNS")); err == nil && n > 0 && n < 1<<16 {
		s.Width = n
	}

	locale := strings.ToUpper(cmp.Or(getenv("LC_ALL"), getenv("LC_CTYPE"), getenv("LANG")))
	s.Unicode = strings.Contains(locale, "UTF-8") || strings.Contains(locale, "UTF8")
	s.Width = max(s.Width, minWidth)
	return s
}

// These control sequences make a terminal show the following text in a style.
const (
	plain = ""
	bold  = "\x1b[1m"
	red   = "\x1b[31m"
	reset = "\x1b[m"
)

// markOf returns the style for a name: red if something is wrong with it, and bold otherwise.
func markOf(wrong bool) string { return map[bool]string{true: red, false: bold}[wrong] }

// painter collects the lines of a map.
type painter struct {
	Screen
	*Node
	strings.Builder
}

func (p *painter) line(parts ...string) { p.WriteString(strings.Join(parts, "") + "\n") }

// in returns a text with the control sequences for a style. If the screen has no colours, it returns the text
// unchanged.
func (p *painter) in(how, text string) string {
	if !p.Colour || how == plain {
		return text
	}
	return how + text + reset
}

// glyph returns the text unicode if the screen supports Unicode, and otherwise ascii.
func (p *painter) glyph(unicode, ascii string) string {
	return map[bool]string{true: unicode, false: ascii}[p.Unicode]
}

// label returns a name for a map, as one line of ASCII, so that each byte is one column. The parameter most is the
// maximum length in bytes.
func label(text string, most int) string {
	var b strings.Builder
	for _, r := range printable.Line(text) {
		if r > '~' {
			b.WriteString(strings.Trim(strconv.QuoteRuneToASCII(r), "'"))
		} else {
			b.WriteRune(r)
		}
	}

	if text = b.String(); len(text) > most {
		text = text[:most-2] + ".."
	}
	return text
}
