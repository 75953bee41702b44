package view

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/printable"
)

// Screen is what a picture is drawn for.
type Screen struct {
	Width   int  // in columns
	Colour  bool // a terminal that shows colours, and whose user wants them
	Unicode bool // else ASCII
}

const (
	narrowest = 40
	usual     = 80
)

// ScreenOf looks at what a file is, and at the environment: COLUMNS is for what is no terminal,
// NO_COLOR and TERM=dumb switch colours off, and the locale says whether there is UTF-8.
func ScreenOf(file *os.File, getenv func(string) string) Screen {
	s := Screen{Width: usual}
	if size, err := unix.IoctlGetWinsize(int(file.Fd()), unix.TIOCGWINSZ); err == nil {
		s.Colour = getenv("NO_COLOR") == "" && getenv("TERM") != "dumb"
		if size.Col > 0 {
			s.Width = int(size.Col)
		}
	} else if n, err := strconv.Atoi(getenv("COLUMNS")); err == nil && n > 0 && n < 1<<16 {
		s.Width = n
	}
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if v := strings.ToUpper(getenv(name)); v != "" {
			s.Unicode = strings.Contains(v, "UTF-8") || strings.Contains(v, "UTF8")
			break
		}
	}
	s.Width = max(s.Width, narrowest)
	return s
}

// These sequences have a terminal show the text behind them in a style.
const (
	plain = ""
	bold  = "\x1b[1m"
	red   = "\x1b[31m"
	reset = "\x1b[m"
)

// markOf is how a name is shown.
func markOf(wrong bool) string {
	if wrong {
		return red
	}
	return bold
}

// painter collects lines.
type painter struct {
	Screen
	*Node
	strings.Builder
}

func (p *painter) line(parts ...string) { p.WriteString(strings.Join(parts, "") + "\n") }

// in shows a text in a way.
func (p *painter) in(how, text string) string {
	if !p.Colour || how == plain {
		return text
	}
	return how + text + reset
}

// glyph picks one of two texts.
func (p *painter) glyph(unicode, ascii string) string {
	if p.Unicode {
		return unicode
	}
	return ascii
}

// label makes a name fit for a picture: one line of ASCII, one column for each byte, at most so many.
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

// fold breaks a text into lines between words; a word that is longer has a line of its own.
func fold(text string, width int) []string {
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
