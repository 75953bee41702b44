package repotest

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// TestUpstreamTestsStillFail runs the tests of docs/dev/upstream, each of which shows what a
// library cannot do. One that passes says that the library can by now.
func TestUpstreamTestsStillFail(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("go", "test", "-json", "-count=1", ".")
	cmd.Dir = filepath.Join(root(t), "docs", "dev", "upstream")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.Output()
	must.That(t, err != nil, "all of them pass")
	must.That(t, !bytes.Contains(out, []byte("no such file")), "a test fails since a file is missing, and not since a library cannot do it:\n%s", out)
	how := map[string]string{}
	for d := json.NewDecoder(bytes.NewReader(out)); d.More(); {
		var event struct{ Action, Test string }
		err := d.Decode(&event)
		must.That(t, err == nil, "%v in %s", err, out)
		if event.Action == "pass" || event.Action == "fail" || event.Action == "skip" {
			how[event.Test] = event.Action
		}
	}
	for _, name := range upstreamTests(t) {
		switch how[name] {
		case "fail":
		case "pass":
			t.Errorf("%s passes: the library can do it now; take out our own code, the report and the test", name)
		default:
			t.Errorf("%s: %q, want that it fails\n%s", name, how[name], out)
		}
	}
}

// A report's patch goes to the library with it.
func TestUpstreamPatchesMakeTheirTestsPass(t *testing.T) {
	t.Parallel()
	dir, source := t.TempDir(), filepath.Join(root(t), "docs", "dev", "upstream")
	must.Succeed(t, os.CopyFS(dir, os.DirFS(source)))
	within := func(name string, args ...string) {
		t.Helper()
		cmd := exec.Command(name, args...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		must.That(t, err == nil, "%s %v: %v\n%s", name, args, err, out)
	}
	within("go", "mod", "vendor")
	of := map[string]string{
		"netlink": "mdlayher/netlink", "packet": "mdlayher/packet", "rtnetlink": "jsimonetti/rtnetlink/v2", "nftables": "google/nftables",
	}
	patches, err := filepath.Glob(filepath.Join(source, "patches", "*.diff"))
	must.That(t, err == nil && len(patches) > 0, "patches %v, %v", patches, err)
	var tests []string
	for _, patch := range patches {
		name := strings.TrimSuffix(filepath.Base(patch), ".diff")
		library, _, _ := strings.Cut(name, "-")
		within("git", "apply", "-C1", "--directory=vendor/github.com/"+of[library], patch)
		page := must.Of(os.ReadFile(filepath.Join(source, name+".md"))).Get(t)
		tests = append(tests, regexp.MustCompile("`(Test[A-Za-z0-9]+)` fails").FindStringSubmatch(string(page))[1])
	}
	within("env", "CGO_ENABLED=0", "go", "test", "-count=1", "-run", "^("+strings.Join(tests, "|")+")$", ".")
}
