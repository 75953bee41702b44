package bridge

import (
	"errors"
	"io/fs"
	"strconv"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
)

// parameter is an IPv6 sysctl of a link (net.ipv6.conf.LINK.NAME) with its expected value. Netlink reports all such
// sysctls of a link at once, by index. They are set one by one in /proc/sys, by name.
type parameter struct {
	name  string
	index int // DEVCONF_* of include/uapi/linux/ipv6.h
	want  int32
}

func (p parameter) value() string { return strconv.Itoa(int(p.want)) }

// Numbers of enum IPV4_DEVCONF_* in include/uapi/linux/ip.h.
const (
	ipv4ConfARPNotify     = 22 // IPV4_DEVCONF_ARP_NOTIFY
	ipv4ConfRPFilter      = 8  // IPV4_DEVCONF_RP_FILTER
	ipv4ConfRouteLocalnet = 26 // IPV4_DEVCONF_ROUTE_LOCALNET
)

// raSysctls returns the sysctls that make a pod with Autoconf accept router advertisements, together with the kernel's
// default values. The last one, accept_ra, enables the reception.
func (p *Port) raSysctls() []raSysctl {
	// A pod accepts routes from advertisements only to prefixes of certain lengths. Thread border routers advertise
	// routes to prefixes of 64 bits, so 64 is the maximum. Without DefaultRoute the minimum is 48, the length of a
	// site's prefix, so that no advertised route replaces a route that the caller has added.
	router, shortest := int32(1), int32(0)
	if !p.Autoconf.DefaultRoute {
		router, shortest = 0, 48
	}

	var dad int32

	if p.DAD {
		dad = 1
	}

	return []raSysctl{
		{parameter: parameter{"autoconf", 5, 1}, initial: 1, forms: true},
		// The value -1 repeats solicitations until a router answers.
		{parameter: parameter{"router_solicitations", 7, -1}, initial: -1, asks: true, forms: true},
		{parameter: parameter{"use_tempaddr", 10, 0}},
		{parameter: parameter{"accept_ra_defrtr", 17, router}, initial: 1},
		{parameter: parameter{"accept_ra_pinfo", 18, 1}, initial: 1, forms: true},
		{parameter: parameter{"accept_dad", 27, dad}, initial: 1},
		{parameter: parameter{"accept_ra_rt_info_min_plen", 49, shortest}},
		{parameter: parameter{"accept_ra_rt_info_max_plen", 21, 64}},
		// The value 2 accepts advertisements even if the pod forwards packets.
		{parameter: parameter{"accept_ra", 3, 2}, initial: 1, asks: true, forms: true},
	}
}

// raSysctl is a sysctl together with its value in a new network namespace. If the value is 0 and asks is set,
// the kernel sends no router solicitations. If the value is 0 and forms is set, the kernel forms no addresses.
type raSysctl struct {
	parameter
	initial     int32
	asks, forms bool
}

// The host's end of a veth pair is meant to be only a port of a bridge. But some frames reach the host's own IP stack
// directly from the port, so rules that name the bridge do not match them. These are frames to link-local groups
// (01:80:c2:00:00:00 to :0f), and all frames if the port was removed from its bridge. Firewall rules drop the frames
// to link-local groups (nft.Network's Groups).
//
// The following sysctls protect the host even if someone flushes the rules. With rp_filter (RFC 3704), the kernel
// drops all IPv4 packets, since no route leads to this port. The exception is packets with source 0.0.0.0 and
// destination 255.255.255.255, as DHCP clients send. With accept_ra 0, it ignores router advertisements. With
// drop_unicast_in_l2_multicast, it drops IPv6 packets with a unicast destination inside multicast frames. The sysctl
// disable_ipv6 would stop all IPv6, but writing it takes the kernel's global lock for links (RTNL).

// hostEndIPv4 returns the IPv4 sysctls of the host's end of a veth pair. Netlink can set them.
func hostEndIPv4() []link.Parameter { return []link.Parameter{{ID: ipv4ConfRPFilter, Value: 1}} }

// hostEndIPv6 returns the IPv6 sysctls of the host's end of a veth pair, which netlink cannot set.
func hostEndIPv6() [2]parameter { return [...]parameter{acceptRA(), dropUnicast()} }

func acceptRA() parameter    { return parameter{"accept_ra", 3, 0} }
func dropUnicast() parameter { return parameter{"drop_unicast_in_l2_multicast", 40, 1} }

// refuseIPv6 sets the sysctls of hostEndIPv6 for a port. It skips sysctls that do not exist, because the kernel has
// no IPv6 or the port's MTU is too small for IPv6. It also skips them if /proc/sys is read-only. In that case, only
// firewall rules protect the host.
func (c *Conn) refuseIPv6(port string) error {
	dir, err := c.hostIPv6()
	if err != nil || dir == nil {
		return err
	}
	for _, p := range hostEndIPv6() {
		if err := dir.Prefer(port+"/"+p.name, p.value()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// hostIPv6 returns the directory net/ipv6/conf of the bridges' network namespace, or nil if the kernel has no IPv6.
// The Conn keeps the directory open for the next port.
func (c *Conn) hostIPv6() (*sysctl.Dir, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ipv6 != nil {
		return c.ipv6, nil
	}

	err := c.nl.Within(func() error {
		var err error
		c.ipv6, err = sysctl.OpenDir("net/ipv6/conf")
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}

	return c.ipv6, err
}
