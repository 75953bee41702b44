package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra/doc"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

const shipped = "../../../deploy/share/"

// The pages that are shipped are those of the commands: go test ./cmd/tombolo -update.
func TestManPagesAreThoseOfTheCommands(t *testing.T) {
	t.Parallel()
	dir, date := t.TempDir(), time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)
	root := (&options{}).root()
	for _, c := range below(root) {
		c.DisableAutoGenTag = true
	}
	must.Succeed(t, doc.GenManTree(root, &doc.GenManHeader{Section: "8", Source: "Tombolo", Manual: "System administration", Date: &date}, dir))
	pages, err := filepath.Glob(dir + "/*.8")
	must.That(t, err == nil && len(pages) >= 15, "%d pages, %v", len(pages), err)
	var names []string
	for _, page := range pages {
		names = append(names, filepath.Base(page))
		golden.Compare(t, shipped+filepath.Base(page), string(mustRead(t, page)))
	}
	there := must.Of(filepath.Glob("../../deploy/share/tombolo*.8")).Get(t)
	for _, page := range there {
		name := filepath.Base(page)
		expect.That(t, name == "tombolod.8" || slices.Contains(names, name), "deploy/share/%s is of no command", name)
	}
}

// asTombolo gives an environment in which tombolo is this test.
func asTombolo(t *testing.T) []string {
	t.Helper()
	dir := t.TempDir()
	must.Succeed(t, os.Symlink(mustSelf(t), filepath.Join(dir, "tombolo")))
	return append(os.Environ(), nstest.RunMain+"=1", "PATH="+dir+":"+os.Getenv("PATH"))
}

func TestBashCompletesWhatCanFollow(t *testing.T) {
	t.Parallel()
	environ, state := asTombolo(t), t.TempDir()
	for _, name := range []string{"pods.json", "lab.json"} {
		must.Succeed(t, os.MkdirAll(filepath.Join(state, "networks"), 0o755))
		must.Succeed(t, os.WriteFile(filepath.Join(state, "networks", name), nil, 0o644))
	}
	var nics []string
	links := must.Of(os.ReadDir("/sys/class/net")).Get(t)
	for _, l := range links {
		nics = append(nics, l.Name())
	}
	for _, tt := range []struct {
		line string // the last word is being typed
		want []string
	}{
		{"tombolo ch", []string{"check"}},
		{"tombolo uplink re", []string{"restore"}},
		{"tombolo uplink ", []string{"plan", "take", "restore", "status"}},
		{"tombolo uplink plan --ta", []string{"--take"}},
		{"tombolo uplink plan ", nics},
		{"tombolo uplink plan --take eth0 ", nics},
		{"tombolo uplink plan eth0 br0 ", nil},
		{"tombolo remove --state " + state + " ", []string{"lab", "pods"}},
		{"tombolo remove --state " + state + " p", []string{"pods"}},
		{"tombolo ls --state " + state + " --network l", []string{"lab"}},
		{"tombolo ls net", []string{"networks"}},
		{"tombolo check ", nil},
	} {
		line := strings.Split(tt.line, " ")
		// bash-completion's function, of which this is what is needed.
		script := fmt.Sprintf(`_init_completion() { words=("${COMP_WORDS[@]}") cword=$COMP_CWORD cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}; }
compopt() { :; }
source ../../deploy/share/tombolo.bash; COMP_WORDS=("$@"); COMP_CWORD=%d; COMP_TYPE=63; __start_tombolo; printf '%%s\n' "${COMPREPLY[@]%%%% *}"`, len(line)-1)
		cmd := exec.Command("bash", append([]string{"--norc", "-c", script, "bash"}, line...)...)
		cmd.Env = environ
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%q: %v\n%s", tt.line, err, out)
			continue
		}
		got, want := slices.Sorted(slices.Values(strings.Fields(string(out)))), slices.Sorted(slices.Values(tt.want))
		diff := cmp.Diff(want, got)
		expect.That(t, diff == "" || len(want)+len(got) == 0, "%q (-want +got):\n%s", tt.line, diff)
	}
}

// zsh's own functions are replaced by some that print what they are given.
func TestZshCompletesWhatCanFollow(t *testing.T) {
	t.Parallel()
	script := `compdef() { : }
_describe() { print -rl -- "${completions[@]}" }
words=(tombolo uplink ""); CURRENT=3; BUFFER="tombolo uplink "
fpath=(../../deploy/share $fpath); autoload -U _tombolo
_tombolo`
	cmd := exec.Command("zsh", "-f", "-c", script)
	cmd.Env = asTombolo(t)
	out, err := cmd.CombinedOutput()
	for _, want := range []string{"plan:print what", "take:make a NIC", "restore:undo"} {
		expect.That(t, strings.Contains(string(out), want), "%q is missing, %v: %s", want, err, out)
	}
}
