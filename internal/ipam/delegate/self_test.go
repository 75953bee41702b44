package delegate_test

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// install puts a program into a directory as "fake" in one of many ways.
func install(t *testing.T, how func(program, name string) error) (dir string) {
	t.Helper()
	dir = t.TempDir()
	program := filepath.Join(dir, "program")
	self := must.Of(os.Executable()).Get(t)
	// A copy, since a hard link cannot leave its file system.
	must.Succeed(t, copyFile(self, program))
	must.Succeed(t, how(program, filepath.Join(dir, "fake")))
	return dir
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

func TestAProgramIsNeverRunByItself(t *testing.T) {
	t.Parallel()
	for name, how := range map[string]func(program, name string) error{
		"symbolic link": os.Symlink,
		"hard link":     os.Link,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			plugin, calls := fakePlugin(t, nil)
			dir := install(t, how)
			plugin.Path = dir
			if err := plugin.Run(t.Context(), "DEL"); err != nil || verbs(calls()) != "DEL" {
				t.Fatalf("the fake does not run: %v, calls %q", err, verbs(calls()))
			}
			plugin.Self = filepath.Join(dir, "program")
			ctx := t.Context()
			_, err := plugin.Add(ctx)
			for _, err := range []error{err, plugin.Run(ctx, "DEL"), plugin.Run(ctx, "CHECK"), plugin.Run(ctx, "GC"), plugin.Run(ctx, "STATUS")} {
				expect.Is(t, err, delegate.ErrSelf, "error")
			}
			expect.Equal(t, verbs(calls()), "DEL", "calls")
		})
	}
}

// A program that is as long as this one, and differs in its last byte, is another.
func TestAnotherProgramOfTheSameLengthIsRun(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, text := range map[string]string{"program": "#!/bin/sh\nexit 0\n#1", "fake": "#!/bin/sh\nexit 0\n#2"} {
		must.Succeed(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755))
	}
	plugin := &delegate.Plugin{Name: "fake", Path: dir, Self: filepath.Join(dir, "program")}
	expect.Success(t, plugin.Run(context.Background(), "DEL"))
	plugin.Self = filepath.Join(dir, "none")
	expect.Is(t, plugin.Run(context.Background(), "DEL"), os.ErrNotExist, "without a program to compare with")
}

func TestDepthIsCountedAndReplaced(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ in, want []string }{
		{nil, []string{"TOMBOLO_DEPTH=1"}},
		{[]string{"A=B", "TOMBOLO_DEPTH=1", "TOMBOLO_DEPTHS=7"}, []string{"A=B", "TOMBOLO_DEPTHS=7", "TOMBOLO_DEPTH=2"}},
		{[]string{"TOMBOLO_DEPTH="}, []string{"TOMBOLO_DEPTH=1"}},
		{[]string{"TOMBOLO_DEPTH=x"}, []string{"TOMBOLO_DEPTH=x"}},
		{[]string{"TOMBOLO_DEPTH=-1"}, []string{"TOMBOLO_DEPTH=-1"}},
	} {
		before := slices.Clone(tt.in)
		got := delegate.Deeper(tt.in)
		expect.That(t, slices.Equal(got, tt.want), "Deeper(%q) = %q, want %q", before, got, tt.want)
		expect.That(t, slices.Equal(tt.in, before), "Deeper changed its argument: %q", tt.in)
	}
	for _, bad := range []string{"x", "-1", "1 ", "99999999999999999999"} {
		n, err := delegate.Depth(bad)
		expect.That(t, err != nil, "Depth(%q) = %d", bad, n)
	}
}

func TestAPluginIsToldItsDepth(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	script := "#!/bin/sh\nprintf %s \"$TOMBOLO_DEPTH\" >$0.depth\n"
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "fake"), []byte(script), 0o755))
	plugin := &delegate.Plugin{Name: "fake", Path: dir, Environ: append(exec.Command("true").Environ(), "TOMBOLO_DEPTH=4")}
	must.Succeed(t, plugin.Run(t.Context(), "DEL"))
	got, err := os.ReadFile(filepath.Join(dir, "fake.depth"))
	expect.That(t, err == nil && string(got) == "5", "depth %q, %v", got, err)
}
