package install

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

var known = []string{"bridge", "loopback", "portmap"}

// self is the program that is installed: this test.
const self = "/proc/self/exe"

// files are what a directory has: the contents, or what a link leads to. The program, which
// is this test, is told by its name.
func files(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries := must.Of(os.ReadDir(dir)).Get(t)
	self := must.Of(os.ReadFile(self)).Get(t)
	got := map[string]string{}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if e.Type()&fs.ModeSymlink != 0 {
			target := must.Of(os.Readlink(path)).Get(t)
			got[e.Name()] = "-> " + target
			continue
		}
		data := must.Of(os.ReadFile(path)).Get(t)
		if info, err := e.Info(); err != nil || info.Mode().Perm()&0o111 != 0o111 {
			t.Errorf("%s cannot be executed: %v, %v", path, info.Mode(), err)
		}
		if got[e.Name()] = string(data); got[e.Name()] == string(self) {
			got[e.Name()] = "the program"
		}
		if strings.HasPrefix(got[e.Name()], "#!"+dir+"/tombolo as\n") {
			got[e.Name()] = "tombolo as " + e.Name()
		}
	}
	return got
}

func write(t *testing.T, path, text string) {
	t.Helper()
	must.Succeed(t, os.WriteFile(path, []byte(text), 0o755))
}

func TestNamesAreAddedAndGivenBack(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	want := func(when string, want map[string]string) {
		t.Helper()
		expect.NoDiff(t, cmp.Diff(want, files(t, dir)), "%s", when)
	}
	added := func(names ...string) (out string) {
		t.Helper()
		var b strings.Builder
		expect.Success(t, Add(&b, self, dir, names))
		return strings.ReplaceAll(b.String(), dir+"/", "")
	}
	write(t, filepath.Join(dir, "bridge"), "the reference's bridge")
	write(t, filepath.Join(dir, "macvlan"), "the reference's macvlan")
	if got, want := added("bridge", "portmap", "loopback"), "tombolo: the plugin\nbridge: Tombolo; what was there is bridge.reference\nportmap: Tombolo\nloopback: Tombolo\n"; got != want {
		t.Errorf("it said %q, and not %q", got, want)
	}
	there := map[string]string{
		"tombolo": "the program", "macvlan": "the reference's macvlan", "loopback": "tombolo as loopback",
		"bridge": "tombolo as bridge", "bridge.reference": "the reference's bridge", "portmap": "tombolo as portmap",
	}
	want("added", there)
	if got, want := added("bridge", "portmap", "loopback"), "tombolo: the plugin, as before\nbridge: Tombolo\nportmap: Tombolo\nloopback: Tombolo\n"; got != want {
		t.Errorf("again, it said %q, and not %q", got, want)
	}
	want("added twice", there)

	// An installer brings its own, over what it takes for its file.
	write(t, filepath.Join(dir, "bridge"), "a later bridge")
	there["bridge"] = "a later bridge"
	want("after an installer", there)
	added("bridge")
	there["bridge"], there["bridge.reference"] = "tombolo as bridge", "a later bridge"
	want("added after an installer", there)

	write(t, filepath.Join(dir, "portmap"), "an installer's portmap")
	var b strings.Builder
	expect.Success(t, Remove(&b, dir, known))
	if got, want := strings.ReplaceAll(b.String(), dir+"/", ""), "bridge: the plugin that was there before\nloopback: gone\nportmap: not Tombolo's, and left as it is\n"; got != want {
		t.Errorf("removed, it said %q, and not %q", got, want)
	}
	want("removed", map[string]string{
		"tombolo": "the program", "macvlan": "the reference's macvlan", "bridge": "a later bridge", "portmap": "an installer's portmap",
	})
}

// A program that is copied onto a link replaces what the link leads to, and so every name of it.
// Without that the names would be links.
func TestAnInstallersCopyReachesOneName(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	installer := filepath.Join(t.TempDir(), "bridge")
	write(t, installer, "an installer's bridge")
	copyOver := func(name string) {
		t.Helper()
		out, err := exec.Command("cp", installer, filepath.Join(dir, name)).CombinedOutput()
		must.That(t, err == nil, "%v: %s", err, out)
	}
	write(t, filepath.Join(dir, "tombolo"), "a program")
	for _, link := range []func(string, string) error{os.Link, os.Symlink} {
		must.Succeed(t, link(filepath.Join(dir, "tombolo"), filepath.Join(dir, "bridge")))
		copyOver("bridge")
		got := files(t, dir)["tombolo"]
		must.That(t, got == "an installer's bridge", "a copy onto a link left the program as it was (%q), so names might be links", got)
		must.Succeed(t, os.Remove(filepath.Join(dir, "bridge")))
	}
	must.Succeed(t, Add(new(strings.Builder), self, dir, []string{"bridge", "portmap"}))
	copyOver("bridge")
	want := map[string]string{"tombolo": "the program", "bridge": "an installer's bridge", "portmap": "tombolo as portmap"}
	expect.NoDiff(t, cmp.Diff(want, files(t, dir)), "after a copy")
}

func TestDirectoriesThatCannotHaveNames(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "file"), "")
	spaced, long := filepath.Join(dir, "a b"), filepath.Join(dir, strings.Repeat("x", 240))
	full := filepath.Join(dir, "full")
	for _, d := range []string{spaced, long, filepath.Join(full, "bridge")} {
		must.Succeed(t, os.MkdirAll(d, 0o755))
	}
	for _, tt := range []struct{ dir, want string }{
		{filepath.Join(dir, "missing"), "name the one in which the runtime looks for plugins"},
		{filepath.Join(dir, "file"), "is not a directory"},
		{spaced, "use a shorter one without spaces"},
		{long, "use a shorter one without spaces"},
		{full, "full/bridge is not a file: move it away first"},
	} {
		err := Add(new(strings.Builder), self, tt.dir, []string{"bridge"})
		expect.That(t, err != nil && strings.Contains(err.Error(), tt.want), "%s: %v, and not %q", tt.dir, err, tt.want)
	}
}

func TestSelectReadsLists(t *testing.T) {
	t.Parallel()
	got, err := Select("all", known)
	expect.That(t, err == nil && cmp.Equal(got, known), "all: %v, %v", got, err)
	got, err = Select("portmap,bridge,portmap", known)
	expect.That(t, err == nil && cmp.Equal(got, []string{"portmap", "bridge", "portmap"}), "a list: %v, %v", got, err)
	for _, list := range []string{"", "brige", "bridge,", "../bridge"} {
		expect.Says(t, expect.Err(Select(list, known)), "is not a name that Tombolo has: it has bridge, loopback, portmap", "%q", list)
	}
}
