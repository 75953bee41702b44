package uplink_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network/internal/uplink"
)

func TestMain(m *testing.M) {
	// The test binary is its own helper: see kill_test.go.
	if os.Getenv(helperVariable) != "" {
		os.Exit(helper())
	}
	nstest.Main(m)
}

// lan is a host, whose NIC is to be taken over, and a router at the other end of
// its cable.
type lan struct {
	host, router *netns.NS
	conn         conn
}

// conn is a Conn whose methods are called in the host's namespace.
type conn struct {
	*uplink.Conn
	ns *netns.NS
}

func (c conn) Take(ctx context.Context, u uplink.Uplink, j uplink.Journal) (rec *uplink.Record, err error) {
	err = c.ns.Do(func() error { rec, err = c.Conn.Take(ctx, u, j); return err })
	return rec, err
}

func (c conn) Restore(ctx context.Context, rec *uplink.Record, j uplink.Journal) error {
	return c.ns.Do(func() error { return c.Conn.Restore(ctx, rec, j) })
}

// through returns a Conn whose requests to the kernel have faults.
func (l *lan) through(tb testing.TB, faults ...*nltest.Fault) conn {
	tb.Helper()
	transport := must.Of(nl.Open(unix.NETLINK_ROUTE, l.host)).Get(tb)
	socket := nl.New(nltest.NewFaulty(transport, faults...))
	tb.Cleanup(func() { socket.Close() })
	return conn{uplink.On(socket), l.host}
}

const (
	hostMAC   = "02:00:0a:00:00:05"
	routerMAC = "02:00:0a:00:00:01"
)

// newLAN gives the host 10.0.0.5 and fd00::5, and the router 10.0.0.1 and fd00::1, and
// fe80::1 for default routes that are learnt. Behind the router is 192.0.2.1 and
// 2001:db8::1, to which the host has default routes unless commands are given in their
// place. Those are ip-route(8)'s and the like, for the host.
func newLAN(tb testing.TB, commands ...string) *lan {
	tb.Helper()
	l := &lan{host: nstest.New(tb), router: nstest.New(tb)}
	nstest.Veth(tb, l.host, "eth0", l.router, "eth0")
	for _, ns := range []*netns.NS{l.host, l.router} {
		nstest.Run(tb, ns, "ip", "link", "set", "lo", "up")
	}
	run(tb, l.router, "link set eth0 address "+routerMAC, "addr add 10.0.0.1/24 dev eth0",
		"addr add fd00::1/64 dev eth0 nodad", "addr add fe80::1/64 dev eth0 nodad",
		// Others on the LAN, so that nothing waits for a machine that is not there.
		"addr add 10.0.0.2/24 dev eth0", "addr add 10.0.0.3/24 dev eth0", "addr add 10.0.0.9/24 dev eth0", "addr add fd00::2/64 dev eth0 nodad",
		"addr add 192.0.2.1/32 dev lo", "addr add 2001:db8::1/128 dev lo nodad")
	run(tb, l.host, "link set eth0 address "+hostMAC)
	if len(commands) == 0 {
		commands = plainHost()
	}
	run(tb, l.host, commands...)
	settle(tb, l.host)
	settle(tb, l.router)
	l.conn = l.through(tb)
	return l
}

// settle waits until the kernel's workers have added the local route of each IPv6
// address, and that of multicast for each link whose carrier they have taken note of.
func settle(tb testing.TB, ns *netns.NS) {
	tb.Helper()
	for begin := time.Now(); ; {
		var missing []string
		local := nstest.Run(tb, ns, "ip", "-6", "route", "show", "table", "local")
		for _, m := range regexp.MustCompile(`(?m)^[0-9]+: ([^:@]+)\S*: <.*\bMULTICAST\b.*\bLOWER_UP\b.*>`).FindAllStringSubmatch(nstest.Run(tb, ns, "ip", "-o", "link", "show", "up"), -1) {
			if !strings.Contains(local, "multicast ff00::/8 dev "+m[1]+" ") {
				missing = append(missing, "multicast by "+m[1])
			}
		}
		for _, m := range regexp.MustCompile(`inet6 ([0-9a-f:]+)`).FindAllStringSubmatch(nstest.Run(tb, ns, "ip", "-6", "-o", "addr", "show", "up"), -1) {
			if !strings.Contains(local, "local "+m[1]+" ") {
				missing = append(missing, m[1])
			}
		}
		if len(missing) == 0 {
			return
		}
		must.That(tb, time.Since(begin) <= patience, "no local route of %v:\n%s", missing, local)
	}
}

func plainHost() []string {
	return []string{
		"addr add 10.0.0.5/24 brd + dev eth0", "addr add fd00::5/64 dev eth0 nodad", "addr add fe80::5/64 dev eth0 nodad",
		"route add default via 10.0.0.1", "-6 route add default via fd00::1",
	}
}

// patience is for tests that would otherwise hang: far more than any machine needs.
const patience = time.Minute

func within(tb testing.TB, ns *netns.NS, fn func() error) {
	tb.Helper()
	must.Succeed(tb, ns.Do(fn))
}

func run(tb testing.TB, ns *netns.NS, commands ...string) {
	tb.Helper()
	for _, command := range commands {
		if command == "settle" {
			settle(tb, ns)
			continue
		}
		nstest.Run(tb, ns, "ip", strings.Fields(command)...)
	}
}

func toBridge() uplink.Uplink {
	return uplink.Uplink{NIC: "eth0", Bridge: "br0", Alias: "test"}
}

// memory is a journal.
type memory struct {
	mu     sync.Mutex
	record []byte
	saves  int
	// onSave, if set, may refuse.
	onSave func(n int) error
}

func (m *memory) Save(b []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.saves++
	if m.onSave != nil {
		if err := m.onSave(m.saves); err != nil {
			return err
		}
	}
	m.record = slices.Clone(b)
	return nil
}

func (m *memory) Remove() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.record = nil
	return nil
}

func (m *memory) load() ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.record == nil {
		return nil, errors.New("no record")
	}
	return m.record, nil
}

func take(tb testing.TB, l *lan, u uplink.Uplink) (*uplink.Record, *memory) {
	tb.Helper()
	var j memory
	rec := must.Of(l.conn.Take(tb.Context(), u, &j)).Get(tb)
	return rec, &j
}

// state is what iproute2 says of all of a namespace, as far as it is configuration:
// without what runs out, what is learnt, and the numbers that a new link gets.
func state(tb testing.TB, ns *netns.NS) string {
	tb.Helper()
	var b strings.Builder
	for _, args := range []string{
		"-d addr show", "-4 route show table all", "-6 route show table all", "-4 rule", "-6 rule",
		"neigh show nud permanent", "neigh show proxy", "-6 neigh show proxy",
	} {
		fmt.Fprintf(&b, "# ip %s\n%s", args, normal(nstest.Run(tb, ns, "ip", strings.Fields(args)...)))
	}
	return b.String()
}

func normal(out string) string {
	for _, r := range []struct{ from, to string }{
		{`[0-9]+sec`, "…sec"},
		{`expires [0-9]+`, "expires …"},
		{` linkdown`, ""},
		{`(?m)^[0-9]+: +(\S+) +inet`, "$1 inet"},
		{`(?m)^.*(qdisc|promiscuity|link/ether|link-netns).*$\n`, ""},
	} {
		out = regexp.MustCompile(r.from).ReplaceAllString(out, r.to)
	}
	var lines []string
	for line := range strings.Lines(out) {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}
	return strings.Join(lines, "\n") + "\n"
}
