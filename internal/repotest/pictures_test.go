package repotest

import (
	"fmt"
	"html"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// pictureStyle has colours for light pages and for dark ones.
const pictureStyle = `<style>
text{font:13px sans-serif;text-anchor:middle;fill:#1f2328}
rect,line{stroke:#59636e;stroke-width:1.5;fill:none}
.outside,.link{fill:#eaeef2}.part{fill:#fff8c5}.ours{fill:#ddf4ff}.pod{fill:#dafbe1}
@media (prefers-color-scheme:dark){
text{fill:#f0f6fc}rect,line{stroke:#9198a1}
.outside,.link{fill:#262c36}.part{fill:#473c12}.ours{fill:#0c2d6b}.pod{fill:#0f3d1f}}
</style>
`

// drawPicture makes the SVG image that a text of docs/pictures describes.
func drawPicture(source string) (string, error) {
	var b strings.Builder
	for line := range strings.Lines(source) {
		kind, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		var x, y, w, h int
		var class string
		var err error
		switch kind {
		case "#":
		case "size":
			_, err = fmt.Sscan(rest, &w, &h)
			fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d" role="img">`+"\n", w, h)
		case "title":
			fmt.Fprintf(&b, "<title>%s</title>\n%s", html.EscapeString(rest), pictureStyle)
		case "line":
			_, err = fmt.Sscan(rest, &x, &y, &w, &h)
			fmt.Fprintf(&b, `<line x1="%d" y1="%d" x2="%d" y2="%d"/>`+"\n", x, y, w, h)
		case "box":
			_, err = fmt.Sscan(rest, &x, &y, &w, &h, &class)
			fmt.Fprintf(&b, `<rect class="%s" x="%d" y="%d" width="%d" height="%d" rx="6"/>`+"\n", class, x, y, w, h)
			label := strings.Split(strings.Join(strings.Fields(rest)[5:], " "), "|")
			for i, text := range label {
				writeText(&b, x+w/2, y+h/2+5+18*i-9*(len(label)-1), text)
			}
		case "text":
			_, err = fmt.Sscan(rest, &x, &y)
			writeText(&b, x, y, strings.Join(strings.Fields(rest)[2:], " "))
		default:
			err = fmt.Errorf("unknown")
		}
		if err != nil {
			return "", fmt.Errorf("%q: %w", line, err)
		}
	}
	return b.String() + "</svg>\n", nil
}

func writeText(b *strings.Builder, x, y int, text string) {
	if text != "" {
		fmt.Fprintf(b, `<text x="%d" y="%d">%s</text>`+"\n", x, y, html.EscapeString(text))
	}
}

func TestPicturesAreDrawnFromTheirTexts(t *testing.T) {
	t.Parallel()
	paths, err := filepath.Glob(filepath.Join(root(t), "docs", "pictures", "*.txt"))
	must.That(t, err == nil && len(paths) == 2, "%v, %v: want a picture of each mode", paths, err)
	for _, path := range paths {
		want, err := drawPicture(string(must.Of(os.ReadFile(path)).Get(t)))
		must.That(t, err == nil, "%s: %v", path, err)
		file := strings.TrimSuffix(path, ".txt") + ".svg"
		if golden.Updates() {
			must.Succeed(t, os.WriteFile(file, []byte(want), 0o644))
		}
		expect.Equal(t, string(must.Of(os.ReadFile(file)).Get(t)), want, "%s", short(t, file))
	}
}
