package containerd

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"text/template"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// node is a machine of its own, with a containerd: a network, a mount and a process
// namespace. It shares its directory, and the control groups, with the real machine.
type node struct {
	testing.TB
	*cri
	ns  *netns.NS
	dir string // for containerd; the test and the node know it by the same path

	template string // what containerd makes its network of

	init     *exec.Cmd // see nodeInit
	toInit   io.WriteCloser
	fromInit *bufio.Reader
	cgroup   string // the pods' parent
}

// What is in a node's directory.
const (
	configName  = "config.toml"
	socketName  = "containerd.sock"
	logName     = "containerd.log"
	confDirName = "net.d" // CNI configurations
	binDirName  = "bin"   // links to CNI plugins
	tempName    = "tmp"
)

// templatePath is what this module tests beside the plugin.
const templatePath = "../../deploy/containerd/10-tombolo.conflist.template"

// clusterTemplate is that of docs/cluster.md.
const clusterTemplate = "../../deploy/cluster/10-tombolo.conflist.template"

// conflistName is the name that containerd gives to what it makes of the template.
const conflistName = "10-containerd-net.conflist"

// newNode starts a machine with a containerd, which knows no pod CIDR yet. It ends
// with the test, with all its processes, mounts and control groups.
func newNode(t testing.TB) *node {
	t.Helper()
	return newNodeOf(t, templatePath)
}

func newNodeOf(t testing.TB, path string) *node {
	t.Helper()
	requirePrograms(t)
	n := &node{TB: t, ns: nstest.New(t), template: path}
	n.run("ip", "link", "set", "lo", "up") // where containerd listens for streams
	n.makeDir()
	n.startInit()
	n.tell(startContainerd)
	n.cri = dial(t, filepath.Join(n.dir, socketName))
	n.awaitReady()
	n.run("ctr", "--address", filepath.Join(n.dir, socketName), "--namespace", "k8s.io",
		"images", "import", "--no-unpack", pauseImage)
	// That is another part of containerd, which hears of images by and by.
	await(t, "the image "+imageName, func() error { return n.hasImage(imageName) })
	return n
}

// requirePrograms skips the test where containerd is not installed.
func requirePrograms(t testing.TB) {
	t.Helper()
	for _, program := range []string{"containerd", "containerd-shim-runc-v2", "ctr", "runc"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("runs pods by containerd and runc: %v; test/deps.sh installs them", err)
		}
	}
}

// makeDir makes the node's directory. Its path is short: those of unix sockets are
// 107 bytes at most.
func (n *node) makeDir() {
	n.Helper()
	dir := must.Of(os.MkdirTemp("", "tombolo-node-")).Get(n)
	n.dir, n.cgroup = dir, cgroupOf(dir)
	n.Cleanup(func() { expect.Success(n, os.RemoveAll(dir)) })
	absolute := must.Of(filepath.Abs(n.template)).Get(n)
	var config bytes.Buffer
	must.Succeed(n, template.Must(template.ParseFiles("testdata/config.toml")).Execute(&config, struct{ Dir, Template, Image string }{dir, absolute, imageName}))
	err := errors.Join(os.WriteFile(filepath.Join(dir, configName), config.Bytes(), 0o644),
		os.Mkdir(filepath.Join(dir, tempName), 0o755), os.Mkdir(filepath.Join(dir, binDirName), 0o755))
	for _, plugin := range []string{"tombolo", "loopback"} {
		err = errors.Join(err, os.Symlink(filepath.Join(binDir, plugin), filepath.Join(dir, binDirName, plugin)))
	}
	must.Succeed(n, err)
}

func (n *node) startInit() {
	n.Helper()
	self := must.Of(os.Executable()).Get(n)
	var complaints strings.Builder
	cmd := exec.Command(self)
	cmd.Args = []string{initName, n.dir}
	cmd.Stderr = &complaints
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID}
	in, inErr := cmd.StdinPipe()
	out, outErr := cmd.StdoutPipe()
	must.Succeed(n, errors.Join(inErr, outErr))
	// A child belongs to the network namespace of the thread that forks it.
	must.Succeed(n, n.ns.Do(cmd.Start))
	n.init, n.toInit, n.fromInit = cmd, in, bufio.NewReader(out)
	n.Cleanup(func() {
		if n.Failed() {
			n.Logf("the end of containerd's log:\n%s", n.logTail())
		}
		in.Close()
		err := cmd.Wait()
		expect.That(n, err == nil, "the node's first process: %v: %s", err, &complaints)
	})
	n.wantDone("isolate")
}

// tell has the node's first process do something, and waits until it is done.
func (n *node) tell(line string) {
	n.Helper()
	must.Succeed(n, expect.Err(fmt.Fprintln(n.toInit, line)))
	n.wantDone(line)
}

func (n *node) wantDone(what string) {
	n.Helper()
	answer, err := n.fromInit.ReadString('\n')
	answer = strings.TrimSpace(answer)
	must.That(n, err == nil && answer == done, "%s: %q, %v", what, answer, err)
}

func (n *node) logTail() string {
	const size = 16 << 10
	data, err := os.ReadFile(filepath.Join(n.dir, logName))
	if err != nil {
		return err.Error()
	}
	return string(data[max(0, len(data)-size):])
}

// run runs a command of the real machine in the node's network namespace.
func (n *node) run(name string, args ...string) string {
	n.Helper()
	return nstest.Run(n, n.ns, name, args...)
}

func (n *node) inside(name string, args ...string) string {
	n.Helper()
	return nstest.Run(n, nil, "nsenter", append([]string{"--target", strconv.Itoa(n.init.Process.Pid), "--all", "--", name}, args...)...)
}

// path is that of a node's file as the real machine sees it.
func (n *node) path(name string) string {
	return filepath.Join("/proc", strconv.Itoa(n.init.Process.Pid), "root", name)
}

// setPodCIDRs tells containerd the node's pod CIDRs, with commas, as a kubelet does,
// and waits until it has a network.
func (n *node) setPodCIDRs(cidrs string) {
	n.Helper()
	n.updatePodCIDRs(cidrs)
	await(n, "a network", n.networkReady)
}

// rewritePodCIDRs replaces the configuration that containerd has made of the template,
// as an administrator does whose node gets other pod CIDRs.
func (n *node) rewritePodCIDRs(cidrs string) {
	n.Helper()
	dir := filepath.Join(n.dir, confDirName)
	// By renaming within the directory, so that a whole file is found at any time.
	draft := filepath.Join(dir, "draft")
	conflist := renderTemplate(n, cidrs)
	err := errors.Join(os.WriteFile(draft, []byte(conflist), 0o644), os.Rename(draft, filepath.Join(dir, conflistName)))
	must.Succeed(n, err)
	await(n, "the network of "+cidrs, func() error {
		if loaded := n.loadedConflist(); loaded != conflist {
			return fmt.Errorf("containerd has %s", loaded)
		}
		return nil
	})
}

// renderTemplate is what containerd makes of the template.
func renderTemplate(t testing.TB, cidrs string) string {
	t.Helper()
	return render(t, templatePath, cidrs)
}

func render(t testing.TB, path, cidrs string) string {
	t.Helper()
	tmpl := must.Of(template.ParseFiles(path)).Get(t)
	ranges := strings.Split(cidrs, ",")
	var routes []string
	for _, cidr := range ranges {
		routes = append(routes, map[bool]string{true: "0.0.0.0/0", false: "::/0"}[nstest.Prefix(cidr).Addr().Is4()])
	}
	var out strings.Builder
	must.Succeed(t, tmpl.Execute(&out, struct {
		PodCIDR               string
		PodCIDRRanges, Routes []string
	}{ranges[0], ranges, routes}))
	return out.String()
}

// patience is how long tests wait for what is to come: far longer than any machine
// needs, however busy.
const patience = 5 * time.Minute

func await(t testing.TB, what string, try func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := try()
		if err == nil {
			return
		}
		must.That(t, !time.Now().After(deadline), "no %s in %v: %v", what, patience, err)
		time.Sleep(5 * time.Millisecond)
	}
}
