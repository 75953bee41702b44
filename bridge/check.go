package bridge

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// Check compares a pod's port and peer with what port describes, and lists the differences, none if all is as
// described. MACs are compared where they are given, the MTU where it is not 0. A nil pod leaves its side out.
//
// More than was asked for is no difference: other addresses and routes, a pod's
// interface with a smaller MTU, a route that was moved to another table.
func (c *Conn) Check(ctx context.Context, pod *netns.NS, port Port) ([]tombolo.Difference, error) {
	err := c.usable(ctx)
	if err == nil && pod != nil {
		err = c.usablePod(ctx, pod, true)
	}
	if err != nil {
		return nil, err
	}
	diffs, err := c.checkPort(ctx, &port)
	if err != nil || pod == nil {
		return diffs, err
	}
	var redirects string
	podConn, err := c.enterPod(pod, func() error {
		if !port.NoRedirects {
			return nil
		}
		var err error
		redirects, err = sysctl.Read(allRedirects)
		return err
	})
	if err != nil {
		return diffs, err
	}
	defer podConn.Close()
	more, err := checkPod(ctx, podConn, &port, redirects)
	return append(diffs, more...), err
}

// comparison collects differences of one object.
type comparison struct {
	object string
	list   []tombolo.Difference
}

func (c *comparison) missing(what, want string) {
	c.list = append(c.list, tombolo.Difference{Object: c.object, What: what, Want: want})
}

func (c *comparison) flag(what string, want, have bool) {
	if want != have {
		c.list = append(c.list, tombolo.Difference{Object: c.object, What: what, Want: onOff(want), Have: onOff(have)})
	}
}

func (c *comparison) differs(what, want, have string) {
	c.list = append(c.list, tombolo.Difference{Object: c.object, What: what, Want: want, Have: have})
}

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

// Differences compares a link, nil where there is none, with what br describes. It leaves out what br leaves open,
// and the alias, which is only given to a new bridge.
func (br *Bridge) Differences(l *Link) []tombolo.Difference {
	if br == nil {
		return nil
	}
	cmp := &comparison{object: "bridge " + br.Name}
	if l == nil {
		cmp.missing("link", br.Name)
		return cmp.list
	}
	if l.Bridge == nil {
		cmp.differs("link", "of kind bridge", describeKind(l))
		return cmp.list
	}
	if !l.Up {
		cmp.differs("link", "up", "down")
	}
	if br.MTU != 0 && br.MTU != l.MTU {
		cmp.differs("MTU", strconv.Itoa(br.MTU), strconv.Itoa(l.MTU))
	}
	if br.MAC != nil && !bytes.Equal(br.MAC, l.MAC) {
		cmp.differs("MAC", br.MAC.String(), l.MAC.String())
	}
	if br.Promiscuous != nil {
		cmp.flag("promiscuous mode", *br.Promiscuous, l.Promiscuous)
	}
	if br.NFCall != nil {
		cmp.flag("nf_call_iptables", *br.NFCall, l.Bridge.NFCallIPTables)
		cmp.flag("nf_call_ip6tables", *br.NFCall, l.Bridge.NFCallIP6Tables)
	}
	if br.VLANFiltering {
		cmp.flag("vlan_filtering", true, l.Bridge.VLANFiltering)
	}
	if br.limits(l) {
		cmp.limit("fdb_max_learned", br.MaxLearned, *l.Bridge.MaxLearned)
	}
	return cmp.list
}

func (c *Conn) checkPort(ctx context.Context, p *Port) ([]tombolo.Difference, error) {
	cmp := &comparison{object: "port " + p.Name}
	l, err := c.Link(ctx, p.Name)
	if errors.Is(err, fs.ErrNotExist) {
		return []tombolo.Difference{{Object: "port " + p.Name, What: "link", Want: p.Name}}, nil
	}
	if err != nil {
		return nil, err
	}
	if !l.Up {
		cmp.differs("link", "up", "down")
	}
	if p.MTU != 0 && l.MTU != p.MTU {
		cmp.differs("MTU", strconv.Itoa(p.MTU), strconv.Itoa(l.MTU))
	}
	if p.MAC != nil && !bytes.Equal(p.MAC, l.MAC) {
		cmp.differs("MAC", p.MAC.String(), l.MAC.String())
	}
	if p.Alias != "" && p.Alias != l.Alias {
		cmp.differs("alias", strconv.Quote(p.Alias), strconv.Quote(l.Alias))
	}
	br, err := c.Link(ctx, p.Bridge)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		cmp.missing("bridge", p.Bridge)
	case err != nil:
		return nil, err
	case br.Index != l.Master:
		cmp.missing("membership in bridge", p.Bridge)
	default:
		if !br.Up {
			cmp.list = append(cmp.list, tombolo.Difference{Object: "bridge " + p.Bridge, What: "link", Want: "up", Have: "down"})
		}
		cmp.port(p, l.Port)
		if !p.VLAN.IsZero() {
			diffs, err := c.VLANs().Check(ctx, l.Index, p.Name, p.VLAN)
			if err != nil {
				return nil, err
			}
			cmp.list = append(cmp.list, diffs...)
		}
		if err := cmp.staticFDB(ctx, c, p, l.Index); err != nil {
			return nil, err
		}
	}
	cmp.hostEnd(l)
	return cmp.list, nil
}

func (c *comparison) port(p *Port, have *PortState) {
	if have == nil {
		return
	}
	c.flag("hairpin", p.Hairpin, have.Hairpin)
	c.flag("isolation", p.Isolated, have.Isolated)
	c.flag("forwarding of link-local groups", p.ForwardGroups, have.ForwardGroups)
	c.flag("learning", !p.NoLearning, have.Learning)
	c.flag("flood", !p.NoFlood, have.Flood)
	c.flag("multicast flood", !p.NoMulticastFlood, have.MulticastFlood)
}

func (c *comparison) limit(what string, want, have uint32) {
	if want != have {
		c.differs(what, strconv.FormatUint(uint64(want), 10), strconv.FormatUint(uint64(have), 10))
	}
}

// checkPod gets IPv4's accept_redirects of all interfaces along, if it is to be
// compared.
func checkPod(ctx context.Context, podConn *nl.Conn, p *Port, redirects string) ([]tombolo.Difference, error) {
	cmp := &comparison{object: "interface " + p.Peer}
	l, err := link.Find(podConn, p.Peer)
	if errors.Is(err, fs.ErrNotExist) {
		return []tombolo.Difference{{Object: "pod", What: "interface", Want: p.Peer}}, nil
	}
	if err != nil {
		return nil, err
	}
	if !l.Up() && !p.Down {
		cmp.differs("link", "up", "down")
	}
	if p.MTU != 0 && l.MTU > p.MTU {
		// A smaller one is a chained plugin's choice; a larger one loses packets.
		cmp.differs("MTU", strconv.Itoa(p.MTU), strconv.Itoa(l.MTU))
	}
	if p.PeerMAC != nil && !bytes.Equal(p.PeerMAC, l.MAC) {
		cmp.differs("MAC", p.PeerMAC.String(), l.MAC.String())
	}
	cmp.parameters(p, l, redirects)
	if err := cmp.addresses(ctx, podConn, p, l.Index); err != nil {
		return nil, err
	}
	if err := cmp.routes(ctx, podConn, p); err != nil {
		return nil, err
	}
	return cmp.list, nil
}

func (c *comparison) addresses(ctx context.Context, podConn *nl.Conn, p *Port, index int) error {
	if len(p.Addresses) == 0 && p.Autoconf == nil {
		return nil
	}
	have, err := addr.On(podConn).List(ctx, addr.Filter{Link: index})
	if err != nil {
		return err
	}
wanted:
	for _, want := range p.Addresses {
		for _, a := range have {
			if a.Prefix == want {
				continue wanted
			}
		}
		c.missing("address", want.String())
	}
	formed := func(a addr.Address) bool { return a.Protocol == addr.ProtocolRA && a.Flags&unix.IFA_F_TENTATIVE == 0 }
	if p.Autoconf != nil && !p.Autoconf.AddressOptional && !slices.ContainsFunc(have, formed) {
		c.missing("address", "by router advertisement")
	}
	return nil
}

func (c *comparison) routes(ctx context.Context, podConn *nl.Conn, p *Port) error {
	if len(p.Routes) == 0 {
		return nil
	}
	missing, err := missingRoutes(ctx, route.On(podConn), p.Routes)
	for _, want := range missing {
		c.missing("route", want.String())
	}
	return err
}

// missingRoutes gives those that are in no table, and could be. It keeps none of the pod's, which may have any number.
func missingRoutes(ctx context.Context, pod *route.Conn, wanted []route.Route) ([]route.Route, error) {
	missing := slices.Clone(wanted)
	var own []netip.Addr // of the wanted ones' sources, those that the pod has
	err := pod.Walk(ctx, route.Filter{}, func(r route.Route) {
		isSource := func(want route.Route) bool { return want.Source == r.Dst.Addr() }
		if r.Type == unix.RTN_LOCAL && slices.ContainsFunc(wanted, isSource) {
			own = append(own, r.Dst.Addr())
		}
		missing = slices.DeleteFunc(missing, func(want route.Route) bool { return sameRoute(want, r) })
	})
	if err != nil {
		return nil, err
	}
	// Without the address, which is missing itself, the kernel takes no route from there.
	return slices.DeleteFunc(missing, func(want route.Route) bool {
		return want.Source.IsValid() && !slices.Contains(own, want.Source)
	}), nil
}

// destination spells the default route's out, which may be left open.
func destination(r route.Route) netip.Prefix {
	if r.Dst.IsValid() {
		return r.Dst.Masked()
	}
	if r.Gateway.Is4() || r.Family == unix.AF_INET {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
}

// sameRoute looks at where a route leads, and not at the table: source-based
// routing moves routes from one to another.
func sameRoute(want, have route.Route) bool {
	toGateway := func(hop route.Nexthop) bool { return hop.Gateway == want.Gateway }
	return destination(want) == destination(have) &&
		(!want.Gateway.IsValid() || want.Gateway == have.Gateway || slices.ContainsFunc(have.Nexthops, toGateway)) &&
		(want.Priority == 0 || want.Priority == have.Priority) &&
		(want.MTU == 0 || want.MTU == have.MTU) &&
		(want.AdvMSS == 0 || want.AdvMSS == have.AdvMSS)
}
