package bridge

import (
	"errors"
	"io/fs"
	"strconv"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
)

// parameter is a kernel parameter of a link (net.ipv6.conf.<link>.<name>) with its expected value. Netlink reports
// all parameters of a link at once, by index. /proc sets them one by one, by name.
type parameter struct {
	name  string
	index int // DEVCONF_* of include/uapi/linux/ipv6.h
	want  int32
}

func (p parameter) value() string { return strconv.Itoa(int(p.want)) }

// Constants of enum IPV4_DEVCONF_* of include/uapi/linux/ip.h.
const (
	ipv4ConfARPNotify     = 22 // IPV4_DEVCONF_ARP_NOTIFY
	ipv4ConfRPFilter      = 8  // IPV4_DEVCONF_RP_FILTER
	ipv4ConfRouteLocalnet = 26 // IPV4_DEVCONF_ROUTE_LOCALNET
)

// hearing returns the parameters that make a pod with Autoconf accept router advertisements, with the kernel's initial
// values. The last one admits the advertisements.
func (p *Port) hearing() []hearingParameter {
	// Thread border routers advertise networks of 64 bits. A pod without default routes accepts no prefixes shorter
	// than a site's, since these could replace the routes that the caller gave to the pod.
	router, shortest := int32(1), int32(0)
	if !p.Autoconf.DefaultRoute {
		router, shortest = 0, 48
	}

	var dad int32

	if p.DAD {
		dad = 1
	}

	return []hearingParameter{
		{parameter: parameter{"autoconf", 5, 1}, initial: 1, forms: true},
		// -1 repeats solicitations until one is answered.
		{parameter: parameter{"router_solicitations", 7, -1}, initial: -1, asks: true, forms: true},
		{parameter: parameter{"use_tempaddr", 10, 0}},
		{parameter: parameter{"accept_ra_defrtr", 17, router}, initial: 1},
		{parameter: parameter{"accept_ra_pinfo", 18, 1}, initial: 1, forms: true},
		{parameter: parameter{"accept_dad", 27, dad}, initial: 1},
		{parameter: parameter{"accept_ra_rt_info_min_plen", 49, shortest}},
		{parameter: parameter{"accept_ra_rt_info_max_plen", 21, 64}},
		// 2 accepts advertisements even if the pod forwards for others.
		{parameter: parameter{"accept_ra", 3, 2}, initial: 1, asks: true, forms: true},
	}
}

// hearingParameter is a parameter with its initial value in a new namespace. If the value is 0, the kernel does not ask
// for advertisements (if asks is set), or does not form addresses from them (if forms is set).
type hearingParameter struct {
	parameter
	initial     int32
	asks, forms bool
}

// The host's end of a veth pair is only a port of a bridge. But some frames reach the host's own IP stack from the
// port, and bypass every rule that names the bridge: frames to link-local groups (01:80:c2:00:00:00 to :0f), and all
// frames if the port was taken off its bridge. Firewall rules stop the former (nft.Network's Groups). The following
// parameters still protect the host when someone flushes the rules. With them the kernel drops IPv4 from every source
// (rp_filter, RFC 3704; only packets of a host without an address to 255.255.255.255 pass), router advertisements
// (accept_ra 0), and IPv6 for a single address in a frame for several MACs (drop_unicast_in_l2_multicast).
// disable_ipv6 would stop all IPv6, but writing it takes the kernel's lock on all links.

// noIPv4 returns the parameters of the host's end that netlink can set.
func noIPv4() []link.Parameter { return []link.Parameter{{ID: ipv4ConfRPFilter, Value: 1}} }

// hostEnd returns the parameters of a port that have no netlink attribute.
func hostEnd() [2]parameter { return [...]parameter{acceptRA(), dropUnicast()} }

func acceptRA() parameter    { return parameter{"accept_ra", 3, 0} }
func dropUnicast() parameter { return parameter{"drop_unicast_in_l2_multicast", 40, 1} }

// refuseIPv6 sets the parameters of hostEnd on a port. A port has none of them if the kernel has no IPv6 or the
// port's MTU is too small for IPv6. If /proc/sys is read-only, they stay unchanged, and only the firewall's rules
// stop the frames.
func (c *Conn) refuseIPv6(port string) error {
	dir, err := c.hostIPv6()
	if err != nil || dir == nil {
		return err
	}
	for _, p := range hostEnd() {
		if err := dir.Prefer(port+"/"+p.name, p.value()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// hostIPv6 returns the directory of IPv6 parameters in the bridges' namespace, or nil if the kernel has no IPv6. It
// stays open for the next port.
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
