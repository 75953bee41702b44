package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestMain(m *testing.M) { nstest.ProgramMain(m, main) }

// outcome is what a run of the plugin came to.
type outcome struct {
	status         int
	stdout, stderr string
}

// run starts a program, the plugin or a name of it.
func run(t *testing.T, path string, env []string, stdin string, args ...string) outcome {
	t.Helper()
	cmd := exec.Command(path, args...)
	cmd.Env, cmd.Stdin = env, strings.NewReader(stdin)
	var o outcome
	o.status, o.stdout, o.stderr = nstest.Finish(t, nil, cmd)
	return o
}

// Runtimes call a plugin without arguments, and read all that it says from stdout.
func TestARuntimeCallsItByTheEnvironment(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		env   []string
		stdin string
		args  []string
		want  outcome
	}{
		{"VERSION", []string{"CNI_COMMAND=VERSION"}, `{"cniVersion": "0.4.0"}`, nil,
			outcome{0, `{"cniVersion":"0.4.0","supportedVersions":["0.1.0","0.2.0","0.3.0","0.3.1","0.4.0","1.0.0","1.1.0"]}` + "\n", ""}},
		{"a verb that is none", []string{"CNI_COMMAND=BREW"}, ``, []string{"help"},
			outcome{1, `{"cniVersion":"1.1.0","code":4,"msg":"CNI_COMMAND=\"BREW\" is not a verb: ADD, DEL, CHECK, GC, STATUS and VERSION are"}` + "\n", ""}},
		{"a configuration that is none", []string{"CNI_COMMAND=STATUS"}, `{`, nil,
			outcome{1, `{"cniVersion":"1.1.0","code":6,"msg":"decode the network's configuration: not valid JSON at line 1, column 2: it ends too early"}` + "\n", ""}},
		{"a list of attachments that is absent", []string{"CNI_COMMAND=GC"}, `{"cniVersion": "1.1.0", "name": "pods"}`, nil, outcome{}},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			expect.NoDiff(t, cmp.Diff(tt.want, run(t, os.Args[0], tt.env, tt.stdin, tt.args...), cmp.AllowUnexported(outcome{})), "outcome")
		})
	}
}

// name puts the plugin into a directory as tombolo, and a file of one line that starts it, as tombolo
// install does.
func name(t *testing.T, of string) (plugin, path string) {
	t.Helper()
	self := must.Of(os.Executable()).Get(t)
	dir := t.TempDir()
	plugin, path = filepath.Join(dir, "tombolo"), filepath.Join(dir, of)
	must.Succeed(t, os.Symlink(self, plugin))
	must.Succeed(t, os.WriteFile(path, []byte("#!"+plugin+" as\n"), 0o755))
	return plugin, path
}

func TestByHandItNamesTheCommand(t *testing.T) {
	t.Parallel()
	plugin, loopback := name(t, "loopback")
	for _, tt := range []struct {
		path, line string
		status     int
		want       string // begins what it says, which names the operator's command
	}{
		{plugin, "", 0, "CNI tombolo plugin\n"},
		{loopback, "", 0, "CNI loopback plugin v1.9.1\n"},
		{plugin, "ls --json", 2, "tombolo: this is the CNI plugin"},
		{loopback, "version", 2, "loopback: this is the CNI plugin"},
	} {
		got := run(t, tt.path, nil, "", strings.Fields(tt.line)...)
		expect.That(t, got.status == tt.status && got.stdout == "" && strings.HasPrefix(got.stderr, tt.want) &&
			strings.Contains(got.stderr, "the operator's command is tombolo"),
			"%s %s: %+v", tt.path, tt.line, got)
		expect.That(t, tt.line == "" || strings.HasSuffix(got.stderr, ": tombolo "+tt.line+"\n"),
			"%s %s: it does not say what to type: %s", tt.path, tt.line, got.stderr)
	}
}

func TestNetavarkCallsItByAnArgument(t *testing.T) {
	t.Parallel()
	plugin, _ := name(t, "loopback")
	got := run(t, plugin, nil, "", "info")
	expect.That(t, got.status == 0 && strings.Contains(got.stdout, `"api_version":"1.0.0"`), "info: %+v", got)
	got = run(t, plugin, nil, `{"name": "home", "options": {"mode": "lan", "parent": "eth0"}}`, "create")
	expect.That(t, got.status == 1 && strings.HasPrefix(got.stdout, `{"error":"option \"parent\" is not known here: uplink names the NIC`), "create: %+v", got)
}

func TestANamesFirstLineLeadsToThePlugin(t *testing.T) {
	t.Parallel()
	const conf = `{"cniVersion": "1.0.0", "name": "lo", "type": "loopback"}`
	_, loopback := name(t, "loopback")
	got := run(t, loopback, []string{"CNI_COMMAND=VERSION"}, conf)
	expect.That(t, strings.HasPrefix(got.stdout, `{"cniVersion":"1.1.0","supportedVersions":[`), "VERSION: %+v", got)
	// The plugin of that name wants another namespace, and the network's plugin another thing.
	env := []string{"CNI_COMMAND=ADD", "CNI_CONTAINERID=c", "CNI_IFNAME=lo", "CNI_NETNS=/nonexistent"}
	got = run(t, loopback, env, conf)
	expect.That(t, strings.Contains(got.stdout, "/nonexistent"), "ADD: %+v", got)
}
