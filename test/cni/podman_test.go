package cni

import (
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

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
	t.Parallel()
	n := newNode(t)
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
		wantError(t, err, 112, ") for container 0123456789ab: stop that, or choose another hostPort")
	}
	w.add(p, opt)
	p.serve(t, "tcp", 80)
	expect.Success(t, expect.Err(askPort(t, n.ns, "tcp", "127.0.0.1", 8080)), "the port does not lead to the container")
}

// nerdctl 2.1.6 and later have a process listen at each port of a container before ADD, and name it in
// a file (seen with nerdctl 2.1.6 on containerd 1.6). The process that started it has the sockets, too.
func TestAContainersPortReserverOfNerdctlIsNoConflict(t *testing.T) {
	t.Parallel()
	n := newNode(t)
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
