package main

import (
	"bytes"
	"errors"
	"go/build"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"testing"
)

const want = `pod a reaches 10.20.0.3
pod a reaches fd20::3
pod a reaches 10.20.0.1
pod a reaches fd20::1
pod a reaches 192.0.2.2
pod a reaches 2001:db8::2
pod a is as it was made: true
left of the pods: 0 elements, 0 ports
`

func TestProgramOutsideOfTheModuleTiesPodsToABridge(t *testing.T) {
	var out bytes.Buffer
	if err := run(t.Context(), &out); err != nil {
		t.Errorf("%v (needs root)", err)
	}
	if out.String() != want {
		t.Errorf("it printed:\n%s\nwant:\n%s", &out, want)
	}
}

func TestASecondAttachLeavesTheFirst(t *testing.T) {
	host, pod, _ := hostAndPod(t)
	dir := t.TempDir()
	n, err := open(host, dir, "pods", "pods0", prefix("10.20.0.1/24"))
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if err := n.build(t.Context(), host); err != nil {
		t.Fatal(err)
	}
	given, firstErr := n.attach(t.Context(), pod, "a")
	if _, err := n.attach(t.Context(), pod, "a"); !errors.Is(err, fs.ErrExist) {
		t.Errorf("attached once more, it says %v", err)
	}
	mustPing(t, pod, "10.20.0.1")
	found, err := n.check(t.Context(), "a", given) // its reservation, too
	if err := errors.Join(firstErr, err); len(found) > 0 || err != nil {
		t.Errorf("of the first is missing %q, %v", found, err)
	}
	if _, err := os.Stat(dir + "/pods/10.20.0.3"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the second keeps its address: %v", err)
	}
}

// TestEmbeddersGetNeitherCNINorMuchElse lists what comes along. Package log does, with
// mdlayher/netlink, which writes to it only where NLDEBUG is set; none of ours imports it.
func TestEmbeddersGetNeitherCNINorMuchElse(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range strings.Fields(string(out)) {
		if strings.Contains(path, "containernetworking") || path == "os/exec" || path == "net/http" || path == "log/slog" {
			t.Errorf("it brings %s along", path)
		}
	}
}

func TestProgramImportsPublicPackagesOnly(t *testing.T) {
	pkg, err := build.ImportDir(".", 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range pkg.Imports {
		rest, ours := strings.CutPrefix(path, "github.com/tombolo-cni/tombolo/")
		if ours && strings.Contains(rest, "/") || !ours && strings.Contains(path, ".") {
			t.Errorf("it imports %s", path)
		}
	}
}
