package cni

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// What lies in the place of the file is neither written through nor waited for.
func TestTheFileOfWhatWasBeforeIsAFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path, victim := filepath.Join(dir, "c_eth0.json"), filepath.Join(dir, "victim")
	const secret = `{"mtu": 1300}`
	must.Succeed(t, os.WriteFile(victim, []byte(secret), 0o600))
	for name, put := range map[string]func() error{
		"link": func() error { return os.Symlink(victim, path) },
		"FIFO": func() error { return unix.Mkfifo(path, 0o600) },
		"huge": func() error { return os.WriteFile(path, make([]byte, 1<<20), 0o600) },
	} {
		must.Succeed(t, put())
		if b := loadAttributes(path); b != nil {
			t.Errorf("%s: %+v is read", name, b)
		}
		expect.Success(t, (attributes{MTU: new(1400)}).save(path), "%s", name)
		if b := loadAttributes(path); b == nil || *b.MTU != 1400 {
			t.Errorf("%s: %+v is read of what was saved", name, b)
		}
		if data, err := os.ReadFile(victim); err != nil || string(data) != secret {
			t.Errorf("%s: %q in the file that a link led to, %v", name, data, err)
		}
		must.Succeed(t, os.Remove(path))
	}
}

func TestAllowlistNamesWhatIsAllowed(t *testing.T) {
	t.Parallel()
	const list = "# what a pod may set\n^net.core.somaxconn$\n\n ^net\\.ipv4\\.conf\\.IFNAME\\.[a-z]+_filter$ \n"
	for key, want := range map[string]bool{"net.core.somaxconn": true, "net.ipv4.conf.IFNAME.arp_filter": true, "net.ipv4.conf.all.arp_filter": false, "xnet.core.somaxconn": false} {
		if err := allowedBy(list, map[string]string{key: "1"}); (err == nil) != want {
			t.Errorf("%s: %v", key, err)
		}
	}
	expect.Failure(t, allowedBy("a(b\n.*", map[string]string{"net.core.somaxconn": "1"}), "what is no pattern allows")
}
