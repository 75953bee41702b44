package cni

import (
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// hang has every open(2) of what is in a directory wait for ever, as a file system does
// whose server is gone. It says whether somebody waits.
func hang(t *testing.T, dir string) (waits func() bool) {
	t.Helper()
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_CONTENT|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK, unix.O_RDONLY|unix.O_CLOEXEC)
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EINVAL) {
		t.Skip("needs fanotify's permission events, to hang a file system")
	}
	if err == nil {
		err = unix.FanotifyMark(fd, unix.FAN_MARK_ADD, unix.FAN_OPEN_PERM|unix.FAN_EVENT_ON_CHILD, unix.AT_FDCWD, dir)
	}
	must.Succeed(t, err)
	t.Cleanup(func() { unix.Close(fd) }) // which lets all pass
	buf := make([]byte, 4096)
	return func() bool {
		n, err := unix.Read(fd, buf)
		if n < 24 || err != nil {
			return false
		}
		// struct fanotify_event_metadata, whose descriptor is ours to close.
		unix.Close(int(int32(binary.NativeEndian.Uint32(buf[16:]))))
		return true
	}
}

// TestAFileSystemThatHangsEndsWithTheDeadline has each path that an operator or a runtime
// names on a file system that does not answer.
func TestAFileSystemThatHangsEndsWithTheDeadline(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		file string
		with func(path string, c *call) conf
	}{
		{"logFile", "log", func(path string, _ *call) conf { return conf{"logFile": path} }},
		{"CNI_NETNS", "netns", func(path string, c *call) conf { c.netns = path; return nil }},
		{"stateDir", "lock", func(path string, _ *call) conf { return conf{"stateDir": filepath.Dir(path)} }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			w := n.podnet(nil)
			p := n.pod("a")
			path := filepath.Join(t.TempDir(), "hung", tt.file)
			must.Succeed(t, errors.Join(os.Mkdir(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)))
			// It counts there that it failed.
			must.Succeed(t, os.MkdirAll(n.state, 0o700))
			waits := hang(t, filepath.Dir(path))
			c := call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0"}
			fields := conf{"deadline": "100ms"}
			for name, value := range tt.with(path, &c) {
				fields[name] = value
			}
			c.stdin = w.stdin(fields)
			add := n.start(c)
			must.That(t, (&lan{node: n}).eventually(t, waits), "nothing hangs")
			var e *coded
			err := add.failure()
			expect.That(t, errors.As(err, &e) && e.code == 11, "ADD: %v", err)
			expect.Equal(t, add.cmd.ProcessState.ExitCode(), 1, "exit status")
			got := nstest.ReadIf(t, n.state+"/failures/ADD.11")
			expect.That(t, tt.name == "stateDir" || len(got) == 1, "counted as %q", got)
		})
	}
}

func TestNetavarksCallEndsWithItsDeadlineToo(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	must.Succeed(t, os.WriteFile(dir+"/log", nil, 0o600))
	hang(t, dir)
	cmd := exec.Command(plugin(), "create")
	cmd.Stdin = strings.NewReader(`{"name": "home", "id": "0123456789ab", "options": {"bridge": "br7", "deadline": "100ms", "logFile": "` + dir + `/log"}}`)
	var said strings.Builder
	cmd.Stderr = &said
	err := newNode(t).ns.Do(cmd.Run)
	expect.That(t, cmd.ProcessState.ExitCode() == 2 && strings.Contains(said.String(), "hung past its deadline"), "%v: %s", err, &said)
}

// TestWhatIsNoFileIsNotWaitedFor has a FIFO, and what else is no file of ours, in the place
// of each. Nobody has its other end.
func TestWhatIsNoFileIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		make func(path string) error
		says string
	}{
		{"a FIFO", func(path string) error { return unix.Mkfifo(path, 0o600) }, ""},
		{"a link", func(path string) error { return os.Symlink("/dev/null", path) }, "too many levels"},
		{"another's", func(path string) error {
			return errors.Join(os.WriteFile(path, nil, 0o600), os.Chown(path, 4711, 0))
		}, "belongs to user 4711"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			w := n.podnet(nil)
			p := n.pod("a")
			log := filepath.Join(t.TempDir(), "log")
			lock := filepath.Join(t.TempDir(), "lock")
			must.Succeed(t, errors.Join(tt.make(log), tt.make(lock)))
			wantError(t, expect.Err(w.with(conf{"logFile": log}).tryAdd(p)), 5, tt.says)
			wantError(t, expect.Err(w.with(conf{"stateDir": filepath.Dir(lock)}).tryAdd(p)), 5, tt.says)
			// Teardown goes on without a log.
			w.add(p)
			w.with(conf{"logFile": log}).del(p)
			n.wantNothing()
			o := n.call(call{verb: "ADD", id: p.id, netns: log, ifName: "eth0", stdin: w.stdin(nil)})
			expect.That(t, o.status != 0, "ADD took it for a namespace")
		})
	}
}
