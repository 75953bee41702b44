package sockdiag

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func TestMain(m *testing.M) {
	if os.Getenv(monitorVar) != "" {
		os.Stdout.WriteString("1")
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}
	nstest.Main(m)
}

func dial(tb testing.TB, ns *netns.NS) *Conn {
	tb.Helper()
	c, err := Dial(&Config{NetNS: ns})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { c.Close() })
	return c
}

// dialRecorded gives a Conn to a real kernel that fails as the test says, and what
// passes over the connection.
func dialRecorded(tb testing.TB, ns *netns.NS, faults ...*nltest.Fault) (*Conn, *nltest.Recorder) {
	tb.Helper()
	t, err := nl.Open(unix.NETLINK_SOCK_DIAG, &nl.Config{NetNS: ns})
	if err != nil {
		tb.Fatal(err)
	}
	rec := nltest.Record(nltest.NewFaulty(t, faults...))
	c := &Conn{nl: nl.New(rec)}
	tb.Cleanup(func() { c.Close() })
	nltest.MustHaveFired(tb, faults...)
	return c, rec
}

// noModule makes a kernel that has no module for any protocol.
func noModule() *nltest.Fault {
	return &nltest.Fault{Type: unix.SOCK_DIAG_BY_FAMILY, Errno: unix.ENOENT}
}

func mustList(tb testing.TB, c *Conn, wants ...Want) []Socket {
	tb.Helper()
	list, err := c.Listeners(context.Background(), wants)
	if err != nil {
		tb.Fatal(err)
	}
	return list
}

// wantSockets compares sockets by what String says of them.
func wantSockets(tb testing.TB, got []Socket, want ...string) {
	tb.Helper()
	var names []string
	for _, s := range got {
		names = append(names, s.String())
	}
	if diff := cmp.Diff(want, names, cmpopts.EquateEmpty()); diff != "" {
		tb.Errorf("sockets (-want +got):\n%s", diff)
	}
}

// kind is how a test opens a socket.
type kind struct {
	proto  int // unix.IPPROTO_TCP or _UDP
	at     string
	v6     bool // an IPv6 socket, whatever the address
	v6only bool
	idle   bool   // bound, but does not listen
	peer   string // connected to
	link   string // bound to
	shared bool   // SO_REUSEADDR
}

// open opens a socket in a namespace until the test ends.
func open(tb testing.TB, ns *netns.NS, k kind) int {
	tb.Helper()
	fd, err := tryOpen(ns, k)
	if err != nil {
		tb.Fatalf("open %+v: %v", k, err)
	}
	tb.Cleanup(func() { unix.Close(fd) })
	return fd
}

func tryOpen(ns *netns.NS, k kind) (int, error) {
	at := netip.MustParseAddrPort(k.at)
	k.v6 = k.v6 || at.Addr().Is6()
	domain, typ := unix.AF_INET, unix.SOCK_STREAM
	if k.v6 {
		domain = unix.AF_INET6
	}
	if k.proto == unix.IPPROTO_UDP {
		typ = unix.SOCK_DGRAM
	}
	var fd int
	err := ns.Do(func() error {
		var err error
		fd, err = unix.Socket(domain, typ|unix.SOCK_CLOEXEC, k.proto)
		return err
	})
	if err != nil {
		return 0, err
	}
	if err := set(fd, k, at); err != nil {
		unix.Close(fd)
		return 0, err
	}
	return fd, nil
}

// tryBriefly opens a socket and closes it again. A child that is forked meanwhile
// would keep it open until it runs its program, so there is none.
func tryBriefly(ns *netns.NS, k kind) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	fd, err := tryOpen(ns, k)
	if err == nil {
		unix.Close(fd)
	}
	return err
}

func set(fd int, k kind, at netip.AddrPort) error {
	var errs []error
	if k.v6 {
		errs = append(errs, unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, boolInt(k.v6only)))
	}
	errs = append(errs, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, boolInt(k.shared)))
	if k.link != "" {
		errs = append(errs, unix.BindToDevice(fd, k.link))
	}
	if at.Port() != 0 {
		errs = append(errs, unix.Bind(fd, sockaddr(at, k.v6)))
	}
	if k.peer != "" {
		errs = append(errs, unix.Connect(fd, sockaddr(netip.MustParseAddrPort(k.peer), k.v6)))
	}
	if k.proto != unix.IPPROTO_UDP && !k.idle && k.peer == "" {
		errs = append(errs, unix.Listen(fd, 1))
	}
	return errors.Join(errs...)
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

func sockaddr(at netip.AddrPort, v6 bool) unix.Sockaddr {
	if v6 {
		return &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}
	}
	return &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
}

// newHost is a namespace whose loopback interface is up, and has further addresses.
func newHost(tb testing.TB) *netns.NS {
	tb.Helper()
	ns := nstest.New(tb)
	nstest.Run(tb, ns, "ip", "link", "set", "lo", "up")
	nstest.Run(tb, ns, "ip", "addr", "add", "10.0.0.1/32", "dev", "lo")
	nstest.Run(tb, ns, "ip", "addr", "add", "fd00::1/128", "dev", "lo", "nodad")
	return ns
}

// wanted parses "tcp *:80", "udp 10.0.0.1:80" or "tcp [::]:80".
func wanted(s string) Want {
	name, at, _ := strings.Cut(s, " ")
	w := Want{Proto: unix.IPPROTO_TCP}
	switch name {
	case "udp":
		w.Proto = unix.IPPROTO_UDP
	case "sctp":
		w.Proto = unix.IPPROTO_SCTP
	}
	if port, ok := strings.CutPrefix(at, "*:"); ok {
		w.Port = netip.MustParseAddrPort("0.0.0.0:" + port).Port()
		return w
	}
	parsed := netip.MustParseAddrPort(at)
	w.Addr, w.Port = parsed.Addr(), parsed.Port()
	return w
}
