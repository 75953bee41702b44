package sockdiag

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/golden"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// listening has a socket of each kind that receives from anybody.
func listening(proto int) map[string]kind {
	return map[string]kind{
		"any IPv4 address":            {proto: proto, at: "0.0.0.0:80"},
		"loopback":                    {proto: proto, at: "127.0.0.1:80"},
		"an IPv4 address":             {proto: proto, at: "10.0.0.1:80"},
		"any address":                 {proto: proto, at: "[::]:80"},
		"any IPv6 address":            {proto: proto, at: "[::]:80", v6only: true},
		"IPv6 loopback":               {proto: proto, at: "[::1]:80"},
		"an IPv6 address":             {proto: proto, at: "[fd00::1]:80"},
		"an IPv4 address, mapped":     {proto: proto, at: "[::ffff:10.0.0.1]:80"},
		"any IPv4 address, mapped":    {proto: proto, at: "[::ffff:0.0.0.0]:80"},
		"an IPv6 address, for itself": {proto: proto, at: "[fd00::1]:80", v6only: true},
	}
}

// TestASocketTakesAPortIfNoOtherCouldBeBoundToIt has the kernel's bind as its referee:
// it refuses a second socket exactly where the first takes some of what is wanted.
func TestASocketTakesAPortIfNoOtherCouldBeBoundToIt(t *testing.T) {
	t.Parallel()
	wants := map[string]kind{ // what to bind instead
		"*:80":           {at: "[::]:80"},
		"0.0.0.0:80":     {at: "0.0.0.0:80"},
		"[::]:80":        {at: "[::]:80", v6only: true},
		"127.0.0.1:80":   {at: "127.0.0.1:80"},
		"10.0.0.1:80":    {at: "10.0.0.1:80"},
		"[::1]:80":       {at: "[::1]:80"},
		"[fd00::1]:80":   {at: "[fd00::1]:80"},
		"*:81":           {at: "[::]:81"},
		"10.0.0.1:81":    {at: "10.0.0.1:81"},
		"[fd00::1]:8080": {at: "[fd00::1]:8080"},
	}
	for name, proto := range map[string]int{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP} {
		for what, k := range listening(proto) {
			t.Run(name+" at "+what, func(t *testing.T) {
				t.Parallel()
				ns := newHost(t)
				open(t, ns, k)
				c := dial(t, ns)
				for want, other := range wants {
					other.proto = proto
					err := tryBriefly(ns, other)
					if err != nil && !errors.Is(err, unix.EADDRINUSE) {
						t.Fatal(err)
					}
					got := mustList(t, c, wanted(name+" "+want))
					if taken := err != nil; taken != (len(got) == 1) {
						t.Errorf("%s: found %v, but binding it: %v", want, got, err)
					}
				}
			})
		}
	}
}

func TestSocketsThatDoNotListenDoNotCount(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		open []kind
		want string
	}{
		{"tcp that is bound only", []kind{{proto: unix.IPPROTO_TCP, at: "0.0.0.0:80", idle: true}}, "tcp *:80"},
		{"tcp that is bound only, IPv6", []kind{{proto: unix.IPPROTO_TCP, at: "[::]:80", idle: true}}, "tcp *:80"},
		{"udp that is connected", []kind{{proto: unix.IPPROTO_UDP, at: "0.0.0.0:5000", peer: "10.0.0.1:53"}}, "udp *:5000"},
		{"udp that is connected, IPv6", []kind{{proto: unix.IPPROTO_UDP, at: "[::]:5000", peer: "[fd00::1]:53"}}, "udp *:5000"},
		{"udp that is connected, mapped", []kind{{proto: unix.IPPROTO_UDP, at: "[::]:5000", peer: "[::ffff:10.0.0.1]:53"}}, "udp *:5000"},
		{"tcp connections", []kind{
			{proto: unix.IPPROTO_TCP, at: "127.0.0.1:80"},
			{proto: unix.IPPROTO_TCP, at: "127.0.0.1:5000", peer: "127.0.0.1:80"}}, "tcp *:5000"},
		{"udp where tcp is wanted", []kind{{proto: unix.IPPROTO_UDP, at: "0.0.0.0:80"}}, "tcp *:80"},
		{"tcp where udp is wanted", []kind{{proto: unix.IPPROTO_TCP, at: "0.0.0.0:80"}}, "udp *:80"},
		{"udp of a multicast group", []kind{{proto: unix.IPPROTO_UDP, at: "224.0.0.251:5353"}}, "udp *:5353"},
		{"udp of an IPv6 multicast group", []kind{{proto: unix.IPPROTO_UDP, at: "[ff05::fb]:5353"}}, "udp [::]:5353"},
		{"udp of broadcasts", []kind{{proto: unix.IPPROTO_UDP, at: "255.255.255.255:67"}}, "udp *:67"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ns := newHost(t)
			for _, k := range tc.open {
				open(t, ns, k)
			}
			wantSockets(t, mustList(t, dial(t, ns), wanted(tc.want)))
		})
	}
}

func TestConnectionsOfAClosedListenerDoNotCount(t *testing.T) {
	t.Parallel()
	ns := newHost(t)
	c := dial(t, ns)
	syscall.ForkLock.RLock() // until it is closed: see tryBriefly
	listener, err := tryOpen(ns, kind{proto: unix.IPPROTO_TCP, at: "127.0.0.1:80"})
	if err != nil {
		syscall.ForkLock.RUnlock()
		t.Fatal(err)
	}
	before, err := c.Listeners(context.Background(), []Want{wanted("tcp *:80")})
	client, err1 := tryOpen(ns, kind{proto: unix.IPPROTO_TCP, at: "127.0.0.1:0", peer: "127.0.0.1:80"})
	accepted, _, err2 := unix.Accept4(listener, unix.SOCK_CLOEXEC)
	unix.Close(listener)
	syscall.ForkLock.RUnlock()
	t.Cleanup(func() { unix.Close(client); unix.Close(accepted) })
	if err := errors.Join(err, err1, err2); err != nil {
		t.Fatal(err)
	}
	wantSockets(t, before, "127.0.0.1:80/tcp")
	if got := nstest.Run(t, ns, "ss", "-Htn", "sport", "=", ":80"); !strings.Contains(got, "ESTAB") {
		t.Fatalf("the connection is gone, so this test shows nothing: %q", got)
	}
	wantSockets(t, mustList(t, c, wanted("tcp *:80")))
}

func TestSocketsThatCountWithoutAServer(t *testing.T) {
	t.Parallel()
	ns := newHost(t)
	c := dial(t, ns)

	t.Run("a client of udp that does not connect", func(t *testing.T) {
		fd := open(t, ns, kind{proto: unix.IPPROTO_UDP, at: "0.0.0.0:0"})
		if err := unix.Sendto(fd, []byte("?"), 0, sockaddr(netip.MustParseAddrPort("10.0.0.1:53"), false)); err != nil {
			t.Fatal(err)
		}
		sa, err := unix.Getsockname(fd)
		if err != nil {
			t.Fatal(err)
		}
		port := sa.(*unix.SockaddrInet4).Port
		wantSockets(t, mustList(t, c, Want{Proto: unix.IPPROTO_UDP, Port: uint16(port)}), fmt.Sprintf("0.0.0.0:%d/udp", port))
	})
	t.Run("the kernel", func(t *testing.T) {
		nstest.Run(t, ns, "ip", "link", "add", "vx0", "type", "vxlan", "id", "7", "local", "10.0.0.1", "dev", "lo", "dstport", "4789")
		nstest.Run(t, ns, "ip", "link", "set", "vx0", "up")
		got := mustList(t, c, wanted("udp *:4789"))
		wantSockets(t, got, "0.0.0.0:4789/udp")
		if text := got[0].InUse(); !strings.HasPrefix(text, "0.0.0.0:4789/udp is in use by the kernel, or by a process that cannot be seen from here (user 0, socket ") {
			t.Error(text)
		}
	})
	t.Run("a socket of one link", func(t *testing.T) {
		open(t, ns, kind{proto: unix.IPPROTO_UDP, at: "127.0.0.53:53", link: "lo"})
		got := mustList(t, c, wanted("udp *:53"))
		wantSockets(t, got, "127.0.0.53:53/udp")
		if got[0].Link != 1 {
			t.Errorf("link %d, want 1", got[0].Link)
		}
	})
}

// TestListenersAreThoseOfSS opens everything that a busy host has, and compare with ss.
func TestListenersAreThoseOfSS(t *testing.T) {
	t.Parallel()
	ns := newHost(t)
	port := 8000
	var wants []Want
	for name, proto := range map[string]int{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP} {
		for _, k := range listening(proto) {
			port++
			k.at = strings.Replace(k.at, ":80", fmt.Sprintf(":%d", port), 1)
			open(t, ns, k)
			wants = append(wants, wanted(fmt.Sprintf("%s *:%d", name, port)))
		}
		// Two share a port.
		for range 2 {
			open(t, ns, kind{proto: proto, at: "10.0.0.1:7999", shared: true, idle: true})
		}
		wants = append(wants, wanted(name+" *:7999"))
		open(t, ns, kind{proto: proto, at: "127.0.0.1:7998", link: "lo"})
		wants = append(wants, wanted(name+" *:7998"))
	}
	wants = append(wants, wanted("tcp *:1"), wanted("udp *:1"), wanted("tcp *:8001"))
	c, rec := dialRecorded(t, ns)
	got := []string{}
	for _, s := range mustList(t, c, wants...) {
		got = append(got, fmt.Sprintf("%s %s uid:%d ino:%d", s.Local, protoName(s.Proto), s.UID, s.Inode))
	}
	slices.Sort(got)
	if diff := cmp.Diff(socketsOfSS(nstest.Run(t, ns, "ss", "-Hltune")), got); diff != "" {
		t.Errorf("sockets (-ss +got):\n%s", diff)
	}
	if n := len(rec.Sent()); n != 4 {
		t.Errorf("asked %d times, want once for each protocol and family", n)
	}
	if golden.Updates() {
		saveSeeds(t, rec.Received())
	}
	for _, s := range mustList(t, c, wants...) {
		// Another test's child would have it too, until it is another program.
		syscall.ForkLock.RLock()
		text := s.InUse()
		syscall.ForkLock.RUnlock()
		if want := fmt.Sprintf("%s is in use by %s (pid ", s, ownName(t)); !strings.HasPrefix(text, want) {
			t.Errorf("%q, want it to name this program", text)
		}
	}
}

// socketsOfSS reads the listing of ss, which prints [::] as * where it takes IPv4 too.
func socketsOfSS(listing string) []string {
	list := []string{}
	for line := range strings.Lines(listing) {
		f := strings.Fields(line)
		at := regexp.MustCompile(`%\w+`).ReplaceAllString(f[4], "")
		at = strings.Replace(at, "*:", "[::]:", 1)
		at = regexp.MustCompile(`\[::ffff:([\d.]+)\]`).ReplaceAllString(at, "$1")
		uid := "uid:0"
		if m := regexp.MustCompile(`uid:\d+`).FindString(line); m != "" {
			uid = m
		}
		list = append(list, fmt.Sprintf("%s %s %s %s", at, f[0], uid, regexp.MustCompile(`ino:\d+`).FindString(line)))
	}
	slices.Sort(list)
	return list
}

func ownName(tb testing.TB) string {
	tb.Helper()
	comm, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		tb.Fatal(err)
	}
	return strings.TrimSpace(string(comm))
}

func TestSocketOfAnotherUserIsTheirs(t *testing.T) {
	t.Parallel()
	ns := newHost(t)
	fd := open(t, ns, kind{proto: unix.IPPROTO_TCP, at: "0.0.0.0:80"})
	uid := uint32(101)
	if err := unix.Fchown(fd, 101, 101); errors.Is(err, unix.EINVAL) {
		uid = 0 // a user namespace that has root only
	} else if err != nil {
		t.Fatal(err)
	}
	got := mustList(t, dial(t, ns), wanted("tcp *:80"))
	wantSockets(t, got, "0.0.0.0:80/tcp")
	if got[0].UID != uid {
		t.Errorf("user %d, want %d", got[0].UID, uid)
	}
}

func TestSocketOfAnotherNamespaceIsNotSeen(t *testing.T) {
	t.Parallel()
	here, there := newHost(t), newHost(t)
	open(t, there, kind{proto: unix.IPPROTO_TCP, at: "0.0.0.0:80"})
	wantSockets(t, mustList(t, dial(t, here), wanted("tcp *:80")))
}

func TestConnOutlivesTheHandleThatItWasDialledWith(t *testing.T) {
	t.Parallel()
	ns := newHost(t)
	open(t, ns, kind{proto: unix.IPPROTO_TCP, at: "0.0.0.0:80"})
	again := reopen(t, ns)
	c := dial(t, again)
	again.Close()
	wantSockets(t, mustList(t, c, wanted("tcp *:80")), "0.0.0.0:80/tcp")
}

// reopen gives another handle to a namespace.
func reopen(tb testing.TB, ns *netns.NS) *netns.NS {
	tb.Helper()
	again, err := netns.Open(fmt.Sprintf("/proc/self/fd/%d", ns.FD()))
	if err != nil {
		tb.Fatal(err)
	}
	return again
}

func TestNoSocketIsFoundWhereTheKernelShowsNone(t *testing.T) {
	t.Parallel()
	ns := newHost(t)
	open(t, ns, kind{proto: unix.IPPROTO_TCP, at: "0.0.0.0:80"})
	withoutModule, _ := dialRecorded(t, ns, noModule())
	for _, c := range []*Conn{withoutModule, {}} {
		wantSockets(t, mustList(t, c, wanted("tcp *:80")))
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestKernelSendsNoConnections(t *testing.T) {
	t.Parallel()
	ns := newHost(t)
	open(t, ns, kind{proto: unix.IPPROTO_TCP, at: "10.0.0.1:80"})
	open(t, ns, kind{proto: unix.IPPROTO_TCP, at: "10.0.0.1:5000", peer: "10.0.0.1:80"})
	open(t, ns, kind{proto: unix.IPPROTO_UDP, at: "10.0.0.1:80"})
	c, rec := dialRecorded(t, ns)
	mustList(t, c, wanted("tcp *:80"))
	sent := 0
	for _, datagram := range rec.Received() {
		for _, m := range nltest.Split(datagram) {
			if m.Header.Type == unix.SOCK_DIAG_BY_FAMILY {
				sent++
			}
		}
	}
	if sent != 1 {
		t.Errorf("the kernel sent %d sockets, want the one that listens", sent)
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	ns := newHost(t)
	t.Run("of the kernel", func(t *testing.T) {
		c, _ := dialRecorded(t, ns, &nltest.Fault{Type: unix.SOCK_DIAG_BY_FAMILY, Errno: unix.EACCES})
		_, err := c.Listeners(ctx, []Want{wanted("tcp *:80")})
		if !errors.Is(err, unix.EACCES) || !strings.Contains(err.Error(), "list tcp sockets of IPv4 at port 80") {
			t.Errorf("%v, want %v and what was asked", err, unix.EACCES)
		}
	})
	t.Run("of what is wanted", func(t *testing.T) {
		for _, w := range []Want{{Proto: unix.IPPROTO_ICMP, Port: 80}, {Port: 80}, {Proto: unix.IPPROTO_TCP}} {
			c, rec := dialRecorded(t, ns)
			if _, err := c.Listeners(ctx, []Want{wanted("tcp *:80"), w}); err == nil || !strings.Contains(err.Error(), w.String()) {
				t.Errorf("%s: %v, want an error that names it", w, err)
			}
			if len(rec.Sent()) > 0 {
				t.Errorf("%s: the kernel was asked nevertheless", w)
			}
		}
	})
	t.Run("no time left", func(t *testing.T) {
		over, cancel := context.WithCancel(ctx)
		cancel()
		if _, err := dial(t, ns).Listeners(over, []Want{wanted("tcp *:80")}); !errors.Is(err, context.Canceled) {
			t.Errorf("%v, want %v", err, context.Canceled)
		}
	})
	t.Run("closed namespace", func(t *testing.T) {
		gone := nstest.New(t)
		again := reopen(t, gone)
		again.Close()
		if _, err := Dial(&Config{NetNS: again}); err == nil {
			t.Error("dialled into a namespace whose handle is closed")
		}
	})
	t.Run("closed", func(t *testing.T) {
		c, err := Dial(nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Listeners(ctx, []Want{wanted("tcp *:80")}); !errors.Is(err, unix.EBADF) {
			t.Errorf("%v, want %v", err, unix.EBADF)
		}
	})
}

// TestSCTPIsFoundWhereTheKernelHasIt asks for nothing more than no error of a kernel
// that has none. What one with it sends is in TestSocketsOfSCTP as well.
func TestSCTPIsFoundWhereTheKernelHasIt(t *testing.T) {
	t.Parallel()
	ns := newHost(t)
	c := dial(t, ns)
	for _, tc := range []struct{ at, found string }{{"10.0.0.1:80", "10.0.0.1:80/sctp"}, {"[::]:81", "[::]:81/sctp"}, {"0.0.0.0:82", "0.0.0.0:82/sctp"}} {
		fd, err := tryOpen(ns, kind{proto: unix.IPPROTO_SCTP, at: tc.at})
		if errors.Is(err, unix.EPROTONOSUPPORT) {
			t.Log("this kernel has no SCTP")
			wantSockets(t, mustList(t, c, wanted("sctp *:80")))
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		port := netip.MustParseAddrPort(tc.at).Port()
		wantSockets(t, mustList(t, c, Want{Proto: unix.IPPROTO_SCTP, Port: port}, Want{Proto: unix.IPPROTO_SCTP, Port: 9}), tc.found)
		wantSockets(t, mustList(t, c, Want{Proto: unix.IPPROTO_SCTP, Port: port}), tc.found)
		wantSockets(t, mustList(t, c, Want{Proto: unix.IPPROTO_SCTP, Port: port, Addr: nstest.Addr("fd00::1")}), map[bool][]string{true: {tc.found}}[strings.Contains(tc.at, "[")]...)
	}
}

func TestSCTPIsNothingWithoutItsModule(t *testing.T) {
	t.Parallel()
	c, _ := dialRecorded(t, newHost(t), noModule())
	wantSockets(t, mustList(t, c, wanted("sctp *:80")))
}

func TestSocketsOfSCTP(t *testing.T) {
	t.Parallel()
	// One endpoint with an address of each family, which no kernel of ours can open.
	fake := nltest.NewFake(func(requests []netlink.Message) [][]byte {
		r := requests[0]
		if r.Data[0] != unix.AF_INET6 {
			return [][]byte{nltest.Done(r, 0)}
		}
		one := message(unix.AF_INET6, stateListen, 80, "::", nltest.Body(nil, func(ae *netlink.AttributeEncoder) {
			ae.Uint8(attrV6Only, 0)
			ae.Bytes(attrLocals, append(storage("10.0.0.1"), storage("fd00::1")...))
		}))
		other := message(unix.AF_INET6, stateListen, 81, "::", nltest.Body(nil, func(ae *netlink.AttributeEncoder) {
			ae.Bytes(attrLocals, storage("::"))
		}))
		association := message(unix.AF_INET6, 1, 80, "fd00::1", nil)
		return [][]byte{
			nltest.Reply(r, unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_MULTI, one), nltest.Reply(r, unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_MULTI, other),
			nltest.Reply(r, unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_MULTI, association), nltest.Done(r, 0),
		}
	})
	c := &Conn{nl: nl.New(fake)}
	wantSockets(t, mustList(t, c, wanted("sctp *:80")), "10.0.0.1:80/sctp", "[fd00::1]:80/sctp")
	wantSockets(t, mustList(t, c, wanted("sctp 10.0.0.1:80")), "10.0.0.1:80/sctp")
	wantSockets(t, mustList(t, c, wanted("sctp 10.0.0.2:80")))
	wantSockets(t, mustList(t, c, wanted("sctp 10.0.0.2:81")), "[::]:81/sctp")
}
