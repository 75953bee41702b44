package printable_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode"

	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestLine(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 300)
	for _, tt := range []struct{ in, want string }{
		{"bridge \"br0\": Müller’s 10 µs", "bridge \"br0\": Müller’s 10 µs"},
		{errors.Join(errors.New("one"), errors.New("two")).Error(), "one; two"},
		{"\x1b[2Jcls", `\u001b[2Jcls`},
		{"a\rb\tc\x00", `a\u000db\u0009c\u0000`},
		{"\u009b31m \u202eevil \u2028", `\u009b31m \u202eevil \u2028`},
		{"bad \xff utf-8", `bad \ufffd utf-8`},
		{"\U000e0001", `\udb40\udc01`},
		{`mode "` + long + `" is not known`, `mode "` + long[:200] + `…" is not known`},
		{`mode "` + strings.Repeat(`\"`, 150) + `" is not known`, `mode "` + strings.Repeat(`\"`, 99) + `…" is not known`},
		{"file /" + long + ": no", "file " + "/" + long[:198] + "… no"},
		{"a " + strings.Repeat("word ", 60) + "z", "a " + strings.Repeat("word ", 60) + "z"},
		{strings.Repeat("é", 150), strings.Repeat("é", 100) + "…"},
	} {
		expect.Equal(t, printable.Line(tt.in), tt.want, "Line(%.60q)", tt.in)
	}
	got := printable.Line(strings.Repeat("many words ", 10000))
	expect.That(t, len(got) <= 17<<10, "a line of %d bytes", len(got))
}

func TestWriterKeepsLinesAndJSON(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	w := printable.Writer(&out)
	in := map[string]string{"name": "\x1b[31m\u202e\U000e0001 é"}
	must.Succeed(t, json.NewEncoder(w).Encode(in))
	var back map[string]string
	err := json.Unmarshal([]byte(out.String()), &back)
	expect.That(t, err == nil && back["name"] == in["name"], "%q, %v", out.String(), err)
	expect.That(t, !strings.ContainsFunc(strings.TrimSuffix(out.String(), "\n"), func(r rune) bool { return !unicode.IsPrint(r) }),
		"not printable: %q", out.String())
	out.Reset()
	if n, err := w.Write([]byte("a\tb\n\x1b")); n != 5 || err != nil || out.String() != "a\tb\n"+`\u001b` {
		t.Errorf("%d, %v, %q", n, err, out.String())
	}
}

func TestCountsAreSingularOrPlural(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]string{0: "0 pods", 1: "1 pod", 2: "2 pods"} {
		expect.Equal(t, printable.Count(n, "pod", "pods"), want, "%d", n)
	}
}
