package cni

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// The published port leads to the container whatever podman does to its networks, and nothing is
// left of it.
func TestPodmanKeepsPublishedPortsThroughItsCommands(t *testing.T) {
	t.Parallel()
	for _, program := range []string{"unshare", "bash", "make", "go", "busybox", "runc", "podman"} {
		nstest.Need(t, program)
	}
	if version, err := exec.Command("podman", "--version").Output(); err != nil || !strings.Contains(string(version), "version 4.") {
		t.Skipf("podman 4 is not installed: %s %v", version, err)
	}
	n := newNode(t)
	n.outside()
	root := must.Of(filepath.Abs(repository)).Get(t)
	unshare := must.Of(exec.LookPath("unshare")).Get(t)
	environ := append(os.Environ(), "REPOSITORY="+root, "PATH="+os.Getenv("PATH")+":"+built+":"+cniPath)
	o, err := n.exec(context.Background(), unshare, nil, environ,
		"--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "--wd", root, "bash", "test/cni/testdata/podman.sh")
	must.Succeed(t, err)
	removePodmansGroups()
	said := map[string]string{}
	for _, part := range strings.Split(o.stdout, "== ")[1:] {
		name, text, _ := strings.Cut(part, "\n")
		said[name] = text
	}
	_, ended := said["end"]
	must.That(t, ended && o.status == 0, "exit status %d\n%s\n%s", o.status, o.stdout, o.stderr)
	const first, second = "default via 10.31.0.1 dev eth0", "default via 10.32.0.1 dev eth1"
	for step, wants := range map[string][]string{
		"run":        {first, "8080"},
		"connect":    {first, second, "metric 100", "8080"},
		"reload":     {"default via", "metric 100", "8080"},
		"disconnect": {second, "8080"},
		"again":      {"10.31.0.", second, "metric 100", "8080"},
		"restart":    {"default via", "metric 100", "8080"},
	} {
		for _, want := range append(wants, "hello", " web ") {
			expect.That(t, strings.Contains(said[step], want), "after %s, %q is missing in:\n%s", step, want, said[step])
		}
	}
	expect.That(t, !strings.Contains(said["disconnect"], "10.31.0.") && !strings.Contains(said["rm"], "10.3"),
		"something of a network is left:\n%s\n%s", said["disconnect"], said["rm"])
	if got := said["network rm"]; !strings.Contains(got, " is gone, and the network has no pods") || !strings.HasSuffix(got, "0 attachments: nothing differs\n") {
		t.Errorf("after podman network rm:\n%s", got)
	}
	n.wantNothing()
}

// removePodmansGroups removes the control groups that podman and ctr have for their containers,
// all of which have ended.
func removePodmansGroups() {
	_ = exec.Command("find", "/sys/fs/cgroup", "-depth", "-type", "d", "-regex", ".*/\\(libpod_parent\\(/.*\\)?\\|default\\(/web\\)?\\)", "-exec", "rmdir", "{}", ";").Run()
}

// monitorName is the name by which this program stands in for podman's conmon: it holds
// what it was started with until its standard input ends.
const monitorName = "conmon"

func runMonitor() int {
	os.Stdout.WriteString("1")
	_, _ = io.Copy(io.Discard, os.Stdin)
	return 0
}

// podman network reload is DEL and ADD of a container that runs, whose conmon has had a
// listening socket at each of its ports since it was started (podman 4.3, seen with the
// real ones).
func TestAContainersOwnMonitorIsNoConflict(t *testing.T) {
	n := parallelNode(t)
	w := n.portnet(nil)
	p := n.pod(strings.Repeat("0123456789abcdef", 4))
	opt := publish(t, "8080:80/tcp")
	w.add(p, opt)
	n.startMonitor(p.id)
	w.del(p, opt)
	// Anybody else is refused: another container, and one whose ID begins the same.
	for _, id := range []string{"b", p.id[:12]} {
		_, err := w.tryAdd(n.pod(id), opt)
		wantError(t, err, 112, "in use by conmon")
		wantError(t, err, 112, ") for container 0123456789ab: stop it, or choose another hostPort")
	}
	w.add(p, opt)
	p.serve(t, "tcp", 80)
	expect.Success(t, expect.Err(askPort(t, n.ns, "tcp", "127.0.0.1", 8080)), "the port does not lead to the container")
}

// nerdctl 2.1.6 and later have a process listen at each port of a container before ADD, and name it in
// a file (seen with nerdctl 2.1.6 on containerd 1.6). The process that started it has the sockets, too.
func TestAContainersPortReserverOfNerdctlIsNoConflict(t *testing.T) {
	n := parallelNode(t)
	n.root = t.TempDir()
	for _, dir := range []string{"run", "lib"} {
		must.Succeed(t, os.Mkdir(filepath.Join(n.root, dir), 0o755))
	}
	w := n.portnet(nil)
	id := strings.Repeat("0123456789abcdef", 4)
	p := n.pod("default-" + id)
	opt := publish(t, "8080:80/tcp")
	pid := n.startMonitor("of nerdctl")
	reserver := filepath.Join(n.root, "run/nerdctl/default", id, "port-reserver.pid")
	must.Succeed(t, errors.Join(os.MkdirAll(filepath.Dir(reserver), 0o755), os.WriteFile(reserver, []byte(strconv.Itoa(pid)), 0o644)))
	for _, other := range []string{id, "other-" + id} {
		wantError(t, expect.Err(w.tryAdd(n.pod(other), opt)), 112, "in use by conmon")
	}
	w.add(p, opt)
	p.serve(t, "tcp", 80)
	expect.Success(t, expect.Err(askPort(t, n.ns, "tcp", "127.0.0.1", 8080)), "the port does not lead to the container")
}

func (n *node) startMonitor(id string) (pid int) {
	n.Helper()
	path := filepath.Join(n.TempDir(), monitorName)
	must.Succeed(n, copyProgram("/proc/self/exe", path))
	var socket *os.File
	must.Succeed(n, n.ns.Do(func() error {
		l, err := net.Listen("tcp4", ":8080")
		if err != nil {
			return err
		}
		defer l.Close()
		socket, err = l.(*net.TCPListener).File()
		return err
	}))
	defer socket.Close()
	cmd := &exec.Cmd{Path: path, Args: []string{path, "--api-version", "1", "-c", id, "-u", id}, ExtraFiles: []*os.File{socket}}
	in := must.Of(cmd.StdinPipe()).Get(n)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	must.Succeed(n, err)
	n.Cleanup(func() { in.Close(); _ = cmd.Wait() })
	must.Succeed(n, expect.Err(io.ReadFull(out, make([]byte, 1))))
	return cmd.Process.Pid
}

// TestCnitool goes through the reference's command-line runtime, with all paths at
// their defaults: in a mount namespace whose /run and /var/lib are empty.
func TestCnitool(t *testing.T) {
	t.Parallel()
	for _, program := range []string{"unshare", "nsenter", "bash"} {
		nstest.Need(t, program)
	}
	n := newNode(t)
	server := nstest.Serve(t, n.outside(), "tcp", netip.MustParseAddrPort(outside4+":0"))
	p := n.pod("a")
	confDir := t.TempDir()
	list := conf{"cniVersion": "1.1.0", "name": "podnet", "plugins": []conf{{"type": "tombolo", "ipam": dualStack()}}}
	must.Succeed(t, os.WriteFile(filepath.Join(confDir, "10-podnet.conflist"), marshal(t, list), 0o600))
	script := `
		mount -t tmpfs none /run
		mount -t tmpfs none /var/lib
		PATH=$CNI_PATH:$PATH
		cnitool status podnet $POD
		cnitool add podnet $POD
		cnitool check podnet $POD
		test -n "$(ls /run/tombolo/attachments/podnet)"
		$TOMBOLO ls | grep -q 10.77.0.2 && echo LISTED
		nsenter --net=$POD bash -c 'exec 3<>/dev/tcp/$SERVER; printf ? >&3; echo SEEN AS $(cat <&3)'
		cnitool del podnet $POD
		cnitool del podnet $POD
		test -z "$(ls /run/tombolo/attachments/podnet)"
		CNI_IFNAME=net1 cnitool add podnet $POD >/dev/null
		cnitool gc podnet $POD
		test -z "$(ls /run/tombolo/attachments/podnet)"
		$TOMBOLO remove podnet
		echo DONE
	`
	environ := append(os.Environ(), "CNI_PATH="+cniPath, "NETCONFPATH="+confDir, "POD="+p.path, "TOMBOLO="+command(),
		fmt.Sprintf("SERVER=%s/%d", server.Addr(), server.Port()))
	unshare := must.Of(exec.LookPath("unshare")).Get(t)
	o := must.Of(n.exec(context.Background(), unshare, nil, environ, "--mount", "bash", "-ec", script)).Get(t)
	for _, part := range []string{`"address": "10.77.0.2/24"`, `"address": "fd77::2/64"`, "LISTED", "SEEN AS " + uplink4, "DONE"} {
		expect.Contains(t, o.stdout, part)
	}
	expect.That(t, !t.Failed() && o.status == 0 && o.stderr == "",
		"exit status %d\n%s\n%s", o.status, o.stdout, o.stderr)
	n.wantNothing()
}

// TestNetworkManagersLeavePodsAlone runs real network managers that configure every link by DHCP and router
// advertisements, beside a pod that serves both. The pod does not become the host's server or router, and pods stay on
// their bridge when the manager starts again.
func TestNetworkManagersLeavePodsAlone(t *testing.T) {
	t.Parallel()
	for _, program := range []string{"unshare", "dnsmasq", "NetworkManager", "dhcpcd", "dbus-daemon"} {
		nstest.Need(t, program)
	}
	line := ""
	for _, b := range docBlocks(t) {
		if b.page == "docs/operating.md" && strings.Contains(b.text, "denyinterfaces ") {
			line = strings.TrimSpace(b.text)
		}
	}
	must.That(t, line != "", "docs/operating.md has no denyinterfaces line for dhcpcd")
	const networkdFile = "cp $DEPLOY/networkd/05-tombolo.network /etc/systemd/network/"
	for _, tt := range []struct{ name, manager, keepOff, bridge, want string }{
		// From its first start it has no file of ours, and from the second that which the first ADD wrote.
		{"systemd-networkd without our file", "networkd", "", "cbr0", "pods on their bridge"},
		{"systemd-networkd without our file, another bridge", "networkd", "", "pods0", "pods on their bridge"},
		{"systemd-networkd", "networkd", networkdFile, "cbr0", "pods on their bridge, nothing differs"},
		{"NetworkManager", "nm", "cp $DEPLOY/NetworkManager/10-tombolo.conf /etc/NetworkManager/conf.d/", "cbr0", "pods on their bridge, nothing differs"},
		{"dhcpcd", "dhcpcd", "echo '" + line + "' >>/run/dhcpcd.conf", "cbr0", "pods on their bridge, nothing differs"},
		{"dhcpcd without the line in the docs", "dhcpcd", "", "cbr0", "told"},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			environ := append(os.Environ(), "TOMBOLO="+command(), "PLUGIN="+plugin(), "DEPLOY="+must.Of(os.Getwd()).Get(t)+"/../../deploy",
				"NETWORKD=/lib/systemd/systemd-networkd", "MANAGER="+tt.manager, "KEEP_OFF="+tt.keepOff, "BRIDGE="+tt.bridge)
			o, err := n.exec(context.Background(), "/usr/bin/unshare", nil, environ,
				"--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "testdata/managers.sh")
			must.Succeed(t, err)
			expect.That(t, o.status == 0 && strings.HasSuffix(o.stdout, tt.want+"\n"), "want %q; status %d\n%s\n%s", tt.want, o.status, o.stdout, o.stderr)
		})
	}
}
