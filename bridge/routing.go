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
	"github.com/tombolo-cni/tombolo/internal/diff"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// Routing describes the settings of a host that routes for pods. A zero field changes nothing.
type Routing struct {
	// IPv4 and IPv6 make each present and future link of the host forward incoming packets of the family.
	//
	// A host that is a router already (net.ipv4.ip_forward, net.ipv6.conf.all.forwarding) stays as it is. On another
	// host these two stay 0, and the links' own parameters are set: net.ipv4.conf.LINK.forwarding, and
	// net.ipv6.conf.LINK.force_forwarding (Linux 6.17). An older kernel forwards IPv6 only for all links, so there
	// net.ipv6.conf.all.forwarding is set.
	//
	// Then the host also forwards packets between links of other programs. nft.Network's Closed drops such packets.
	IPv4, IPv6 bool
	// Input is the link that pods' packets come in by. On a router too, the kernel forwards IPv4 from this link only
	// if the link's own parameter is set.
	Input string
	// RouteLocalnet is the link through which host ports on 127.0.0.1 lead to pods: the bridge
	// (net.ipv4.conf.<link>.route_localnet). It also makes the kernel accept packets to 127.0.0.0/8 from that link.
	// So rules that protect the host's own services there must come first. nft.Conn.Ensure adds them, and they last
	// as long as its table.
	RouteLocalnet string
}

const (
	routeLocalnet = "route_localnet"

	// Every namespace has a loopback interface. EnsureRouting sets it last, so its parameter shows whether all links
	// were set.
	loopbackName = "lo"
)

// hostParameter is a file below /proc/sys with its expected value.
type hostParameter struct {
	path, value string
	isSwitch    bool         // every value except 0 is as good
	before      func() error // called before the value is written; may be nil
}

func (p *hostParameter) isMet(have string) bool { return have == p.value || p.isSwitch && have != "0" }

// forwarding names the parameters that make a host forward packets of a family.
type forwarding struct {
	family, all string // the family's directory below /proc/sys/net, and the path of the parameter for all links
	name, value string // the name of the parameter for one link, and the value that turns it on
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

// parameters returns the parameters of the family. On a router there is at most the input link's.
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

// keepAdvertised makes the links that accept router advertisements continue to accept them when the host forwards,
// including future links. With an accept_ra of 1 the kernel would drop the routes that it has learnt, and ignore
// further advertisements. If accept_ra is 0, a program such as systemd-networkd reads them, or they are unwanted.
func keepAdvertised() error { return sysctl.Replace("ipv6", "accept_ra", "1", "2") }

func (r *Routing) parameters() ([]hostParameter, error) {
	for _, name := range []string{r.Input, r.RouteLocalnet} {
		err := checkName(name)
		if name == "all" || name == "default" { // these apply to every link
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

// EnsureRouting configures the host as r describes it, through /proc/sys of the calling thread's namespace, and
// reports whether it changed anything. A host that begins to forward IPv6 keeps the settings from router
// advertisements, and continues to accept them.
//
// It writes only if something differs. The thread must be in the Conn's namespace (call it in netns.NS.Do); otherwise
// the error is tombolo.ErrInvalid.
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
		err = fmt.Errorf("%w: the thread is not in the bridges' network namespace: call it in NS.Do",
			tombolo.ErrInvalid)
	}
	return err
}

// CheckRouting compares the host with r, and lists the differences, which EnsureRouting would change. It does not
// list single links that do not forward: their owner may want that. Like EnsureRouting it reads /proc/sys of the
// calling thread's namespace, which must also be the Conn's.
func (c *Conn) CheckRouting(ctx context.Context, r Routing) ([]tombolo.Difference, error) {
	if err := c.checkThread(); err != nil {
		return nil, err
	}

	var list diff.List
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
			list.Add("kernel parameters", p.path, p.value, have)
		}
	}

	return list, nil
}

// Constants of enum IPV4_DEVCONF_* of include/uapi/linux/ip.h, and of DEVCONF_* of include/uapi/linux/ipv6.h.
const (
	ipv4ConfForwarding      = 1  // IPV4_DEVCONF_FORWARDING
	ipv6ConfForwarding      = 0  // DEVCONF_FORWARDING
	ipv6ConfForceForwarding = 59 // DEVCONF_FORCE_FORWARDING, since Linux 6.17
)

// Forwards returns the families that the host forwards, at least for pods, and those where it is a router: it
// forwards for everybody, by a setting of its owner. It takes one request.
func (c *Conn) Forwards(ctx context.Context) (pods, router Routing, _ error) {
	var b nl.Batch
	var lo link.Link
	link.Get(&b, loopbackName, loopbackIndex, &lo, unix.IFLA_AF_SPEC)
	if err := c.nl.Do(ctx, &b); err != nil {
		return pods, router, err
	}

	four, _ := lo.IPv4.At(ipv4ConfForwarding - 1)
	six, _ := lo.IPv6.At(ipv6ConfForwarding)
	forced, _ := lo.IPv6.At(ipv6ConfForceForwarding)
	pods = Routing{IPv4: four != 0, IPv6: six != 0 || forced != 0}
	router = Routing{IPv4: four != 0 && strconv.Itoa(int(four)) != sysctl.OwnForwarding, IPv6: six != 0}
	return pods, router, nil
}

// DefaultMTU returns the MTU, in bytes, of the link with the host's default route, the smaller one of both families.
// It returns 1500 if there is none, or if it is the link except.
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

// waysOut returns the links with the host's default routes, one for each family that has one.
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
		} else if !errors.Is(err, fs.ErrNotExist) { // the link has just been deleted
			return nil, err
		}
	}

	return list, nil
}

// Uplinks returns the names of bridges and veth links that lead to the host's own neighbours, and not to containers
// or virtual machines on the host. These are bridges with a port that is hardware, a bond or a VLAN, or with a
// default route, and veth links with a subnet of their own, as in a node that is a container. It skips the bridges in
// except, which may have many ports.
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
			if err != nil && !errors.Is(err, fs.ErrNotExist) { // the link has just been deleted
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
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // the link has just been deleted
			return nil, err
		}
		if err == nil && l.Kind == "veth" {
			names = append(names, l.Name)
		}
	}

	slices.Sort(names)
	return slices.Compact(names), err
}
