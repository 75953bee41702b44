package cni

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
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
		{"ipam.resolvConf", "resolv.conf", func(path string, _ *call) conf {
			return conf{"ipam": conf{"type": "host-local", "subnet": subnet4, "resolvConf": path}}
		}},
		{"ipam.dataDir", "lock", func(path string, _ *call) conf {
			dir, name := filepath.Split(filepath.Dir(path))
			return conf{"name": name, "ipam": conf{"type": "host-local", "subnet": subnet4, "dataDir": dir}}
		}},
		{"logFile", "log", func(path string, _ *call) conf { return conf{"logFile": path} }},
		{"CNI_NETNS", "netns", func(path string, c *call) conf { c.netns = path; return nil }},
		{"stateDir", "lock", func(path string, _ *call) conf { return conf{"stateDir": filepath.Dir(path)} }},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
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
			wantError(t, add.failure(), 11, "")
			expect.Equal(t, add.cmd.ProcessState.ExitCode(), 1, "exit status")
			got := nstest.ReadIf(t, n.state+"/failures/ADD.11")
			expect.That(t, tt.name == "stateDir" || len(got) == 1, "counted as %q", got)
		})
	}
}

// TestARuntimesCallEndsWithItsDeadlineToo has the plugin called in process: by netavark, which reads an error as JSON, and
// by tombolod, which has to live on.
func TestARuntimesCallEndsWithItsDeadlineToo(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	must.Succeed(t, os.WriteFile(dir+"/log", nil, 0o600))
	hang(t, dir)
	n, hung := newNode(t), "STATUS hung past its deadline"
	cmd := exec.Command(plugin(), "create")
	cmd.Stdin = strings.NewReader(`{"name": "home", "id": "0123456789ab", "options": {"bridge": "br7", "deadline": "100ms", "logFile": "` + dir + `/log"}}`)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	var out []byte
	err := n.ns.Do(func() (err error) { out, err = cmd.Output(); return err })
	var said struct{ Error string }
	expect.That(t, cmd.ProcessState.ExitCode() == 1 && json.Unmarshal(out, &said) == nil && strings.HasPrefix(said.Error, hung), "%v: %s%s", err, out, &stderr)

	socket := filepath.Join(t.TempDir(), "docker")
	m := n.mindOn(t, "unix:path="+n.state+"/no-bus", []string{"--docker", socket})
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	defer client.CloseIdleConnections()
	reply := must.Of(client.Post("http://tombolod/NetworkDriver.CreateNetwork", "", strings.NewReader(fmt.Sprintf(`{"NetworkID": "%064d",
		"IPv4Data": [{"Pool": "10.9.0.0/24", "Gateway": "10.9.0.1/24"}],
		"Options": {"com.docker.network.generic": {"bridge": "br7", "deadline": "100ms", "logFile": "%s/log"}}}`, 1, dir)))).Get(t)
	expect.Contains(t, string(must.Of(io.ReadAll(reply.Body)).Get(t)), hung)
	m.end(t) // it lives
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
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
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

// TestAPathThatIsNamedIsASmallFile has what never ends, or is no file, where a configuration or an operator names one.
// No call hangs, and none takes the memory that such a file could fill.
func TestAPathThatIsNamedIsASmallFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	const large = 8 << 30 // sparse
	must.Succeed(t, errors.Join(
		os.WriteFile(dir+"/large", nil, 0o600), os.Truncate(dir+"/large", large), unix.Mkfifo(dir+"/fifo", 0o600), os.Mkdir(dir+"/dir", 0o700),
		os.Symlink("loop", dir+"/loop"), os.Symlink("/dev/zero", dir+"/link"), os.WriteFile(dir+"/real", []byte("nameserver 192.0.2.53\n"), 0o600),
		os.Symlink("real", dir+"/alias")))
	for path, says := range map[string]string{
		"/dev/zero": "not a regular file", dir + "/fifo": "not a regular file", dir + "/dir": "not a regular file", dir + "/link": "not a regular file",
		dir + "/large": "larger than 1048576 bytes", dir + "/loop": "too many levels", "/proc/self/fd/0": "not a regular file", dir + "/alias": "",
	} {
		nstest.RunParallel(t, filepath.Base(path), func(t *testing.T) {
			n := newNode(t)
			n.by = []string{"prlimit", "--as=2000000000"}
			w := n.podnet(conf{"ipam": conf{"type": "host-local", "subnet": subnet4, "resolvConf": path}})
			p := n.pod("a")
			if says == "" {
				expect.Equal(t, strings.Join(w.add(p).DNS.Nameservers, " "), "192.0.2.53", "name servers")
				w.del(p)
			} else {
				wantError(t, expect.Err(w.tryAdd(p)), 5, says)
			}
			n.wantNothing()

			o := n.operate("validate", path)
			expect.That(t, o.status != 0 && o.stderr+o.stdout != "", "validate: %+v", o)
			lists := t.TempDir()
			must.Succeed(t, os.Symlink(path, lists+"/10-pods.conflist"))
			o = n.operate("init", "pods", "--dir", lists, "--yes")
			expect.That(t, o.status != 0, "init took it for its own: %+v", o)
			report := lists + "/report"
			n.operate("bugreport", report, "--dir", lists, "--state", n.state)
			expect.Contains(t, readFile(t, report), lists+"/10-pods.conflist: ")

			// Where the plugin is called by a name, and in place of the one that had it before.
			kept := t.TempDir()
			must.Succeed(t, errors.Join(os.Symlink(plugin(), kept+"/portmap"), os.Symlink(path, kept+"/portmap.reference")))
			c := call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(conf{"type": "portmap",
				"prevResult": conf{"cniVersion": "1.1.0", "interfaces": []conf{{"name": "x", "sandbox": p.path}}}})}
			o = must.Of(n.exec(t.Context(), kept+"/portmap", c.stdin, c.environ())).Get(t)
			expect.That(t, o.status != 0, "the kept plugin: %+v", o)
		})
	}
	// A shell makes a FIFO of <(command), and somebody writes to that.
	o := newNode(t).run("bash", "-c", `"$0" validate <(echo '{"cniVersion":"1.0.0","name":"n","type":"tombolo","ipam":{"type":"host-local","subnet":"10.1.0.0/24"}}')`, command())
	expect.Contains(t, o, ": valid\n")
}
