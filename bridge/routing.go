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
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/route"
)

// Routing describes the settings that a host needs to route packets for pods. The zero value of a field changes
// nothing.
type Routing struct {
	// IPv4 and IPv6 enable forwarding of the family on all links of the host, including future links.
	//
	// If the host already routes the family (net.ipv4.ip_forward or net.ipv6.conf.all.forwarding is on), EnsureRouting
	// sets at most the sysctl of Input for it. Otherwise EnsureRouting sets the sysctls of each link:
	// net.ipv4.conf.LINK.forwarding, and net.ipv6.conf.LINK.force_forwarding (Linux 6.17). Older kernels can forward
	// IPv6 only for all links, so EnsureRouting then sets net.ipv6.conf.all.forwarding.
	//
	// The host then also forwards packets between links of other programs. Use the field Closed of nft.Network to
	// drop such packets.
	IPv4, IPv6 bool
	// Input is the link where packets from pods come in. With IPv4 or IPv6, EnsureRouting also turns on forwarding for
	// this link, but not for IPv6 if the host already routes IPv6. The kernel forwards IPv4 packets only from links
	// with forwarding on, even on a router.
	Input string
	// RouteLocalnet is the bridge through which ports published on 127.0.0.1 lead to pods. EnsureRouting turns on
	// net.ipv4.conf.LINK.route_localnet for it. The kernel then also accepts packets to 127.0.0.0/8 from this link. So
	// install rules that protect the host's own services there first. nft.Conn.Ensure adds such rules, and they last as
	// long as the table.
	RouteLocalnet string
}

const (
	routeLocalnet = "route_localnet"

	// loopbackName is the name of the loopback interface, which every network namespace has. EnsureRouting sets its
	// sysctl after those of the other links, so the value shows whether all links were set.
	loopbackName = "lo"
)

// hostParameter is a sysctl with its expected value. path is relative to /proc/sys.
type hostParameter struct {
	path, value string
	isSwitch    bool         // any value except 0 turns the parameter on
	before      func() error // called before the value is written; may be nil
}

// forwarding names the sysctls that control forwarding of one address family.
type forwarding struct {
	isNeeded    bool
	family, all string // the family's directory below /proc/sys/net, and the path of the parameter for all links
	name, value string // the name of the parameter for one link, and the value that turns it on
}

// parameters returns the sysctls to set for the family, if the family is needed. If the host is a router, this is at
// most the sysctl of the input link.
func (f *forwarding) parameters(input string) (list []hostParameter, _ error) {
	if !f.isNeeded {
		return nil, nil
	}

	all, err := sysctl.Read(f.all)
	if err != nil {
		return nil, err
	}

	path := func(name string) string { return sysctl.Link(f.family, name, f.name) }
	switch {
	case all != "0":
		if f.value = "1"; f.family == "ipv6" {
			input = ""
		}
	case !sysctl.Exists(path(loopbackName)):
		return []hostParameter{{path: f.all, value: "1", before: keepAdvertised}}, nil
	default:
		others := func() error { return sysctl.Replace(f.family, f.name, "0", f.value, loopbackName) }
		list = []hostParameter{{path("default"), f.value, true, nil}, {path(loopbackName), f.value, true, others}}
	}

	if input != "" {
		list = append(list, hostParameter{path(input), f.value, true, nil})
	}

	return list, nil
}

// keepAdvertised changes accept_ra from 1 to 2 on all links, and for future links, so that they still accept router
// advertisements when the host forwards. With 1 the kernel would delete the routes that it has learnt, and ignore
// further advertisements. keepAdvertised leaves an accept_ra of 0: then another program such as systemd-networkd
// handles advertisements, or they are unwanted.
func keepAdvertised() error { return sysctl.Replace("ipv6", "accept_ra", "1", "2") }

func (r *Routing) parameters() ([]hostParameter, error) {
	for _, name := range []string{r.Input, r.RouteLocalnet} {
		err := checkName(name)
		if name == "all" || name == "default" { // "all" and "default" apply to every link
			err = fmt.Errorf("%w: %q names no link", tombolo.ErrInvalid, name)
		}
		if err != nil && name != "" {
			return nil, &tombolo.OpError{Op: "set parameters of link", Object: name, Err: err}
		}
	}

	var list []hostParameter
	for _, f := range []forwarding{
		{r.IPv4, "ipv4", "net/ipv4/ip_forward", "forwarding", sysctl.OwnForwarding},
		{r.IPv6, "ipv6", "net/ipv6/conf/all/forwarding", "force_forwarding", "1"},
	} {
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

// EnsureRouting sets the sysctls that r requests, and reports whether it changed anything. If the host begins to
// forward IPv6, it keeps the settings from router advertisements and still accepts new ones.
//
// It writes only values that differ, in the Conn's network namespace.
func (c *Conn) EnsureRouting(ctx context.Context, r Routing) (changed bool, _ error) {
	err := c.forUnmet(ctx, r, func(p hostParameter, _ string) error {
		if p.before != nil {
			if err := p.before(); err != nil {
				return err
			}
		}

		err := sysctl.Write(p.path, p.value)
		changed = changed || err == nil
		return err
	})

	return changed, err
}

// forUnmet calls the function do for each sysctl that differs from r, with the present value. It works in the Conn's
// network namespace, and stops at the first error.
func (c *Conn) forUnmet(ctx context.Context, r Routing, do func(p hostParameter, have string) error) error {
	return c.nl.Within(func() error {
		list, err := r.parameters()
		for _, p := range list {
			have, err := sysctl.Read(p.path)
			if err != nil {
				return c.withRealName(ctx, r, err)
			}

			if have == p.value || p.isSwitch && have != "0" {
				continue
			}

			if err := do(p, have); err != nil {
				return err
			}
		}

		return err
	})
}

// withRealName returns err. But if r names a link by an alternative name, for which there are no sysctls, it returns an
// error that contains the real name.
func (c *Conn) withRealName(ctx context.Context, r Routing, err error) error {
	for _, name := range []string{r.Input, r.RouteLocalnet} {
		if name == "" || !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if _, nameErr := c.bridgeNamed(ctx, name); errors.Is(nameErr, tombolo.ErrInvalid) {
			return nameErr
		}
	}
	return err
}

// CheckRouting compares the sysctls of the host with r and returns the differences. EnsureRouting repairs them. A link
// without forwarding is no difference, since its owner may have chosen this. Exceptions are r.Input and loopback.
func (c *Conn) CheckRouting(ctx context.Context, r Routing) ([]tombolo.Difference, error) {
	var list diff.List
	err := c.forUnmet(ctx, r, func(p hostParameter, have string) error {
		list.Add("kernel parameters", p.path, p.value, have)
		return nil
	})

	return list, err
}

// Numbers of enum IPV4_DEVCONF_* in include/uapi/linux/ip.h, and of DEVCONF_* in include/uapi/linux/ipv6.h.
const (
	ipv4ConfForwarding      = 1  // IPV4_DEVCONF_FORWARDING
	ipv6ConfForwarding      = 0  // DEVCONF_FORWARDING
	ipv6ConfForceForwarding = 59 // DEVCONF_FORCE_FORWARDING, since Linux 6.17
)

// Forwards returns the address families that the host forwards, in the fields IPv4 and IPv6. pods has all families that
// the host forwards. router leaves out the families that only EnsureRouting has enabled, except IPv6 before Linux 6.17.
// Forwards sends one request, for the sysctls of loopback.
func (c *Conn) Forwards(ctx context.Context) (pods, router Routing, _ error) {
	lo, err := link.Find(ctx, c.nl, "", loopbackIndex, unix.IFLA_AF_SPEC)
	if err != nil {
		return pods, router, err
	}

	four, _ := lo.IPv4.At(ipv4ConfForwarding - 1)
	six, _ := lo.IPv6.At(ipv6ConfForwarding)
	forced, _ := lo.IPv6.At(ipv6ConfForceForwarding)
	pods = Routing{IPv4: four != 0, IPv6: six != 0 || forced != 0}
	router = Routing{IPv4: four != 0 && strconv.Itoa(int(four)) != sysctl.OwnForwarding, IPv6: six != 0}
	return pods, router, nil
}

// DefaultMTU returns the MTU in bytes of the link with the host's default route. If the families have different
// links, it returns the smaller MTU. It ignores the link with the name in except. If no link is left, it returns
// 1500.
func (c *Conn) DefaultMTU(ctx context.Context, except string) (int, error) {
	const ethernet = 1500
	mtu := 0
	for _, zero := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		r, err := c.Routes().Get(ctx, routing.Outside(zero))
		if route.NoRoute(err) || err == nil && r.Type != unix.RTN_UNICAST {
			continue
		}

		var l *Link
		if err == nil {
			l, err = c.LinkByIndex(ctx, r.Link)
		}

		switch {
		case errors.Is(err, fs.ErrNotExist): // skip a link that has just been deleted
		case err != nil:
			return ethernet, err
		case l.Name != except && (mtu == 0 || l.MTU < mtu):
			mtu = l.MTU
		}
	}

	return cmp.Or(mtu, ethernet), nil
}

// Uplinks returns the names of bridges and veth links that lead to the host's own network. Other such links lead to
// containers or virtual machines on the host. A bridge is an uplink if a port is hardware, a bond, a team or a VLAN, or
// if the bridge has a default route. A veth link is an uplink if it has an address with a subnet that is not
// link-local. A node that is a container has such a link. Bridges in except are skipped, since listing their ports may
// take long.
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
			if err != nil && !errors.Is(err, fs.ErrNotExist) { // skip a link that has just been deleted
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
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // skip a link that has just been deleted
			return nil, err
		}
		if err == nil && l.Kind == "veth" {
			names = append(names, l.Name)
		}
	}

	slices.Sort(names)
	return slices.Compact(names), err
}
