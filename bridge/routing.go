package bridge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// Routing describes the parameters of a host that routes for pods. IPv4 and IPv6 are switches; Input and RouteLocalnet
// are names of links, often the same bridge. A field with its zero value changes nothing.
type Routing struct {
	// IPv4 and IPv6 set each link of the host, and each later link, to forward packets of the family.
	//
	// A host that is a router already (net.ipv4.ip_forward, net.ipv6.conf.all.forwarding) stays as it is. On another
	// host these two stay 0, and the links' own parameters are set: net.ipv4.conf.LINK.forwarding, and
	// net.ipv6.conf.LINK.force_forwarding, which Linux has since 6.17. An older kernel forwards IPv6 only for all, so
	// there net.ipv6.conf.all.forwarding is set.
	//
	// Links of others then forward to links of others too: nft.Network's Closed drops that.
	IPv4, IPv6 bool
	// Input is the name of the link that pods' packets come in by: the bridge. On a router too, the kernel forwards
	// their IPv4 packets only if this link's own parameter is set.
	Input string
	// RouteLocalnet is the name of the link by which host ports on 127.0.0.1 lead to pods: the bridge
	// (net.ipv4.conf.<link>.route_localnet). The kernel then also takes packets for 127.0.0.0/8 from that link, so
	// rules that keep pods from the host's own services there come first: nft.Conn.Ensure makes them, and they last
	// as long as its table.
	RouteLocalnet string
}

const (
	routeLocalnet = "route_localnet"

	// A loopback interface is in every namespace. It is the last link that EnsureRouting has forward, so its
	// parameter tells whether all the others were set.
	loopbackName = "lo"
)

// hostParameter is a file below /proc/sys and its expected value.
type hostParameter struct {
	path, value string
	isSwitch    bool         // every value but 0 is as good
	before      func() error // is called before the value is written; nil: nothing is
}

func (p *hostParameter) isMet(have string) bool { return have == p.value || p.isSwitch && have != "0" }

// forwarding names the parameters by which a host forwards packets of a family.
type forwarding struct {
	family, all string // the directory of the family, and the path of the switch for all links
	name, value string // of the parameter of one link, and what we write there
}

func (r *Routing) families() []forwarding {
	var list []forwarding
	if r.IPv4 {
		list = append(list, forwarding{"ipv4", "net/ipv4/ip_forward", "forwarding", sysctl.OwnForwarding})
	}
	if r.IPv6 {
		list = append(list, forwarding{"ipv6", "net/ipv6/conf/all/forwarding", "force_forwarding", "1"})
	}
	return list
}

// parameters lists the parameters of the family. On a router that is at most the input's.
func (f *forwarding) parameters(input string) (list []hostParameter, _ error) {
	all, err := sysctl.Read(f.all)
	if err != nil {
		return nil, err
	}
	of := func(name string) string { return sysctl.Link(f.family, name, f.name) }
	switch {
	case all != "0":
		if f.value = "1"; f.family == "ipv6" {
			input = ""
		}
	case !sysctl.Exists(of(loopbackName)):
		return []hostParameter{{path: f.all, value: "1", before: keepAdvertised}}, nil
	default:
		others := func() error { return sysctl.Replace(f.family, f.name, "0", f.value, loopbackName) }
		list = []hostParameter{{of("default"), f.value, true, nil}, {of(loopbackName), f.value, true, others}}
	}
	if input != "" {
		list = append(list, hostParameter{of(input), f.value, true, nil})
	}
	return list, nil
}

// keepAdvertised has the links that accept router advertisements accept them from a host that forwards too, and later
// links as well: with an accept_ra of 1 the kernel would drop the routes that it learnt there, and ignore further
// advertisements. Where accept_ra is 0, a program reads them (systemd-networkd), or nobody is to.
func keepAdvertised() error { return sysctl.Replace("ipv6", "accept_ra", "1", "2") }

func (r *Routing) parameters() ([]hostParameter, error) {
	for _, name := range []string{r.Input, r.RouteLocalnet} {
		err := checkName(name)
		if name == "all" || name == "default" { // these are every link's
			err = fmt.Errorf("%w: %q names no link", tombolo.ErrInvalid, name)
		}
		if err != nil && name != "" {
			return nil, &tombolo.OpError{Op: "set parameters of link", Object: name, Err: err}
		}
	}
	var list []hostParameter
	for _, f := range r.families() {
		parameters, err := f.parameters(r.Input)
		if err != nil {
			return nil, err
		}
		list = append(list, parameters...)
	}
	if r.RouteLocalnet != "" {
		list = append(list, hostParameter{path: sysctl.Link("ipv4", r.RouteLocalnet, routeLocalnet), value: "1"})
	}
	return list, nil
}

// EnsureRouting makes the host as r describes it, by /proc/sys of the calling thread's namespace, which has to be the
// Conn's (call it in netns.NS.Do), and reports whether it had to change anything. A host that begins to forward IPv6
// keeps what routers have advertised to it, and goes on listening to them.
//
// It writes only where something is to be changed. In another namespace the error is tombolo.ErrInvalid.
func (c *Conn) EnsureRouting(ctx context.Context, r Routing) (changed bool, _ error) {
	if err := c.checkThread(); err != nil {
		return false, err
	}

	list, err := r.parameters()
	if err != nil {
		return false, err
	}
	for _, p := range list {
		have, err := sysctl.Read(p.path)
		if err != nil {
			return changed, err
		}
		if p.isMet(have) {
			continue
		}
		if p.before != nil {
			if err := p.before(); err != nil {
				return changed, err
			}
		}
		if err := sysctl.Write(p.path, p.value); err != nil {
			return changed, err
		}
		changed = true
	}
	return changed, nil
}

// checkThread returns an error if the calling thread, whose /proc/sys is written, is not in the bridges' namespace.
func (c *Conn) checkThread() error {
	var here Conn
	err := here.noteNetNS(nil)
	if err == nil && c.home != (netns.ID{}) && c.home != here.home {
		err = fmt.Errorf("%w: the thread is not in the bridges' network namespace: call it in NS.Do", tombolo.ErrInvalid)
	}
	return err
}

// CheckRouting compares the host with r, and lists the differences, which EnsureRouting would change. It does not list
// single links that do not forward: their owner may want that. Like EnsureRouting it reads /proc/sys of the calling
// thread's namespace, which has to be the Conn's.
func (c *Conn) CheckRouting(ctx context.Context, r Routing) ([]tombolo.Difference, error) {
	if err := c.checkThread(); err != nil {
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
		if !p.isMet(have) {
			list = append(list, tombolo.Difference{Object: "kernel parameters", What: p.path, Want: p.value, Have: have})
		}
	}
	return list, nil
}

// Of enum IPV4_DEVCONF_* of include/uapi/linux/ip.h, and of DEVCONF_* of include/uapi/linux/ipv6.h.
const (
	ipv4ConfForwarding      = 1  // IPV4_DEVCONF_FORWARDING
	ipv6ConfForwarding      = 0  // DEVCONF_FORWARDING
	ipv6ConfForceForwarding = 59 // DEVCONF_FORCE_FORWARDING, since Linux 6.17
)

// Forwards reports for which families the host forwards packets, at least for pods, and for which of these it is a
// router: it forwards for all, by a setting of its owner. It takes one request.
func (c *Conn) Forwards(ctx context.Context) (pods, router Routing, _ error) {
	var b nl.Batch
	var lo link.Link
	link.Get(&b, loopbackName, loopbackIndex, &lo, unix.IFLA_AF_SPEC)
	if err := c.execute(ctx, &b); err != nil {
		return pods, router, err
	}
	four, _ := lo.IPv4.At(ipv4ConfForwarding - 1)
	six, _ := lo.IPv6.At(ipv6ConfForwarding)
	forced, _ := lo.IPv6.At(ipv6ConfForceForwarding)
	pods = Routing{IPv4: four != 0, IPv6: six != 0 || forced != 0}
	router = Routing{IPv4: four != 0 && strconv.Itoa(int(four)) != sysctl.OwnForwarding, IPv6: six != 0}
	return pods, router, nil
}

// DefaultMTU is that of the link by which the host sends to elsewhere, in bytes, the smaller over both families; 1500
// if there is none, or it is the link that is excepted by its name.
func (c *Conn) DefaultMTU(ctx context.Context, except string) (int, error) {
	const ethernet = 1500
	ways, err := c.waysOut(ctx)
	mtu := 0
	for _, l := range ways {
		if l.Name != except && (mtu == 0 || l.MTU < mtu) {
			mtu = l.MTU
		}
	}
	return cmp.Or(mtu, ethernet), err
}

// waysOut lists the links by which the host sends to elsewhere: one for each family that has a default route.
func (c *Conn) waysOut(ctx context.Context) (list []*Link, _ error) {
	for _, zero := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		r, err := c.Routes().Get(ctx, routing.Outside(zero))
		if route.NoRoute(err) || err == nil && r.Type != unix.RTN_UNICAST {
			continue
		}
		if err != nil {
			return nil, err
		}
		l, err := c.LinkByIndex(ctx, r.Link)
		if err == nil {
			list = append(list, l)
		} else if !errors.Is(err, fs.ErrNotExist) { // it has gone since
			return nil, err
		}
	}
	return list, nil
}

// Uplinks names the bridges and veth links that lead to the host's own neighbours, and not to containers or virtual
// machines on the host: a bridge with a port that is hardware, a bond or a VLAN, or with a default route, and a veth
// link with a subnet of its own, as a node that is a container has it. Uplinks does not look at the bridges in except,
// which may have many ports.
func (c *Conn) Uplinks(ctx context.Context, except ...string) (names []string, _ error) {
	bridges, err := c.links(ctx, "list bridges", "bridge", 0)
	if err != nil {
		return nil, err
	}
	isNIC := func(l Link) bool { return slices.Contains([]string{"", "bond", "team", "vlan"}, l.Kind) }
	for _, l := range bridges {
		if slices.Contains(except, l.Name) {
			continue
		}
		ports, err := c.Ports(ctx, l.Index)
		if err != nil {
			return nil, err
		}
		is := slices.ContainsFunc(ports, isNIC)
		for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
			f := route.Filter{Family: family, Link: l.Index, Type: unix.RTN_UNICAST}
			err := c.Routes().Walk(ctx, f, func(r route.Route) { is = is || r.Dst.Bits() <= 0 })
			if err != nil && !errors.Is(err, fs.ErrNotExist) { // it has gone since
				return nil, err
			}
		}
		if is {
			names = append(names, l.Name)
		}
	}

	addresses, err := c.Addresses().List(ctx, addr.Filter{})
	for _, a := range addresses {
		if a.Prefix.IsSingleIP() || a.Prefix.Addr().IsLinkLocalUnicast() {
			continue
		}
		l, err := c.LinkByIndex(ctx, a.Link)
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // it has gone since
			return nil, err
		}
		if err == nil && l.Kind == "veth" {
			names = append(names, l.Name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), err
}
