package sockdiag

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// fakeProc writes a tree like /proc of files, and of symbolic links where the name is
// below fd.
func fakeProc(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if filepath.Base(filepath.Dir(path)) == "fd" {
			err = os.Symlink(content, path)
		} else {
			err = os.WriteFile(path, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestProcessOfASocket(t *testing.T) {
	t.Parallel()
	root := fakeProc(t, map[string]string{
		"9/comm": "worker\n", "9/fd/3": "socket:[100]",
		"10/comm": "nginx\n", "10/fd/0": "/dev/null", "10/fd/1": "pipe:[200]", "10/fd/7": "socket:[200]",
		"11/comm": "nginx\n", "11/fd/7": "socket:[200]", "11/fd/8": "socket:[2000]",
		"100/fd/3":   "socket:[300]", // ended after its fds were read
		"101/comm":   "heir\n",
		"101/fd/3":   "socket:[300]",
		"102/comm":   "no fds to read\n",
		"103/comm":   "\x1b[2Jnothing (pid 1)\n",
		"103/fd/3":   "socket:[400]",
		"104/comm":   "\n",
		"104/fd/3":   "socket:[500]",
		"self/comm":  "not a number\n",
		"self/fd/3":  "socket:[600]",
		"-5/comm":    "not a process\n",
		"-5/fd/3":    "socket:[600]",
		"105/comm":   "zero\n",
		"105/fd/3":   "socket:[0]",
		"version":    "Linux",
		"106/comm":   "tmux: server\n",
		"106/fd/3":   "socket:[700]",
		"107/fd":     "a file where a directory is due",
		"108/fd/3":   "socket:[700] (deleted)",
		"net/tcp":    "",
		"109/fd/3":   "socket:[800]",
		"109/comm/x": "",
	})
	for _, tc := range []struct {
		inode uint32
		pid   int
		name  string
	}{
		{100, 9, "worker"},
		{200, 10, "nginx"}, // the lower of two
		{300, 101, "heir"},
		{400, 103, `"\x1b[2Jnothing (pid 1)"`},
		{500, 104, `""`},
		{600, 0, ""},
		{0, 0, ""},
		{700, 106, "tmux: server"},
		{800, 0, ""},
		{12345, 0, ""},
	} {
		pid, name, ok := process(root, tc.inode)
		if pid != tc.pid || name != tc.name || ok != (tc.pid != 0) {
			t.Errorf("socket %d: process %d, %s, %v; want %d, %s", tc.inode, pid, name, ok, tc.pid, tc.name)
		}
	}
	if _, _, ok := process(filepath.Join(root, "none"), 100); ok {
		t.Error("found a process where there is no /proc")
	}
}

func TestSocketInUseNamesWhoCanBeFound(t *testing.T) {
	t.Parallel()
	s := Socket{Proto: unix.IPPROTO_SCTP, Local: netip.MustParseAddrPort("[fd00::1]:80"), UID: 101}
	want := "[fd00::1]:80/sctp is in use by the kernel, or by a process that cannot be seen from here (user 101, socket 0)"
	if got := s.InUse(); got != want {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}
