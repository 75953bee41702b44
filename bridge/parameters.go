package bridge

import (
	"strconv"

	"github.com/tombolo-cni/tombolo/internal/link"
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

// Of enum IPV4_DEVCONF_* of include/uapi/linux/ip.h.
const (
	ipv4ConfARPNotify       = 22 // IPV4_DEVCONF_ARP_NOTIFY
	ipv4ConfAcceptRedirects = 4  // IPV4_DEVCONF_ACCEPT_REDIRECTS
	ipv4ConfRPFilter        = 8  // IPV4_DEVCONF_RP_FILTER
	ipv4ConfRouteLocalnet   = 26 // IPV4_DEVCONF_ROUTE_LOCALNET
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

func (p parameter) isIn(have link.Parameters) bool {
	v, ok := have.At(p.index)
	return ok && v == p.want
}

// podLink looks a link up in a pod.
func podLink(conn *nl.Conn, name string) (*link.Link, error) {
	var b nl.Batch
	var l link.Link
	link.Get(&b, name, 0, &l)
	return &l, conn.Execute(&b)
}

// parameters is about the parameters that were asked for, and about no others:
// a chained plugin may have set those. all is the value of allRedirects.
func (c *comparison) parameters(p *Port, l *link.Link, all string) {
	if p.Autoconf != nil {
		for _, want := range p.hearing() {
			c.parameter(l.IPv6, want)
		}
	}
	if !p.NoRedirects {
		return
	}
	if have, ok := l.IPv4.At(ipv4ConfAcceptRedirects - 1); ok && have != 0 {
		c.differs("IPv4 accept_redirects", "0", strconv.Itoa(int(have)))
	}
	if all != "0" {
		c.differs("IPv4 accept_redirects of all", "0", all)
	}
	if p.usesIPv6() {
		c.parameter(l.IPv6, acceptRedirects())
	}
}

func (c *comparison) parameter(have link.Parameters, want parameter) {
	if v, ok := have.At(want.index); ok && v != want.want {
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
