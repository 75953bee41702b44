package cni

import (
	"bytes"
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
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// running is a verb under way.
type running struct {
	testing.TB
	cmd  *exec.Cmd
	out  bytes.Buffer
	done chan struct{}
}

func (n *node) start(c call) *running {
	n.Helper()
	r := &running{TB: n, cmd: exec.Command(plugin()), done: make(chan struct{})}
	r.cmd.Env, r.cmd.Stdin, r.cmd.Stdout = c.environ(), bytes.NewReader(c.stdin), &r.out
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // with the plugins that it runs
	must.Succeed(n, n.ns.Do(r.cmd.Start))
	go func() {
		_ = r.cmd.Wait()
		close(r.done)
	}()
	n.Cleanup(r.kill)
	return r
}

// kill ends the verb, and waits until it has.
func (r *running) kill() {
	_ = syscall.Kill(-r.cmd.Process.Pid, syscall.SIGKILL)
	<-r.done
}

// wantRunning says that the verb has not come to its end.
func (r *running) wantRunning() {
	r.Helper()
	select {
	case <-r.done:
		r.Fatalf("it has ended: %s", r.out.String())
	default:
	}
}

// wait waits for its end.
func (r *running) wait() {
	r.Helper()
	select {
	case <-r.done:
	case <-time.After(patience / 2):
		r.Fatalf("the verb does not end within %s", patience/2)
	}
}

// wantSuccess says that it ends with one.
func (r *running) wantSuccess(verb string) {
	r.Helper()
	if r.wait(); r.cmd.ProcessState.ExitCode() != 0 {
		r.Errorf("%s beside another call fails: %s", verb, r.out.String())
	}
}

func (r *running) failure() *types.Error {
	r.Helper()
	r.wait()
	e := failure(r.out.String())
	must.That(r, e != nil, "no error: %q", r.out.String())
	return e
}

// slow is a network whose ADDs wait for a server that never answers, and what it has of
// one that does.
type slow struct {
	name string
	w    *network
	look func(p *pod)      // before it is started, if that matters
	wait func(p *pod) bool // it waits
}

// adds counts the ADDs that a plugin was run for.
func adds(calls []string, p *pod) int {
	count := 0
	for _, line := range calls {
		if strings.HasPrefix(line, "ADD "+p.id+" ") {
			count++
		}
	}
	return count
}

// slowNetworks are those: by DHCP without a server, and by a plugin that hangs.
func slowNetworks(t *testing.T, n *node) []slow {
	dir, err := lease.Open(n.state + "-leases")
	must.Succeed(t, err)
	leased := n.network("lan", conf{"bridge": "br0", "ipMasq": false, "leaseDir": dir.Path(), "deadline": "1h",
		"ipam": conf{"type": "dhcp", "keeper": "optional", "timeout": "1h"}})
	ipam, calls := fake(t, fakeConf{Hang: "ADD"})
	heard := map[*pod]int{}
	delegated := n.network("delegated", conf{"bridge": "br1", "ipMasq": false, "deadline": "1h", "ipam": ipam})
	return []slow{
		{"a DHCP server", leased, nil, func(p *pod) bool {
			// The attack: it has the lock of its lease, which a DEL and a GC want.
			hash := ident.Hash("lan", p.id, "eth0")
			if _, err := dir.Load(hash); err != nil {
				return false
			}
			done, cancel := context.WithCancel(t.Context())
			cancel()
			held, err := dir.Lock(done, hash)
			if err == nil {
				held.Close()
			}
			return errors.Is(err, file.ErrLocked) && hasPort(n, leased, p)
		}},
		{"a plugin", delegated, func(p *pod) { heard[p] = adds(calls(), p) }, func(p *pod) bool { return adds(calls(), p) > heard[p] }},
	}
}

func hasPort(n *node, w *network, p *pod) bool {
	_, ok := links(n, n.ns)[w.port(p)]
	return ok
}

func (n *node) waits(s slow, p *pod) *running {
	n.Helper()
	if s.look != nil {
		s.look(p)
	}
	r := n.start(call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: s.w.stdin(nil)})
	must.That(n, (&lan{node: n}).eventually(n, func() bool { r.wantRunning(); return s.wait(p) }),
		"ADD never waited for %s", s.name)
	return r
}

// TestNobodyWaitsForAnADDThatWaits is about the order of locks: an ADD that waits for
// somebody has those of its attachment, and none that others need.
func TestNobodyWaitsForAnADDThatWaits(t *testing.T) {
	n := parallelNode(t)
	for i, s := range slowNetworks(t, n) {
		p := n.pod("waits-" + s.w.name)
		add := n.waits(s, p)
		others := n.network("others-"+s.w.name, conf{"bridge": "cbr-" + s.w.name[:3], "ipam": hostLocal(fmt.Sprintf("10.%d.0.0/24", 77+i))})
		first := n.pod("first-" + s.w.name)
		others.add(first) // it builds a network
		s.w.gc()          // claims nobody, least of all the one that waits
		add.wantRunning()
		others.gc(first)
		var all sync.WaitGroup
		for i := range 8 {
			q := n.pod(fmt.Sprintf("beside-%s-%d", s.w.name, i))
			all.Go(func() {
				expect.Success(t, expect.Err(others.tryAdd(q)), "ADD")
				s.w.gc()
				expect.Success(t, others.tryDel(q), "DEL")
			})
		}
		all.Wait()
		expect.Success(t, others.check(first))
		o, err := n.exec(t.Context(), command(), nil, os.Environ(), "repair", "--state", n.state)
		expect.That(t, err == nil && o.status == 0, "repair: %v, %d, %s", err, o.status, o.stderr)
		add.wantRunning()
		add.kill()
		s.w.gc()
		others.del(first)
	}
	n.wantNothing()
	(&lan{node: n}).wantNoLeaseRecords()
}

// TestDELEndsAnADDThatWaits has a runtime give a pod up whose ADD goes on.
func TestDELEndsAnADDThatWaits(t *testing.T) {
	n := parallelNode(t)
	s := slowNetworks(t, n)[0]
	p := n.pod("a")
	add := n.waits(s, p)
	s.w.del(p)
	wantError(t, add.failure(), 11, "deleted")
	n.wantNothing()
	(&lan{node: n}).wantNoLeaseRecords()
}

// TestAnADDAfterOneThatWasKilledUndoesWhatThatLeft has a runtime, or the machine's OOM
// killer, kill ADDs where they wait.
func TestAnADDAfterOneThatWasKilledUndoesWhatThatLeft(t *testing.T) {
	n := parallelNode(t)
	for _, s := range slowNetworks(t, n) {
		p := n.pod("killed-" + s.w.name)
		add := n.waits(s, p)
		dir := must.Of(state.Open(n.state)).Get(t)
		hash := ident.Hash(s.w.name, p.id, "eth0")
		expect.Is(t, expect.Err(dir.LockAttachment(s.w.name, hash)), state.ErrBusy, "its record's lock")
		// Beside one that runs, another is refused.
		wantError(t, expect.Err(s.w.tryAdd(p)), 111, "DEL it first")
		add.wantRunning()
		add.kill()
		rec, err := dir.Load(s.w.name, hash)
		must.That(t, err == nil && rec.State == state.Adding, "the kill left record %v, %v", rec, err)
		next := n.waits(s, p) // it got past the record
		now, err := dir.Load(s.w.name, hash)
		expect.That(t, err == nil && !now.Created.Equal(rec.Created), "record %v, %v: that of before", now, err)
		next.kill()
		// Also by another configuration than that of the one that was killed.
		if s.look == nil {
			s.w.with(conf{"ipam": hostLocal("10.79.0.0/24")}).add(p)
		}
		s.w.del(p)
	}
	n.wantNothing()
	(&lan{node: n}).wantNoLeaseRecords()
}

// TestRecordsThatAreInTheWay are those of which a pod may run.
func TestRecordsThatAreInTheWay(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	for name, tt := range map[string]struct {
		text string
		ok   bool
	}{
		"empty":         {"", true},
		"half a line":   {`{"version":1,"state":"add`, true},
		"rubbish":       {"rubbish\n", false},
		"newer version": {`{"version":99,"state":"adding"}` + "\n", false},
	} {
		p := n.pod("pod-" + strings.ReplaceAll(name, " ", "-"))
		path := n.state + "/attachments/podnet/" + strings.TrimPrefix(w.port(p), "veth") + ".json"
		must.Succeed(t, errors.Join(os.MkdirAll(n.state+"/attachments/podnet", 0o700), os.WriteFile(path, []byte(tt.text), 0o600)))
		_, err := w.tryAdd(p)
		expect.That(t, !tt.ok || err == nil, "%s: %v", name, err)
		if !tt.ok {
			wantError(t, err, 111, "DEL it first")
		}
		w.del(p)
	}
	n.wantNothing()
}

// TestAListenerOnTheOldLockStopsNobody has a container on the host's network do what
// stopped first ADDs, GC and repair of the version before.
func TestAListenerOnTheOldLockStopsNobody(t *testing.T) {
	n := parallelNode(t)
	must.Succeed(t, n.ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		t.Cleanup(func() { unix.Close(fd) })
		return errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: "@tombolo/lock"}), unix.Listen(fd, 8))
	}))
	w := n.podnet(nil)
	w.add(n.pod("a"))
	w.gc()
	n.wantNothing()
}

// TestTwoStateDirectoriesBuildInOneNamespace has callers with a /run of their own build at
// once what is the network namespace's. Only what the kernel promises keeps them apart.
func TestTwoStateDirectoriesBuildInOneNamespace(t *testing.T) {
	n := parallelNode(t)
	const directories = 6
	var networks []*network
	var pods []*pod
	for i := range directories {
		w := n.network(fmt.Sprintf("net%d", i), conf{
			"bridge": "cbr0", "stateDir": fmt.Sprintf("%s-%d", n.state, i),
			"ipam": hostLocal(fmt.Sprintf("10.81.%d.0/24", i), fmt.Sprintf("fd81:%d::/64", i)),
		})
		networks, pods = append(networks, w), append(pods, n.pod(fmt.Sprintf("pod-%d", i)))
	}
	var all sync.WaitGroup
	for i, w := range networks {
		all.Go(func() { expect.Success(t, expect.Err(w.tryAdd(pods[i])), "ADD") })
	}
	all.Wait()
	for i, w := range networks {
		expect.Success(t, w.check(pods[i]))
	}
	for i, w := range networks {
		w.del(pods[i])
	}
}

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
