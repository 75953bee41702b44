package repotest

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
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
