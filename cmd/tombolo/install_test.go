package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// built is a directory of our programs: that of TOMBOLO_BIN, or what is built.
func built(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv("TOMBOLO_BIN"); dir != "" {
		return dir
	}
	dir := t.TempDir()
	out, err := exec.Command("go", "build", "-buildvcs=false", "-o", dir+"/", ".", "../tombolo-cni").CombinedOutput()
	must.That(t, err == nil, "%v\n%s", err, out)
	return dir
}

// place copies programs to where a package has them.
func place(t *testing.T, from, to string) string {
	t.Helper()
	out, err := exec.Command("install", "-D", from, to).CombinedOutput()
	must.That(t, err == nil, "%v: %s", err, out)
	return to
}

func start(t *testing.T, path string, env []string, args ...string) outcome {
	t.Helper()
	var out, errOut bytes.Buffer
	cmd := exec.Command(path, args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = env, &out, &errOut
	var exit *exec.ExitError
	err := cmd.Run()
	must.That(t, err == nil || errors.As(err, &exit), "%v", err)
	return outcome{cmd.ProcessState.ExitCode(), out.String(), errOut.String()}
}

func mustSelf(t *testing.T) string {
	t.Helper()
	return must.Of(os.Executable()).Get(t)
}

func mustRead(t *testing.T, path string) []byte {
	t.Helper()
	return must.Of(os.ReadFile(path)).Get(t)
}

func TestInstall(t *testing.T) {
	t.Parallel()
	from := built(t)
	plugin := mustRead(t, filepath.Join(from, "tombolo-cni"))
	for name, lay := range map[string]func(root string) (command string){
		"with the plugin beside it": func(root string) string {
			place(t, from+"/tombolo-cni", root+"/tombolo-cni")
			return place(t, from+"/tombolo", root+"/tombolo")
		},
		"with the plugin in /usr/lib/tombolo": func(root string) string {
			place(t, from+"/tombolo-cni", root+"/usr/lib/tombolo/tombolo-cni")
			return place(t, from+"/tombolo", root+"/usr/bin/tombolo")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, command := t.TempDir(), lay(t.TempDir())
			if got := start(t, command, nil, "install", "--names", "loopback", dir); got.status != 0 || got.stdout != dir+"/tombolo: the plugin\n"+dir+"/loopback: Tombolo\n" {
				t.Fatalf("install: %+v", got)
			}
			expect.That(t, bytes.Equal(mustRead(t, dir+"/tombolo"), plugin),
				"what it installed is another file than the plugin")
			if got := start(t, dir+"/loopback", []string{"CNI_COMMAND=VERSION"}); !strings.Contains(got.stdout, "supportedVersions") {
				t.Errorf("the name does not lead to the plugin: %+v", got)
			}
			got := start(t, command, nil, "install", "--undo", dir)
			expect.That(t, got.status == 0 && got.stdout == dir+"/loopback: gone\n", "undo: %+v", got)
			got = start(t, command, nil, "install", "--undo", dir)
			expect.That(t, got.status == 0 && got.stdout == dir+": none of these names exists\n", "undo again: %+v", got)
			if got := start(t, command, nil, "install", "--names", "brigde", dir); got.status != exitUsage || !strings.Contains(got.stderr, `"brigde" is not a name that Tombolo has`) {
				t.Errorf("a name that it has not: %+v", got)
			}
		})
	}
	t.Run("without a plugin", func(t *testing.T) {
		t.Parallel()
		if _, err := os.Stat("/usr/lib/tombolo"); err == nil {
			return // this machine has a package of it
		}
		dir := t.TempDir()
		got := start(t, place(t, from+"/tombolo", t.TempDir()+"/bin/tombolo"), nil, "install", dir)
		if entries, err := os.ReadDir(dir); got.status != exitFailed || !strings.Contains(got.stderr, "there is no tombolo-cni in ") || err != nil || len(entries) > 0 {
			t.Errorf("%+v, and it installed %v", got, entries)
		}
	})
	// The reader of a command's output may go, as head does, and the work goes on.
	t.Run("whose reader is gone", func(t *testing.T) {
		t.Parallel()
		dir, command := t.TempDir(), filepath.Join(from, "tombolo")
		for _, args := range [][]string{{"install", "--names", "all", dir}, {"install", "--undo", dir}} {
			reader, out, err := os.Pipe()
			must.Succeed(t, err)
			reader.Close()
			cmd := exec.Command(command, args...)
			cmd.Stdout = out
			expect.Success(t, cmd.Run(), "%q", args)
			out.Close()
		}
		got := start(t, command, nil, "install", "--names", "all", dir)
		expect.That(t, !strings.Contains(got.stdout, "what was there") && strings.Count(got.stdout, ": Tombolo\n") >= 2,
			"names were left by the undo: %+v", got)
	})
}

// A runtime that finds the command where the plugin belongs tells its user the file's name.
func TestTheCommandSaysToARuntimeWhichFileBelongsThere(t *testing.T) {
	t.Parallel()
	for _, verb := range []string{"ADD", "DEL", "VERSION"} {
		got := run(t, nil, []string{"CNI_COMMAND=" + verb}, "")
		var e struct {
			CNIVersion, Msg string
			Code            int
		}
		if err := json.Unmarshal([]byte(got.stdout), &e); err != nil || got.status != 1 || got.stderr != "" || e.CNIVersion != "1.1.0" || e.Code != 4 ||
			!strings.Contains(e.Msg, "tombolo-cni belongs here") || !strings.Contains(e.Msg, "tombolo install") {
			t.Errorf("%s: %v, %+v", verb, err, got)
		}
	}
}
