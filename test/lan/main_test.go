package lan

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	// The plugin is a program that the go command does not see: so that it does not
	// take an old run's result for that of a changed plugin.
	_ "github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/internal/testutil/fault"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// binVar names the directory of the programs under test. Unset, they are built by the first test
// that runs one.
const binVar = "TOMBOLO_BIN"

// built is where they are built.
var built string

func TestMain(m *testing.M) {
	fault.Main()
	flag.Parse()
	var err error
	if built, err = os.MkdirTemp("", "tombolo-lan-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if err := os.RemoveAll(built); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// program gives the path of the plugin tombolo-cni, the command tombolo or the keeper tombolod.
func program(t testing.TB, name string) string {
	t.Helper()
	dir := must.Of(findPrograms()).Get(t)
	return filepath.Join(dir, name)
}

var findPrograms = sync.OnceValues(func() (string, error) {
	if path := os.Getenv(binVar); path != "" {
		path, err := filepath.Abs(path)
		if err == nil {
			_, err = os.Stat(path)
		}
		return path, err
	}
	cmd := exec.Command("make", "-C", "../..", "-s", "build", "BIN="+built)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%s: %w\n%s", cmd, err, out)
	}
	return built, nil
})
