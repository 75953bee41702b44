package nstest

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// earlierVar names the directory that test/earlier/build.sh filled. Unset, it is
// .cache/earlier, and is filled by the first test that runs an earlier version.
const earlierVar = "TOMBOLO_EARLIER"

// Earlier gives the plugins of the versions that nodes may come from, by name; the keeper
// is beside each. It is for the directories below test. Without a history to build them
// from, the test is skipped; where the history is cut short, it fails.
func Earlier(t testing.TB) map[string]string {
	t.Helper()
	if _, err := os.Stat("../../.git"); errors.Is(err, fs.ErrNotExist) {
		t.Skip("no clone but sources alone: there is no earlier version to build")
	}
	programs, err := findEarlier()
	if err != nil {
		t.Fatal(err)
	}
	return programs
}

var findEarlier = sync.OnceValues(func() (map[string]string, error) {
	dir := os.Getenv(earlierVar)
	if dir == "" {
		dir = "../../.cache/earlier"
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	// It does nothing where all is there.
	if out, err := exec.Command("../earlier/build.sh", dir).CombinedOutput(); err != nil {
		return nil, errors.New(strings.TrimSpace(string(out)) + ": " + err.Error())
	}
	list, err := os.ReadFile("../earlier/versions")
	if err != nil {
		return nil, err
	}
	programs := map[string]string{}
	for line := range strings.Lines(string(list)) {
		if f := strings.Fields(line); len(f) == 2 && !strings.HasPrefix(line, "#") {
			programs[f[1]] = filepath.Join(dir, f[1], "tombolo")
		}
	}
	if len(programs) == 0 {
		return nil, errors.New("test/earlier/versions names none")
	}
	return programs, nil
})
