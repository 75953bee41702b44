package uplink_test

import (
	"encoding/binary"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// advertise sends a router advertisement from a namespace's eth0 to all hosts: a
// default route, and a prefix for addresses of one's own (RFC 4861, sections 4.2 and
// 4.6.2), with lifetimes in seconds.
func advertise(tb testing.TB, ns *netns.NS, prefix netip.Prefix, router uint16, valid uint32) {
	tb.Helper()
	m := make([]byte, 16, 48)
	m[0], m[4] = 134, 64 // Router Advertisement, hop limit
	binary.BigEndian.PutUint16(m[6:], router)
	option := make([]byte, 32)
	option[0], option[1], option[2], option[3] = 3, 4, byte(prefix.Bits()), 0xc0 // on link, autonomous
	binary.BigEndian.PutUint32(option[4:], valid)
	binary.BigEndian.PutUint32(option[8:], valid/2)
	copy(option[16:], prefix.Addr().AsSlice())
	m = append(m, option...)
	within(tb, ns, func() error {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS, 255); err != nil {
			return err
		}
		link := uint32(nstest.Index(tb, ns, "eth0"))
		if err := unix.Bind(fd, &unix.SockaddrInet6{Addr: netip.MustParseAddr("fe80::1").As16(), ZoneId: link}); err != nil {
			return err
		}
		return unix.Sendto(fd, m, 0, &unix.SockaddrInet6{Addr: netip.MustParseAddr("ff02::1").As16(), ZoneId: link})
	})
}

// until repeats a look at the host until it shows what is wanted.
func until(tb testing.TB, what string, look func() (string, bool)) {
	tb.Helper()
	for begin := time.Now(); ; {
		shown, ok := look()
		if ok {
			return
		}
		must.That(tb, time.Since(begin) <= patience, "%s, in vain:\n%s", what, shown)
	}
}

// learner is a host that the kernel configures by router advertisements.
func learner(t *testing.T, settings ...string) *lan {
	t.Helper()
	l := newLAN(t, "link set eth0 up")
	nstest.Sysctl(t, l.host, "net/ipv6/conf/all/accept_dad", "0")
	for _, s := range append([]string{"net/ipv6/conf/eth0/accept_dad 0", "net/ipv6/conf/eth0/router_solicitations 0"}, settings...) {
		name, value, _ := strings.Cut(s, " ")
		nstest.Sysctl(t, l.host, name, value)
	}
	run(t, l.host, "addr add fe80::5/64 dev eth0")
	run(t, l.router, "addr add fd00:a::1/64 dev eth0 nodad")
	nstest.Sysctl(t, l.router, "net/ipv6/conf/all/forwarding", "1")
	settle(t, l.host)
	settle(t, l.router)
	l.learn(t, "eth0", 3600)
	return l
}

const learnt = "fd00:a::aff:fe00:5/64" // by hostMAC

// learn has the router advertise until the host's address and default route on a link
// show its lifetime: one that was on its way before may still arrive, and one that is
// sent may be dropped where nobody is listening yet.
func (l *lan) learn(t *testing.T, dev string, valid uint32) {
	t.Helper()
	until(t, "wait for the router to be followed", func() (string, bool) {
		advertise(t, l.router, netip.MustParsePrefix("fd00:a::/64"), 1800, valid)
		shown := nstest.Run(t, l.host, "ip", "-6", "addr", "show", "dev", dev) + nstest.Run(t, l.host, "ip", "-6", "route")
		return shown, l.follows(t, dev, valid)
	})
}

// follows says that the host has the address, with what the advertisement said but for
// some time that has passed, and the kernel's own default route.
func (l *lan) follows(t *testing.T, dev string, valid uint32) bool {
	t.Helper()
	left := l.left(t, dev)
	if strings.Contains(nstest.Run(t, l.host, "ip", "-6", "addr", "show", "dev", dev), "tentative") {
		return false
	}
	return left <= int(valid) && left > int(valid)-1000 &&
		strings.Contains(nstest.Run(t, l.host, "ip", "-6", "route"), "default via fe80::1 dev "+dev+" proto ra metric 1024")
}

// left gives for how many seconds the address on a link is valid, 0 if it is not there.
func (l *lan) left(t *testing.T, dev string) int {
	t.Helper()
	out := nstest.Run(t, l.host, "ip", "-o", "-6", "addr", "show", "dev", dev)
	m := regexp.MustCompile(regexp.QuoteMeta(learnt) + `.* valid_lft ([0-9]+)sec`).FindStringSubmatch(out)
	if m == nil {
		return 0
	}
	n, _ := strconv.Atoi(m[1])
	return n
}

func TestWhatRoutersSayCountsOnTheBridgeAndAfterwards(t *testing.T) {
	t.Parallel()
	for name, settings := range map[string][]string{
		"a host":               nil,
		"a host that forwards": {"net/ipv6/conf/eth0/accept_ra 2", "net/ipv6/conf/all/forwarding 1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := learner(t, settings...)
			before := nstest.Run(t, l.host, "ip", "-o", "-6", "addr", "show", "dev", "eth0")
			must.Succeed(t, nstest.Ping(t, l.host, nstest.Addr("2001:db8::1")))
			rec, j := take(t, l, toBridge())
			expect.Success(t, nstest.Ping(t, l.host, nstest.Addr("2001:db8::1")), "on the bridge")
			if left := l.left(t, "br0"); left == 0 || left > 3600 {
				t.Errorf("the address is valid for %d seconds on the bridge, want what was left of 3600", left)
			}
			l.learn(t, "br0", 7200)
			l.mustBeTaken(t, "after the router spoke again", rec)
			must.Succeed(t, l.conn.Restore(t.Context(), rec, j))
			expect.Success(t, nstest.Ping(t, l.host, nstest.Addr("2001:db8::1")), "after it was given back")
			if diff := cmp.Diff(normal(before), normal(nstest.Run(t, l.host, "ip", "-o", "-6", "addr", "show", "dev", "eth0"))); diff != "" {
				t.Errorf("addresses after it was given back (-want +got):\n%s", diff)
			}
			l.learn(t, "eth0", 9000)
		})
	}
}

func TestForwardingThatCameMeanwhileDoesNotStopRouters(t *testing.T) {
	t.Parallel()
	l := learner(t)
	rec, j := take(t, l, toBridge())
	// As one that sets up pods has to do it.
	nstest.Sysctl(t, l.host, "net/ipv6/conf/br0/accept_ra", "2")
	nstest.Sysctl(t, l.host, "net/ipv6/conf/all/forwarding", "1")
	l.learn(t, "br0", 7200)
	must.Succeed(t, l.conn.Restore(t.Context(), rec, j))
	got := nstest.Sysctl(t, l.host, "net/ipv6/conf/eth0/accept_ra")
	expect.That(t, got == "2", "accept_ra of the NIC is %s, want 2: the host forwards now", got)
	l.learn(t, "eth0", 9000)
}

// Why a default route that was learnt gets a priority of its own.
func TestKernelFollowsNoRouterWhoseRouteSomebodyElseAdded(t *testing.T) {
	t.Parallel()
	l := learner(t)
	run(t, l.host, "-6 route del default", "-6 route add default via fe80::1 dev eth0 proto ra metric 1024 expires 1800")
	for range 5 {
		advertise(t, l.router, netip.MustParsePrefix("fd00:a::/64"), 1800, 7200)
	}
	// Once the neighbour is confirmed by a ping, what was sent before has been handled.
	must.Succeed(t, nstest.Ping(t, l.host, nstest.Addr("2001:db8::1")))
	if left := l.left(t, "eth0"); left > 3600 {
		t.Errorf("the kernel follows the router (valid for %d s): a route need not be moved to another priority on this kernel", left)
	}
}
