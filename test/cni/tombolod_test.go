package cni

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestTombolodWithoutPrivilegesEndsAtOnce(t *testing.T) {
	t.Parallel()
	nstest.Need(t, "setpriv")
	n := newNode(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "setpriv", "--bounding-set=-net_admin", keeperPath(), "--leases", n.state+"-leases", "--state", n.state)
	var out []byte
	_ = n.ns.Do(func() error { out, _ = cmd.CombinedOutput(); return nil })
	if cmd.ProcessState.ExitCode() != 1 || strings.Count(string(out), "\n") != 1 || !strings.Contains(string(out), "lacks CAP_NET_ADMIN: run it as root") {
		t.Errorf("%s: %s", cmd.ProcessState, out)
	}
}

// TestIdleConnectionsDoNotStarveTombolod has more clients of metrics than tombolod may have files open, each of which asks
// once and then keeps its connection.
func TestIdleConnectionsDoNotStarveTombolod(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	w := n.podnet(nil)
	p := n.pod("a")
	w.add(p)
	m := n.mind(t)
	const files, clients = 256, 300
	pid := m.process.Process.Pid
	must.Succeed(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: files}, nil))
	for range clients {
		conn := must.Of(net.Dial("unix", m.socket)).Get(t)
		defer conn.Close()
		must.Succeed(t, expect.Err(fmt.Fprint(conn, "GET /healthz HTTP/1.1\r\nHost: tombolod\r\n\r\n")))
	}
	n.nft("flush table inet tombolo")
	must.Until(t, "what was flushed is put back", func() bool { return w.check(p) == nil })
	open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	expect.That(t, err == nil && len(open) <= files/2,
		"beside %d idle connections tombolod has %d files open, %v", clients, len(open), err)
}
