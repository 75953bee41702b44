package uplink_test

import (
	"errors"
	"io/fs"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// socket opens one in the host's namespace, until the test ends.
func (l *lan) socket(t *testing.T, family, typ, proto int, set func(fd, link int) error) {
	t.Helper()
	within(t, l.host, func() error {
		fd, err := unix.Socket(family, typ|unix.SOCK_CLOEXEC, proto)
		if err != nil {
			return err
		}
		t.Cleanup(func() { unix.Close(fd) })
		return set(fd, nstest.Index(t, l.host, "eth0"))
	})
}

func TestSnapshotFindsWhatDependsOnTheNIC(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	l.socket(t, unix.AF_INET, unix.SOCK_DGRAM, 0, func(fd, link int) error {
		return unix.SetsockoptIPMreqn(fd, unix.IPPROTO_IP, unix.IP_ADD_MEMBERSHIP, &unix.IPMreqn{Multiaddr: netip.MustParseAddr("224.0.0.251").As4(), Ifindex: int32(link)})
	})
	l.socket(t, unix.AF_INET6, unix.SOCK_DGRAM, 0, func(fd, link int) error {
		return unix.SetsockoptIPv6Mreq(fd, unix.IPPROTO_IPV6, unix.IPV6_JOIN_GROUP, &unix.IPv6Mreq{Multiaddr: netip.MustParseAddr("ff02::fb").As16(), Interface: uint32(link)})
	})
	run(t, l.host, "link add mv0 link eth0 type macvlan")

	s := must.Of(l.conn.Snapshot(t.Context(), "eth0", "br0")).Get(t)
	want := []netip.Addr{nstest.Addr("224.0.0.251"), nstest.Addr("ff02::fb")}
	expect.That(t, slices.Equal(s.Groups, want), "groups: %v, want %v", s.Groups, want)
	if _, err := uplink.Plan(s, toBridge()); !errors.Is(err, uplink.ErrRefused) || !strings.Contains(err.Error(), "mv0, of kind macvlan, rests on eth0") {
		t.Errorf("plan: %v", err)
	}
	// It is right to refuse: the kernel does.
	run(t, l.host, "link add br0 type bridge")
	expect.Failure(t, expect.Err(nstest.Try(l.host, "ip", "link", "set", "eth0", "master", "br0")),
		"the kernel makes a NIC with a macvlan a port")
	var j memory
	if _, err := l.conn.Take(t.Context(), toBridge(), &j); !errors.Is(err, uplink.ErrRefused) || j.saves > 0 {
		t.Errorf("take: %v, after %d saves; want %v after none", err, j.saves, uplink.ErrRefused)
	}
}

func TestThereIsNoSnapshotWithoutANIC(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	expect.Is(t, expect.Err(l.conn.Snapshot(t.Context(), "eth7", "br0")), fs.ErrNotExist, "snapshot")
	_, err := l.conn.Take(t.Context(), uplink.Uplink{NIC: "eth7", Bridge: "br0"}, &memory{})
	expect.That(t, errors.Is(err, fs.ErrNotExist), "take: %v, want %v", err, fs.ErrNotExist)
}

func TestANewLeaseReplacesTheKeptAddressOfTheOld(t *testing.T) {
	t.Parallel()
	l := newLAN(t, "addr add 10.0.0.5/24 dev eth0 valid_lft 3600 preferred_lft 3600", "route add default via 10.0.0.1")
	u := toBridge()
	u.KeepAddress = true
	rec, j := take(t, l, u)
	// As a DHCP client does it.
	run(t, l.host, "addr del 10.0.0.5/24 dev br0", "addr add 10.0.0.55/24 dev br0", "route replace default via 10.0.0.1")
	changed, err := l.conn.Mend(t.Context(), rec, j)
	must.That(t, changed && err == nil, "mend: %t, %v", changed, err)
	l.mustBeTaken(t, "mended", rec)
	for _, dev := range []string{"eth0", "br0"} {
		shown := nstest.Run(t, l.host, "ip", "addr", "show", "dev", dev)
		expect.That(t, !strings.Contains(shown, "10.0.0.5/"), "%s has the old address:\n%s", dev, shown)
	}
}

// The MTU of a bridge is the lowest of its ports' unless it is pinned. The host's own
// must not follow that of a pod.
func TestAPortWithASmallerMTUDoesNotLowerTheBridges(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	mtus := map[string]string{}
	note := func(when string) {
		shown := strings.Fields(nstest.Run(t, l.host, "ip", "-o", "link", "show", "br0"))
		mtus[when] = shown[slices.Index(shown, "mtu")+1]
	}
	rec, j := take(t, l, toBridge())
	note("taken")
	run(t, l.host, "link add pod0 mtu 1400 type veth peer name pod1 mtu 1400", "link set pod0 master br0")
	note("with a pod's port")
	run(t, l.host, "link set eth0 nomaster")
	must.Succeed(t, expect.Err(l.conn.Mend(t.Context(), rec, j)))
	note("mended")
	expect.NoDiff(t, cmp.Diff(map[string]string{"taken": "1500", "with a pod's port": "1500", "mended": "1500"}, mtus),
		"the bridge's MTU")
}
