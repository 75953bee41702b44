package repotest

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// listing gives what is in a directory, without directories: mode, path, and where a link
// leads.
func listing(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	must.Succeed(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(path, dir)
		if target, err := os.Readlink(path); err == nil {
			name += " -> " + target
		}
		fmt.Fprintf(&b, "%v %s\n", info.Mode(), name)
		return nil
	}))
	return b.String()
}

// mustMake runs make in a copy of the module, or in the module itself.
func mustMake(t *testing.T, dir string, args ...string) {
	t.Helper()
	cmd := exec.Command("make", args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	must.That(t, err == nil, "make %v: %v\n%s", args, err, out)
}

// programs stand for what make build makes.
func programs(t *testing.T) string {
	t.Helper()
	bin := t.TempDir()
	for _, name := range []string{"tombolo-cni", "tombolo", "tombolod"} {
		must.Succeed(t, os.WriteFile(filepath.Join(bin, name), []byte(name), 0o755))
	}
	return bin
}

func TestUninstallTakesAwayAllThatInstallBrought(t *testing.T) {
	t.Parallel()
	node, bin := t.TempDir(), programs(t)
	// What is the operator's stays.
	own := filepath.Join(node, "etc/cni/net.d/10-tombolo.conflist")
	must.Succeed(t, os.MkdirAll(filepath.Dir(own), 0o755))
	must.Succeed(t, os.WriteFile(own, nil, 0o644))
	before := listing(t, node)
	mustMake(t, root(t), "-o", "build", "install", "BIN="+bin, "DESTDIR="+node)
	installed := listing(t, node)
	golden.Compare(t, "installed.txt", installed)
	mustMake(t, root(t), "-o", "build", "install", "BIN="+bin, "DESTDIR="+node)
	expect.Equal(t, listing(t, node), installed, "installed again")
	mustMake(t, root(t), "uninstall", "DESTDIR="+node)
	expect.Equal(t, listing(t, node), before, "after uninstall there is")
}

// An earlier install put a link to the plugin where the command belongs.
func TestInstallReplacesTheLinkThatWasTheCommand(t *testing.T) {
	t.Parallel()
	node, bin := t.TempDir(), programs(t)
	command := filepath.Join(node, "usr/local/bin/tombolo")
	must.Succeed(t, os.MkdirAll(filepath.Dir(command), 0o755))
	must.Succeed(t, os.Symlink(filepath.Join(node, "opt/cni/bin/tombolo"), command))
	mustMake(t, root(t), "-o", "build", "install", "BIN="+bin, "DESTDIR="+node)
	for path, want := range map[string]string{command: "tombolo", node + "/opt/cni/bin/tombolo": "tombolo-cni"} {
		info, err := os.Lstat(path)
		expect.That(t, err == nil && info.Mode().IsRegular(), "%s is %v, %v", path, info, err)
		text, err := os.ReadFile(path)
		expect.That(t, err == nil && string(text) == want, "%s is %q, %v, and not %s", path, text, err, want)
	}
}

func TestInstallLeavesTheLoopbackOfOthersAlone(t *testing.T) {
	t.Parallel()
	node, bin := t.TempDir(), programs(t)
	other := filepath.Join(node, "opt/cni/bin/loopback")
	must.Succeed(t, os.MkdirAll(filepath.Dir(other), 0o755))
	must.Succeed(t, os.WriteFile(other, []byte("the reference's"), 0o755))
	mustMake(t, root(t), "-o", "build", "install", "BIN="+bin, "DESTDIR="+node)
	mustMake(t, root(t), "uninstall", "DESTDIR="+node)
	text, err := os.ReadFile(other)
	expect.That(t, err == nil && string(text) == "the reference's", "loopback is %q, %v", text, err)
}

// Units name programs where they are installed.
func TestInstalledUnitsNameInstalledPrograms(t *testing.T) {
	t.Parallel()
	node, bin := t.TempDir(), programs(t)
	mustMake(t, root(t), "-o", "build", "install", "BIN="+bin, "DESTDIR="+node, "PREFIX=/usr", "CNI_BIN=/usr/lib/cni", "SYSTEMD=/usr/lib/systemd/system")
	units, err := filepath.Glob(filepath.Join(node, "usr/lib/systemd/system/*.service"))
	must.That(t, err == nil && len(units) == 2, "units: %v, %v", units, err)
	for _, unit := range units {
		text := must.Of(os.ReadFile(unit)).Get(t)
		_, line, _ := strings.Cut(string(text), "\nExecStart=")
		program, _, _ := strings.Cut(strings.Fields(line)[0], " ")
		expect.Success(t, expect.Err(os.Lstat(filepath.Join(node, program))), "%s", unit)
	}
}

// sums gives the checksums of a directory's files, by name.
func sums(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := must.Of(os.ReadDir(dir)).Get(t)
	all := map[string]string{}
	for _, f := range files {
		text := must.Of(os.ReadFile(filepath.Join(dir, f.Name()))).Get(t)
		all[f.Name()] = fmt.Sprintf("%x", sha256.Sum256(text))
	}
	return all
}

// Two clones at different places and times give the same bytes, and the checksums are right.
func TestReleasesAreReproducible(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("it builds both programs twice")
	}
	if _, err := os.Stat(filepath.Join(root(t), ".git")); err != nil {
		t.Skip("there is no history to clone, as in an archive of the sources")
	}
	arches := []string{runtime.GOARCH}
	if os.Getenv("TOMBOLO_LONG") != "" {
		arches = []string{"amd64", "arm64"}
	}
	var builds []map[string]string
	for range 2 {
		dir := t.TempDir()
		out, err := exec.Command("git", "clone", "-q", "--no-hardlinks", root(t), dir).CombinedOutput()
		must.That(t, err == nil, "git clone: %v\n%s", err, out)
		mustMake(t, dir, "deb", "release", "VERSION=v9.8.7", "ARCHES="+strings.Join(arches, " "))
		cmd := exec.Command("sha256sum", "--check", "--strict", "SHA256SUMS")
		cmd.Dir = filepath.Join(dir, "dist")
		if out, err := cmd.CombinedOutput(); err != nil || strings.Count(string(out), ": OK\n") != 3*len(arches) {
			t.Errorf("checksums: %v\n%s", err, out)
		}
		deb := exec.Command(filepath.Join(root(t), "deploy/release/lintian.sh"), filepath.Join(dir, "dist", "tombolo_9.8.7_"+arches[0]+".deb"))
		if out, err := deb.CombinedOutput(); err != nil {
			t.Errorf("lintian: %v\n%s", err, out)
		}
		builds = append(builds, sums(t, filepath.Join(dir, "dist")))
	}
	names := []string{"SHA256SUMS"}
	for _, arch := range arches {
		names = append(names, "tombolo-v9.8.7-linux-"+arch+".tar.gz", "tombolo-v9.8.7-image-"+arch+".tar.gz", "tombolo_9.8.7_"+arch+".deb")
	}
	for _, name := range names {
		if builds[0][name] == "" || builds[0][name] != builds[1][name] {
			t.Errorf("%s is %q and %q", name, builds[0][name], builds[1][name])
		}
	}
}

func TestManifestsNameAnImageByItsDigest(t *testing.T) {
	t.Parallel()
	script, image := filepath.Join(root(t), "deploy/release/manifest.sh"), "ghcr.io/tombolo-cni/tombolo:v9.8.7@sha256:"+strings.Repeat("0a", 32)
	dir := t.TempDir()
	out, err := exec.Command(script, image, dir).CombinedOutput()
	must.That(t, err == nil, "%v\n%s", err, out)
	for made, of := range map[string]string{"tombolo.yaml": "tombolo.yaml", "tombolo-uninstall.yaml": "uninstall.yaml"} {
		want := string(must.Of(os.ReadFile(filepath.Join(root(t), "deploy/kubernetes", of))).Get(t))
		got := string(must.Of(os.ReadFile(filepath.Join(dir, made))).Get(t))
		expect.Equal(t, got, strings.ReplaceAll(want, "image: tombolo:dev\n", "image: "+image+"\n"), "%s", made)
		expect.That(t, got != want && !strings.Contains(got, "tombolo:dev"), "%s has another image too", made)
	}
	for _, bad := range []string{"tombolo:dev", "tombolo@sha256:0a", "tombolo|x@" + image, image + "\nx"} {
		err := exec.Command(script, bad, dir).Run()
		expect.That(t, err != nil, "%q passes for an image with its digest", bad)
	}
}

// A tag is the last step: what its release says is there before.
func TestTheNextReleaseHasNotes(t *testing.T) {
	t.Parallel()
	script := filepath.Join(root(t), "deploy/release/notes.sh")
	out, err := exec.Command(script, "v0.1.0").CombinedOutput()
	expect.That(t, err == nil && strings.Contains(string(out), "### Added") && !strings.Contains(string(out), "## v"), "%v\n%s", err, out)
	out, err = exec.Command(script, "v9.8.7").CombinedOutput()
	expect.That(t, err != nil, "a version without a section has notes: %s", out)
}
