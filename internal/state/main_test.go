package state

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lockorder"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/route"
)

// helperVariable makes the test binary one of the helpers in helpers_test.go.
const helperVariable = "TOMBOLO_STATE_HELPER"

func TestMain(m *testing.M) {
	os.Setenv(lockorder.Off, "1")
	if name := os.Getenv(helperVariable); name != "" {
		os.Exit(runHelper(name, os.Args[1:]))
	}
	os.Exit(m.Run())
}

// A node is a made-up node, whose epochs a test begins and ends.
type node struct {
	t      testing.TB
	dir    string // of its /proc
	cookie uint64
	uptime time.Duration
}

func newNode(t testing.TB) *node {
	n := &node{t: t, dir: t.TempDir(), cookie: 1, uptime: time.Hour}
	n.setBoot("a59bef75-6922-4ab4-8416-46a500e25de5")
	n.setInit(0)
	return n
}

func (n *node) setBoot(id string) { writeFile(n.t, n.dir+"/boot_id", id+"\n") }

// setInit sets when pid 1 started, since boot.
func (n *node) setInit(start time.Duration) {
	writeFile(n.t, n.dir+"/stat", fmt.Sprintf("1 (init) (odd) name) S 0 1 1 0 -1 4194560 30166 285737 0 148 37 188 452 268 10 -10 13 0 %d 43233280 3183\n",
		start/(time.Second/userHZ)))
}

func (n *node) sources() sources {
	return sources{
		bootIDPath: n.dir + "/boot_id",
		initPath:   n.dir + "/stat",
		now:        func() time.Time { return time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC) },
		uptime:     func() time.Duration { return n.uptime },
		netns:      func() (uint64, error) { return n.cookie, nil },
	}
}

// newDir returns a state directory that does not exist yet, on a made-up node.
func newDir(t testing.TB) *Dir {
	d, _ := newDirOn(t)
	return d
}

func newDirOn(t testing.TB) (*Dir, *node) {
	t.Helper()
	d := must.Of(Open(filepath.Join(t.TempDir(), "run", "tombolo"))).Get(t)
	n := newNode(t)
	d.sources = n.sources()
	return d, n
}

// again opens a directory once more, as another process would.
func again(d *Dir) *Dir { return &Dir{path: d.path, sources: d.sources} }

// sample returns an attachment with everything set that a usual one has.
func sample(container string) *Attachment {
	return &Attachment{
		Network:     "cbr0",
		ContainerID: container,
		IfName:      "eth0",
		Pod:         "default/web-5d9c",
		NetNS:       "/run/netns/cni-3ab1",
		NetNSCookie: 4711,
		Created:     time.Date(2026, 1, 2, 3, 4, 5, 678901234, time.UTC),
		HostIf:      "veth" + ident.Hash("cbr0", container, "eth0"),
		Bridge:      "cbr0",
		MTU:         1500,
		MAC:         MAC{0x0a, 0x58, 0x0a, 1, 0, 5},
		HostMAC:     MAC{0x2e, 0x5f, 0, 0, 0, 1},
		Addresses: []ipam.Address{
			{Prefix: netip.MustParsePrefix("10.1.0.5/24"), Gateway: netip.MustParseAddr("10.1.0.1")},
			{Prefix: netip.MustParsePrefix("fd00:1::5/64"), Gateway: netip.MustParseAddr("fd00:1::1")},
		},
		Hairpin:    true,
		VLAN:       vlan.Membership{ID: 7, Trunk: vlan.Ranges{{First: 8, Last: 9}, {First: 12, Last: 12}}},
		Routes:     []route.Route{{Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.1.0.1"), Priority: 100, Protocol: route.ProtocolTombolo}},
		Up:         true,
		Masquerade: true,
		Guard:      nft.GuardAddresses,
		Published: []Published{
			{Port: nft.Port{Protocol: nft.TCP, HostPort: 8080, PodPort: 80}},
			{Port: nft.Port{Protocol: nft.UDP, HostAddr: netip.MustParseAddr("fd00::9"), HostPort: 53, PodPort: 5353}},
		},
		PortSNAT:  nft.SNATAll,
		Bandwidth: bandwidth.Shape{Ingress: bandwidth.Limit{Rate: 1e7, Burst: 2e6}, Egress: bandwidth.Limit{Rate: 3e7, Burst: 4e6}},
		IFB:       "ifb0123456789a",
		IPAMType:  "host-local",
		DataDir:   "/run/tombolo/ipam",
	}
}

func sampleNetwork(name string) *Network {
	yes, no := true, false
	return &Network{
		Name:       name,
		Epoch:      "a59bef75-6922-4ab4-8416-46a500e25de5/00112233445566778899aabbccddeeff",
		ConfigHash: "f00ba4",
		Bridge:     name,
		MTU:        1500,
		Gateways:   []netip.Prefix{netip.MustParsePrefix("10.1.0.1/24"), netip.MustParsePrefix("fd00:1::1/64")},
		Subnets:    []netip.Prefix{netip.MustParsePrefix("10.1.0.0/24"), netip.MustParsePrefix("fd00:1::/64")},
		Pools:      []ipam.RangeSet{{Ranges: []ipam.Range{{Subnet: netip.MustParsePrefix("10.1.0.0/24"), RangeStart: netip.MustParseAddr("10.1.0.9")}}}}, PoolDir: "/var/lib/cni/networks",
		Masquerade: true, NonMasquerade: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")},
		Policy: nft.Isolated, Guard: true, Mark: 0x1000, NFCall: &yes, Promiscuous: &no,
		GatewayUses: []GatewayUse{{Gateway: netip.MustParsePrefix("10.1.0.1/24"), Attachment: "0123456789a"}},
	}
}

func create(t testing.TB, d *Dir, a *Attachment) {
	t.Helper()
	must.Succeed(t, pending(t, d, a).Close())
}

// pending is the record of an ADD at work.
func pending(t testing.TB, d *Dir, a *Attachment) *Pending {
	t.Helper()
	return must.Of(d.Create(a)).Get(t)
}

func recordPath(t testing.TB, d *Dir, a *Attachment) string {
	t.Helper()
	return must.Of(d.attachmentPath(a.Network, a.Hash())).Get(t)
}

func lock(t testing.TB, d *Dir, mode Mode) *Lock {
	t.Helper()
	l := must.Of(d.Lock(t.Context(), mode)).Get(t)
	t.Cleanup(func() { l.Close() })
	return l
}

func canceled() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

func writeFile(t testing.TB, path, content string) {
	t.Helper()
	must.Succeed(t, os.MkdirAll(filepath.Dir(path), 0o700))
	must.Succeed(t, os.WriteFile(path, []byte(content), 0o600))
}

func mustRead(t testing.TB, path string) string {
	t.Helper()
	data := must.Of(os.ReadFile(path)).Get(t)
	return string(data)
}

// A process is a helper that runs.
type process struct {
	t     testing.TB
	cmd   *exec.Cmd
	stdin io.Closer
	lines *bufio.Reader
}

// start starts a helper, on the calling thread and so in its namespaces.
func start(t testing.TB, attributes *syscall.SysProcAttr, name string, args ...string) *process {
	t.Helper()
	exe := must.Of(os.Executable()).Get(t)
	cmd := exec.Command(exe, args...)
	cmd.Env = append(os.Environ(), helperVariable+"="+name)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = attributes
	stdin := must.Of(cmd.StdinPipe()).Get(t)
	stdout := must.Of(cmd.StdoutPipe()).Get(t)
	must.Succeed(t, cmd.Start())
	p := &process{t: t, cmd: cmd, stdin: stdin, lines: bufio.NewReader(stdout)}
	t.Cleanup(p.kill)
	return p
}

func (p *process) line() string {
	p.t.Helper()
	line := must.Of(p.lines.ReadString('\n')).Get(p.t, "helper")
	return strings.TrimSuffix(line, "\n")
}

// expect fails the test unless the helper prints that next.
func (p *process) expect(want string) {
	p.t.Helper()
	got := p.line()
	must.That(p.t, got == want, "helper says %q, want %q", got, want)
}

// proceed ends the helper's input, which is its sign to go on.
func (p *process) proceed() { p.stdin.Close() }

// kill ends the helper as a SIGKILL does, and waits for its end.
func (p *process) kill() {
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

func (p *process) finish() {
	p.t.Helper()
	p.proceed()
	must.Succeed(p.t, p.cmd.Wait(), "helper")
}

func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to make namespaces and mounts")
	}
}

// inNewNetNS runs a function on a thread in a network namespace of its own; the
// thread ends with it.
func inNewNetNS(t testing.TB, run func()) {
	t.Helper()
	needRoot(t)
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked, so that the thread dies
		defer close(done)
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		run()
	}()
	must.Succeed(t, <-done)
}
