package bridge

import (
	"encoding/binary"
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// parameter is a kernel parameter of a link (net.ipv6.conf.<link>.<name>) as it is
// to be. Netlink tells all of a link's by their indexes at once; /proc sets them by
// their names, one by one.
type parameter struct {
	name  string
	index int // DEVCONF_* of include/uapi/linux/ipv6.h
	want  int32
}

func (p parameter) value() string { return strconv.Itoa(int(p.want)) }

// Of enum IPV4_DEVCONF_* of include/uapi/linux/ip.h, and of include/uapi/linux/if_link.h.
const (
	ipv4ConfARPNotify       = 22 // IPV4_DEVCONF_ARP_NOTIFY
	ipv4ConfAcceptRedirects = 4  // IPV4_DEVCONF_ACCEPT_REDIRECTS
	ipv4ConfRPFilter        = 8  // IPV4_DEVCONF_RP_FILTER
	ipv4ConfRouteLocalnet   = 26 // IPV4_DEVCONF_ROUTE_LOCALNET

	inet6Conf  = 2 // IFLA_INET6_CONF
	inet6Token = 7 // IFLA_INET6_TOKEN
)

// allRedirects holds for IPv4 beside the interface's own: either lets redirects in,
// as long as the pod does not forward.
const allRedirects = "net/ipv4/conf/all/accept_redirects"

// acceptRedirects is the interface's of IPv6, which alone counts there.
func acceptRedirects() parameter { return parameter{"accept_redirects", 4, 0} }

// hearing are the parameters by which a pod with Autoconf hears routers. The last
// one lets them in.
func (p *Port) hearing() []parameter {
	var router, dad int32
	if p.Autoconf.DefaultRoute {
		router = 1
	}
	if p.DAD {
		dad = 1
	}
	list := []parameter{
		{"autoconf", 5, 1},
		{"router_solicitations", 7, -1}, // until one is answered
		{"use_tempaddr", 10, 0},
		{"accept_ra_defrtr", 17, router},
		{"accept_ra_pinfo", 18, 1},
		{"accept_dad", 27, dad},
	}
	if router == 0 {
		list = append(list, parameter{"accept_ra_rt_info_max_plen", 21, 0})
	}
	// 2 hears them even where the pod forwards for others.
	return append(list, parameter{"accept_ra", 3, 2})
}

// podLink is a link with its kernel parameters.
type podLink struct {
	Link
	ipv4, ipv6 parameters
	token      netip.Addr // how IPv6 addresses are to end; unspecified: it is left to the kernel
}

// parameters are what the kernel tells of a link, four bytes each; none where it has
// nothing of the family.
type parameters []byte

// at gives the value at an index, from 0.
func (p parameters) at(i int) (int32, bool) {
	if len(p) < 4*(i+1) {
		return 0, false
	}
	return int32(binary.NativeEndian.Uint32(p[4*i:])), true
}

func (p parameters) is(want parameter) bool {
	have, ok := p.at(want.index)
	return ok && have == want.want
}

func (l *podLink) get(conn *nl.Conn, name string) error {
	var b nl.Batch
	b.Get("get link", nl.Name(name), unix.RTM_GETLINK, 0, func(e *nl.Encoder) {
		ifInfo(e, 0, 0, 0)
		e.String(unix.IFLA_IFNAME, name)
		e.Uint32(unix.IFLA_EXT_MASK, extMaskSkipStats)
	}, func(m nl.Message) error { return l.decode(m.Data) })
	return conn.Execute(&b)
}

// decode reads the body of an RTM_NEWLINK.
func (l *podLink) decode(b []byte) error {
	*l = podLink{}
	if err := l.Link.decode(b); err != nil {
		return err
	}
	attrs := nl.ParseAttrs(b[unix.SizeofIfInfomsg:])
	for attrs.Next() {
		if attrs.Type != unix.IFLA_AF_SPEC {
			continue
		}
		families := attrs.Nested()
		for families.Next() {
			if err := l.decodeFamily(families.Type, families.Nested()); err != nil {
				return err
			}
		}
		if err := families.Err(); err != nil {
			return err
		}
	}
	return attrs.Err()
}

func (l *podLink) decodeFamily(family uint16, attrs *nl.Attrs) error {
	if family != unix.AF_INET && family != unix.AF_INET6 {
		return nil // others have their own shapes
	}
	for attrs.Next() {
		switch {
		case family == unix.AF_INET && attrs.Type == unix.IFLA_INET_CONF:
			l.ipv4 = append(parameters(nil), attrs.Data...)
		case family == unix.AF_INET6 && attrs.Type == inet6Conf:
			l.ipv6 = append(parameters(nil), attrs.Data...)
		case family == unix.AF_INET6 && attrs.Type == inet6Token:
			l.token = attrs.Addr()
		}
	}
	return attrs.Err()
}

// parameters is about the parameters that were asked for, and about no others:
// a chained plugin may have set those. all is the value of allRedirects.
func (c *comparison) parameters(p *Port, l *podLink, all string) {
	if p.Autoconf != nil {
		for _, want := range p.hearing() {
			c.parameter(l.ipv6, want)
		}
	}
	if !p.NoRedirects {
		return
	}
	if have, ok := l.ipv4.at(ipv4ConfAcceptRedirects - 1); ok && have != 0 {
		c.differs("IPv4 accept_redirects", "0", strconv.Itoa(int(have)))
	}
	if all != "0" {
		c.differs("IPv4 accept_redirects of all", "0", all)
	}
	if p.usesIPv6() {
		c.parameter(l.ipv6, acceptRedirects())
	}
}

func (c *comparison) parameter(have parameters, want parameter) {
	if v, ok := have.at(want.index); ok && v != want.want {
		c.differs("IPv6 "+want.name, want.value(), strconv.Itoa(int(v)))
	}
}

// refuseRedirects sets what netlink has no attribute for.
func (p *Port) refuseRedirects(in *inPod) error {
	if err := in.ipv4.Write("all/accept_redirects", "0"); err != nil {
		return err
	}
	if !p.usesIPv6() {
		return nil
	}
	refuse := acceptRedirects()
	return in.ipv6.Write(p.Peer+"/"+refuse.name, refuse.value())
}
