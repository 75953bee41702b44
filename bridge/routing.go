package bridge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// Routing is what a host needs that pods route through. A field with its zero value changes nothing.
type Routing struct {
	// IPv4 and IPv6 have the host forward packets of the family, on all its links
	// (net.ipv4.ip_forward, net.ipv6.conf.all.forwarding).
	IPv4, IPv6 bool
	// NoRedirects names a link on which the host sends no IPv4 redirects to a shorter way than through itself: the
	// bridge, where the router is on it as well as the pods. For that the parameter send_redirects must be 0 on the
	// link and in "all", so that other links keep to their own from then on. IPv6 has no such parameter: see
	// Port.NoRedirects.
	NoRedirects string
	// RouteLocalnet names a link by which host ports on 127.0.0.1 lead to pods: the bridge
	// (net.ipv4.conf.<link>.route_localnet). It also has the kernel take packets for 127.0.0.0/8 from that link, so
	// rules that keep pods from the host's own services there come first: nft.Conn.Ensure makes them, and they last
	// as long as its table.
	RouteLocalnet string
}

const (
	forwarding4   = "net/ipv4/ip_forward"
	forwarding6   = "net/ipv6/conf/all/forwarding"
	sendRedirects = "send_redirects"
	routeLocalnet = "route_localnet"
)

// hostParameter is a file below /proc/sys and what is to be in it.
type hostParameter struct{ path, value string }

func (r *Routing) parameters() ([]hostParameter, error) {
	for _, name := range []string{r.NoRedirects, r.RouteLocalnet} {
		if err := checkParameterOf(name); err != nil && name != "" {
			return nil, &tombolo.OpError{Op: "set parameters of link", Object: name, Err: err}
		}
	}
	var list []hostParameter
	if r.NoRedirects != "" {
		list = append(list, hostParameter{sysctl.Link("ipv4", "all", sendRedirects), "0"},
			hostParameter{sysctl.Link("ipv4", r.NoRedirects, sendRedirects), "0"})
	}
	if r.IPv4 {
		list = append(list, hostParameter{forwarding4, "1"})
	}
	if r.IPv6 {
		list = append(list, hostParameter{forwarding6, "1"})
	}
	if r.RouteLocalnet != "" {
		list = append(list, hostParameter{sysctl.Link("ipv4", r.RouteLocalnet, routeLocalnet), "1"})
	}
	return list, nil
}

// EnsureRouting makes the host as r describes it, by /proc/sys of the calling thread's namespace, which has to be the
// Conn's (call it in netns.NS.Do), and says whether it had to change anything. A host that begins to forward IPv6
// keeps what routers have advertised to it, and goes on listening to them.
//
// It writes only where something is to be changed. In another namespace the error is tombolo.ErrInvalid.
func (c *Conn) EnsureRouting(ctx context.Context, r Routing) (changed bool, _ error) {
	if err := c.usableHere(ctx); err != nil {
		return false, err
	}

	list, err := r.parameters()
	if err != nil {
		return false, err
	}
	for _, d := range list {
		have, err := sysctl.Read(d.path)
		if err != nil {
			return changed, err
		}
		if have == d.value {
			continue
		}
		if d.path == forwarding6 {
			if err := c.keepAdvertised(ctx); err != nil {
				return changed, err
			}
		}
		if err := sysctl.Write(d.path, d.value); err != nil {
			return changed, err
		}
		changed = true
	}
	return changed, nil
}

// usableHere is usable where /proc/sys is that of the bridges' namespace: in no other that the thread may be in.
func (c *Conn) usableHere(ctx context.Context) error {
	var here Conn
	err := cmp.Or(c.usable(ctx), here.noteNetNS(nil))
	if err == nil && c.home != (netns.ID{}) && c.home != here.home {
		err = fmt.Errorf("%w: the thread is not in the bridges' network namespace: call it in NS.Do", tombolo.ErrInvalid)
	}
	return err
}

// CheckRouting compares the host with what r describes, and lists the differences: what EnsureRouting would change.
// Like that it reads /proc/sys of the calling thread's namespace, which has to be the Conn's.
func (c *Conn) CheckRouting(ctx context.Context, r Routing) ([]tombolo.Difference, error) {
	if err := c.usableHere(ctx); err != nil {
		return nil, err
	}

	var list []tombolo.Difference
	parameters, err := r.parameters()
	if err != nil {
		return nil, err
	}
	for _, p := range parameters {
		have, err := sysctl.Read(p.path)
		if err != nil {
			return list, err
		}
		if have != p.value {
			list = append(list, tombolo.Difference{Object: "kernel parameters", What: p.path, Want: p.value, Have: have})
		}
	}
	return list, nil
}

// Forwards says whether the host forwards packets of the families that r names: by one
// request for each, in one message, where CheckRouting reads files.
func (c *Conn) Forwards(ctx context.Context, r Routing) (bool, error) {
	if err := c.usable(ctx); err != nil {
		return false, err
	}

	var b nl.Batch
	forwards := true
	for _, family := range r.families() {
		// struct netconfmsg of include/uapi/linux/netconf.h
		m, err := nl.Encode(unix.RTM_GETNETCONF, 0, []byte{family, 0, 0, 0}, func(ae *netlink.AttributeEncoder) {
			ae.Uint32(netconfIndex, netconfAll)
		})
		b.AddGet("get configuration of", familyName(family), m, err, func(m netlink.Message) error {
			on, err := decodeForwarding(m.Data)
			forwards = forwards && on
			return err
		})
	}
	err := c.execute(ctx, &b)
	return err == nil && forwards, err
}

// Of include/uapi/linux/netconf.h.
const (
	netconfIndex      = 1 // NETCONFA_IFINDEX
	netconfForwarding = 2 // NETCONFA_FORWARDING

	netconfAll = 1<<32 - 1 // NETCONFA_IFINDEX_ALL
)

func (r *Routing) families() []uint8 {
	var list []uint8
	if r.IPv4 {
		list = append(list, unix.AF_INET)
	}
	if r.IPv6 {
		list = append(list, unix.AF_INET6)
	}
	return list
}

func familyName(family uint8) nl.Name {
	if family == unix.AF_INET6 {
		return "IPv6"
	}
	return "IPv4"
}

// decodeForwarding reads the body of an RTM_NEWNETCONF.
func decodeForwarding(b []byte) (on bool, _ error) {
	if len(b) < 4 {
		return false, fmt.Errorf("%w: a configuration of %d bytes", nl.ErrMalformed, len(b))
	}
	err := nl.Decode(b[4:], func(ad *netlink.AttributeDecoder) error {
		if ad.Type() == netconfForwarding {
			on = ad.Uint32() != 0
		}
		return nil
	})
	return on, err
}

// keepAdvertised lets the links that have something from router advertisements keep it. As soon as a host forwards,
// the kernel drops the default routes that it learnt on links whose accept_ra is 1, and hears no more advertisements
// there; with 2 it does. Where it is 0, a program keeps the routes (systemd-networkd), and the kernel is to stay out.
func (c *Conn) keepAdvertised(ctx context.Context) error {
	links, err := c.advertised(ctx)
	if err != nil {
		return err
	}
	for index := range links {
		if err := c.keepHearing(ctx, index); err != nil && !errors.Is(err, fs.ErrNotExist) { // gone meanwhile
			return err
		}
	}
	return nil
}

func (c *Conn) keepHearing(ctx context.Context, link int) error {
	l, err := c.LinkByIndex(ctx, link)
	if err != nil {
		return err
	}
	path := sysctl.Link("ipv6", l.Name, "accept_ra")
	if have, err := sysctl.Read(path); err != nil || have != "1" {
		return err
	}
	return sysctl.Write(path, "2")
}

// advertised gives the indexes of the links that have routes or addresses from
// router advertisements.
func (c *Conn) advertised(ctx context.Context) (map[int]bool, error) {
	links := map[int]bool{}
	routes, err := c.Routes().List(ctx, route.Filter{Family: unix.AF_INET6, Protocol: unix.RTPROT_RA})
	if err != nil {
		return nil, err
	}
	for _, r := range routes {
		if len(r.Nexthops) == 0 {
			links[r.Link] = true
		}
		for _, nh := range r.Nexthops {
			links[nh.Link] = true
		}
	}
	addresses, err := c.Addresses().List(ctx, addr.Filter{Family: unix.AF_INET6})
	if err != nil {
		return nil, err
	}
	for _, a := range addresses {
		if a.Protocol == addr.ProtocolRA {
			links[a.Link] = true
		}
	}
	return links, nil
}

// DefaultMTU is that of the link of the default route, in bytes, the smaller over both
// families; 1500 if there is none, or it is the link that is excepted by its name.
func (c *Conn) DefaultMTU(ctx context.Context, except string) (int, error) {
	const ethernet = 1500
	mtu := 0
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		list, err := c.Routes().List(ctx, route.Filter{Family: family, Table: unix.RT_TABLE_MAIN})
		if err != nil {
			return 0, err
		}
		var best *route.Route
		for i, r := range list {
			if r.Dst.Bits() <= 0 && r.Type == unix.RTN_UNICAST && (best == nil || r.Priority < best.Priority) {
				best = &list[i]
			}
		}
		if best == nil {
			continue
		}
		index := best.Link
		if len(best.Nexthops) > 0 {
			index = best.Nexthops[0].Link
		}
		l, err := c.LinkByIndex(ctx, index)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return 0, err
		}
		if err == nil && l.Name != except && (mtu == 0 || l.MTU < mtu) {
			mtu = l.MTU
		}
	}
	return cmp.Or(mtu, ethernet), nil
}

// Uplinks names the bridges and veth links that lead to the host's own neighbours, and not to containers or virtual
// machines on the host: a bridge with a port that is hardware, a bond or a VLAN, or with a default route, and a veth
// link with a subnet of its own, as a node that is a container has it.
func (c *Conn) Uplinks(ctx context.Context) (names []string, _ error) {
	all, err := c.links(ctx, "list links", "", 0)
	if err != nil {
		return nil, err
	}
	addresses, err := c.Addresses().List(ctx, addr.Filter{})
	if err != nil {
		return nil, err
	}

	hasNIC, hasSubnet := map[int]bool{}, map[int]bool{} // by a link's index
	for i := range all {
		if slices.Contains([]string{"", "bond", "team", "vlan"}, all[i].Kind) {
			hasNIC[all[i].Master] = true
		}
	}
	for _, a := range addresses {
		if a.Prefix.Bits() < a.Prefix.Addr().BitLen() && !a.Prefix.Addr().IsLinkLocalUnicast() {
			hasSubnet[a.Link] = true
		}
	}

	for _, l := range all {
		is := l.Kind == "veth" && hasSubnet[l.Index] || l.Kind == "bridge" && hasNIC[l.Index]
		if l.Kind == "bridge" && !is {
			if is, err = c.hasDefaultRoute(ctx, l.Index); err != nil {
				return nil, err
			}
		}
		if is {
			names = append(names, l.Name)
		}
	}
	slices.Sort(names)
	return names, nil
}

func (c *Conn) hasDefaultRoute(ctx context.Context, link int) (has bool, _ error) {
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		f := route.Filter{Family: family, Link: link, Type: unix.RTN_UNICAST}
		err := c.Routes().Walk(ctx, f, func(r route.Route) { has = has || r.Dst.Bits() <= 0 })
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // gone meanwhile
			return false, err
		}
	}
	return has, nil
}
