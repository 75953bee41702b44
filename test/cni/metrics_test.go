package cni

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestTombolodTellsOfPoolsAndFailures(t *testing.T) {
	n := parallelNode(t)
	two := conf{"type": "host-local", "ranges": []any{
		[]any{conf{"subnet": subnet4, "rangeStart": "10.77.0.10", "rangeEnd": "10.77.0.11"}}, []any{conf{"subnet": subnet6}},
	}}
	w := n.podnet(conf{"ipam": two})
	pods := n.pods(3)
	w.add(pods[0])
	m := n.mind(t)
	want := func(name string, value int) {
		t.Helper()
		expect.Equal(t, m.metric(name), value, "%s is", name)
	}
	// The names of labels are sorted.
	reserved4 := `pool_reserved_addresses{family="ipv4",network="podnet",range="10.77.0.10-10.77.0.11 of 10.77.0.0/24"}`
	reserved6 := `pool_reserved_addresses{family="ipv6",network="podnet",range="fd77::/64"}`
	full := `failures_total{code="100",verb="ADD"}`
	want(reserved4, 1)
	want(strings.Replace(reserved4, "reserved_", "", 1), 2)
	want(full, 0)
	w.add(pods[1])
	for range 2 {
		wantError(t, expect.Err(w.tryAdd(pods[2])), 100, "")
	}
	want(reserved4, 2)
	want(reserved6, 2)
	want(full, 2)
	w.del(pods[0])
	want(reserved4, 1)
	want(`errors_total{kind="read"}`, 0)
}

func TestTombolodCountsWhatPodsReceiveAndTransmit(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(conf{"ipam": hostLocal(subnet4)})
	pods := n.pods(2)
	w.add(pods[0], arg("K8S_POD_NAMESPACE", "shop"), arg("K8S_POD_NAME", "web-0"))
	to := netip.AddrPortFrom(ip4(w.add(pods[1])), 9)
	must.Succeed(t, pods[1].Do(func() error {
		l, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(to)) // else it answers by ICMP
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	}))
	m := n.mind(t)
	of := func(what, namespace, name string, p *pod) int {
		return m.metric(fmt.Sprintf(`pod_%s_total{container=%q,interface="eth0",namespace=%q,network="podnet",pod=%q}`, what, p.id, namespace, name))
	}
	counters := func() (all [6]int) {
		for i, what := range []string{"transmit_packets", "transmit_bytes", "receive_packets"} {
			all[i] = of(what, "shop", "web-0", pods[0])
		}
		for i, what := range []string{"receive_packets", "receive_bytes", "transmit_packets"} {
			all[3+i] = of(what, "", "", pods[1])
		}
		return all
	}
	before := counters()
	s := newSender(t, pods[0].NS, to)
	for range 100 {
		must.Of(s.conn.Write(make([]byte, 1000))).Get(t)
	}
	for i, more := range counters() {
		more -= before[i]
		least := [...]int{100, 104200, 0}[i%3]
		expect.That(t, least <= more && more <= least+least/20+5, "counter %d is %d more, want %d and a few", i, more, least)
	}
	w.del(pods[0])
	gone := counters()
	expect.Equal(t, [3]int(gone[:3]), [3]int{}, "of a pod that is deleted")
}

func TestTombolodWithoutPrivilegesEndsAtOnce(t *testing.T) {
	t.Parallel()
	nstest.Need(t, "setpriv")
	n := newNode(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "setpriv", "--bounding-set=-net_admin", keeperPath(), "--leases", n.state+"-leases", "--state", n.state)
	var out []byte
	_ = n.ns.Do(func() error { out, _ = cmd.CombinedOutput(); return nil })
	expect.That(t, cmd.ProcessState.ExitCode() == 1 && strings.Count(string(out), "\n") == 1 && strings.Contains(string(out), "lacks CAP_NET_ADMIN: run it as root"),
		"%s: %s", cmd.ProcessState, out)
}

// TestIdleConnectionsDoNotStarveTombolod has more clients of metrics than tombolod may have files open, each of which asks
// once and then keeps its connection.
func TestIdleConnectionsDoNotStarveTombolod(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	p := w.addPod("a")
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
