package ipam

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// A directory of reservations that others may write to, as one on a shared disk, leads
// to no file of somebody else's, and makes nobody wait.
func TestLinksAndPipesAmongTheReservationsAreNotFollowed(t *testing.T) {
	t.Parallel()
	const precious = "precious, and longer than an address"
	target := filepath.Join(t.TempDir(), "target")
	for name, hostile := range map[string]func(path string) error{
		"a link": func(path string) error { return os.Symlink(target, path) },
		"a pipe": func(path string) error { return unix.Mkfifo(path, 0o666) },
	} {
		for _, file := range []string{lastPrefix + "0", markerName + tempSuffix, "10.1.0.2"} {
			must.Succeed(t, os.WriteFile(target, []byte(precious), 0o600))
			n := newNode(t, small)
			n.epoch = Epoch{Token: "now", Started: time.Now()}
			must.Succeed(t, os.MkdirAll(n.dir(), 0o755))
			must.Succeed(t, hostile(filepath.Join(n.dir(), file)))
			result, err := n.tryAdd(n.request("a"))
			expect.That(t, err != nil || len(result.Addresses) == 1, "%s for %s: %+v", name, file, result)
			expect.That(t, err == nil || strings.Contains(err.Error(), file), "%s for %s: %v", name, file, err)
			if data, err := os.ReadFile(target); err != nil || string(data) != precious {
				t.Errorf("%s for %s: what it leads to is %q now, %v", name, file, data, err)
			}
		}
	}
}
