package delegate_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// It is known by its name: a copy of another name is not, and there the depth ends the loop.
func TestAProgramIsNeverRunByItself(t *testing.T) {
	t.Parallel()
	for name, isOurs := range map[string]bool{"tombolo": true, "tombolo-cni": true, "program": false} {
		for kind, how := range map[string]func(program, name string) error{
			"link": os.Symlink,
			"script": func(program, name string) error {
				return os.WriteFile(name, []byte("#!"+program+" as\n"), 0o755)
			},
		} {
			t.Run(kind+" of "+name, func(t *testing.T) {
				t.Parallel()
				dir := t.TempDir()
				program := filepath.Join(dir, name)
				must.Succeed(t, os.WriteFile(program, []byte("#!/bin/sh\nexit 0\n"), 0o755))
				must.Succeed(t, how(program, filepath.Join(dir, "fake")))
				plugin := &delegate.Plugin{Name: "fake", Path: dir, IsIPAM: true}
				_, err := plugin.Add(t.Context())
				expect.That(t, errors.Is(err, delegate.ErrSelf) == isOurs, "ADD: %v", err)
				for _, verb := range []string{"DEL", "CHECK", "GC", "STATUS"} {
					err := plugin.Run(t.Context(), verb)
					expect.That(t, errors.Is(err, delegate.ErrSelf) == isOurs, "%s: %v", verb, err)
				}
			})
		}
	}
}

func TestDepthIsCountedAndReplaced(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ in, want []string }{
		{nil, []string{"TOMBOLO_DEPTH=1"}},
		{[]string{"A=B", "TOMBOLO_DEPTH=1", "TOMBOLO_DEPTHS=7"}, []string{"A=B", "TOMBOLO_DEPTHS=7", "TOMBOLO_DEPTH=11"}},
		{[]string{"TOMBOLO_DEPTH="}, []string{"TOMBOLO_DEPTH=1"}},
		{[]string{"TOMBOLO_DEPTH=x"}, []string{"TOMBOLO_DEPTH=x1"}},
	} {
		before := slices.Clone(tt.in)
		got := delegate.Deeper(tt.in)
		expect.That(t, slices.Equal(got, tt.want), "Deeper(%q) = %q, want %q", before, got, tt.want)
		expect.That(t, slices.Equal(tt.in, before), "Deeper changed its argument: %q", tt.in)
	}
}

func TestAPluginIsToldItsDepth(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	script := "#!/bin/sh\nprintf %s \"$TOMBOLO_DEPTH\" >$0.depth\n"
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "fake"), []byte(script), 0o755))
	plugin := &delegate.Plugin{Name: "fake", Path: dir, Environ: append(exec.Command("true").Environ(), "TOMBOLO_DEPTH=11")}
	must.Succeed(t, plugin.Run(t.Context(), "DEL"))
	got, err := os.ReadFile(filepath.Join(dir, "fake.depth"))
	expect.That(t, err == nil && string(got) == "111", "depth %q, %v", got, err)
}
