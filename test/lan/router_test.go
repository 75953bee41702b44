package lan

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// dhcp is the router's server.
type dhcp struct {
	*lan
	*nstest.Dnsmasq
}

// serving has dnsmasq grant leases and advertise the router and the LAN's prefix.
func serving(more ...string) []string {
	return append([]string{"--dhcp-range=192.168.50.100,192.168.50.200,1h", "--enable-ra", "--dhcp-range=fd50::,ra-only,64,1h"}, more...)
}

func (l *lan) dnsmasq() *dhcp {
	l.Helper()
	d := &dhcp{l, nstest.NewDnsmasq(l, l.router.ns, nic, serving()...)}
	d.advertises()
	return d
}

// start runs the server again, with more options than it always has.
func (d *dhcp) start(more ...string) {
	d.Helper()
	d.Start(serving(more...)...)
	d.advertises()
}

func (d *dhcp) advertises() {
	d.Helper()
	must.Until(d, "dnsmasq serves", func() bool { return strings.Contains(d.Logged(), "IPv6 router advertisement enabled") })
}

// forgets waits until the server has no lease of an address, or of a MAC: nobody answers
// a release.
func (d *dhcp) forgets(who string) {
	d.Helper()
	must.Until(d, "the server ends the lease of "+who, func() bool {
		return !slices.ContainsFunc(strings.Fields(d.Leased()), func(field string) bool { return field == who })
	})
}

func writeFile(t testing.TB, path, text string) {
	t.Helper()
	must.Succeed(t, os.WriteFile(path, []byte(text), 0o600))
}

// solicit asks routers to advertise themselves, as a machine does whose link has come
// up (RFC 4861, 4.1).
func (l *lan) solicit(link string) {
	l.Helper()
	index := nstest.Index(l, l.host.ns, link)
	must.Succeed(l, l.host.ns.Do(func() error {
		// The kernel fills in the checksum.
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6)
		if err != nil {
			return err
		}
		const solicitation = 133
		allRouters := &unix.SockaddrInet6{Addr: nstest.Addr("ff02::2").As16(), ZoneId: uint32(index)}
		return errors.Join(
			unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS, 255),
			unix.Sendto(fd, []byte{solicitation, 7: 0}, 0, allRouters),
			unix.Close(fd))
	}))
}
