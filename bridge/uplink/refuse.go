package uplink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/route"
)

// refuse gives every reason for which the NIC cannot be taken over, each with what
// to do about it.
func (s *Snapshot) refuse(u *Uplink) error {
	var errs []error
	no := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: "+format, append([]any{ErrRefused}, args...)...))
	}
	s.refuseNIC(u, no)
	s.refuseBridge(u, no)
	s.refuseAbove(no)
	s.refuseRoutes(no)
	return errors.Join(errs...)
}

type refusal func(format string, args ...any)

// refuseNIC looks at the NIC itself.
func (s *Snapshot) refuseNIC(u *Uplink, no refusal) {
	nic := &s.NIC
	switch {
	case nic.Flags&unix.IFF_LOOPBACK != 0:
		no("%s is the loopback interface; name the NIC that leads to the LAN", nic.Name)
		return
	case nic.Type != unix.ARPHRD_ETHER:
		no("%s is not Ethernet (its type is %d), and a bridge takes nothing else; name the NIC that leads to the LAN", nic.Name, nic.Type)
		return
	case nic.Wireless:
		no("%s is a Wi-Fi interface, whose access point drops what comes from other MACs than its own; use a wired NIC", nic.Name)
	}
	switch nic.Kind {
	case "bridge":
		no("%s is a bridge itself; name one of its ports, or put pods on it as it is", nic.Name)
	case "macvlan", "macvtap", "ipvlan", "ipvtap":
		no("%s is of kind %s, which cannot carry other MACs; name the NIC that it rests on", nic.Name, nic.Kind)
	}
	if nic.Master != 0 && !(s.Bridge != nil && nic.Master == s.Bridge.Index && nic.PortOf == "bridge") {
		no("%s is a port of %s already; name that one, or take it off with `ip link set %s nomaster`", nic.Name, s.master(), nic.Name)
	} else if nic.Master != 0 {
		no("%s is a port of %s already, and no record says that its addresses were moved there; take it off with `ip link set %s nomaster`", nic.Name, u.Bridge, nic.Name)
	}
	switch {
	case !nic.Up():
		no("%s is down, and the program that manages it may want it so; set it up with `ip link set %s up`", nic.Name, nic.Name)
	case !nic.Carrier():
		no("%s has no carrier, so that nothing could be tried; see to its cable", nic.Name)
	}
}

// master names what the NIC is a port of.
func (s *Snapshot) master() string {
	for _, l := range s.Links {
		if l.Index == s.NIC.Master {
			return fmt.Sprintf("%s (%s)", l.Name, l.Kind)
		}
	}
	if s.Bridge != nil && s.Bridge.Index == s.NIC.Master {
		return fmt.Sprintf("%s (%s)", s.Bridge.Name, s.Bridge.Kind)
	}
	return fmt.Sprintf("link %d (%s)", s.NIC.Master, s.NIC.PortOf)
}

// refuseBridge looks at a bridge that is there already.
func (s *Snapshot) refuseBridge(u *Uplink, no refusal) {
	switch {
	case s.Bridge == nil:
	case s.Bridge.Kind != "bridge":
		no("%s is there and is not a bridge; choose another name for the bridge", u.Bridge)
	case s.Bridge.Master != 0:
		no("%s is a port of another link itself; choose another bridge", u.Bridge)
	case s.Bridge.STP:
		no("%s has the spanning tree protocol on, and would let nothing through for half a minute; switch it off with `ip link set %s type bridge stp_state 0`", u.Bridge, u.Bridge)
	case s.Bridge.MAC != s.NIC.MAC && len(s.otherPorts()) > 0:
		no("%s has ports and the MAC %s, and the LAN would go on looking for the host at %s; give the bridge that one with `ip link set %s address %s`, or choose another bridge",
			u.Bridge, s.Bridge.MAC, s.NIC.MAC, u.Bridge, s.NIC.MAC)
	case s.Bridge.MTU < s.NIC.MTU && s.Bridge.MTU < 1280:
		no("%s has an MTU of %d, too small for IPv6; raise it with `ip link set %s mtu %d`", u.Bridge, s.Bridge.MTU, u.Bridge, s.NIC.MTU)
	}
}

// refuseAbove looks at links that rest on the NIC. Some receive in the place where a
// bridge would, and the kernel lets one only; tunnels send by the routes of the NIC.
func (s *Snapshot) refuseAbove(no refusal) {
	for _, l := range s.Links {
		if l.Lower != s.NIC.Index {
			continue
		}
		switch l.Kind {
		case "macvlan", "macvtap", "ipvlan", "ipvtap", "macsec":
			no("%s, of kind %s, rests on %s, which cannot be a port besides; delete it, or make it anew on %s afterwards", l.Name, l.Kind, s.NIC.Name, "the bridge")
		case "vlan":
		default:
			no("the tunnel %s, of kind %s, sends by %s alone and would be cut off; make it anew without naming a link, or delete it", l.Name, l.Kind, s.NIC.Name)
		}
	}
}

// refuseRoutes looks for what this package can read, but not write in the same way
// again.
func (s *Snapshot) refuseRoutes(no refusal) {
	for _, r := range s.Rules {
		if unknown := unknownSelectors(&r); len(unknown) > 0 && (r.IIF == s.NIC.Name || r.OIF == s.NIC.Name) {
			no("rule %s has selectors that this program does not know (types %v); delete it, or name no interface in it", r, unknown)
		}
	}
	m := newMove(s, s.NIC, Link{Index: noLink})
	for _, r := range m.routes() {
		others := slices.Clone(r.Other)
		for _, h := range r.Nexthops {
			others = append(others, h.Other...)
		}
		if kind, ok := encapsulates(others); !ok {
			no("route %s encapsulates by %s, which may name a link or a program, and cannot be moved; delete it", m.names.on(r.String()), kind)
		}
	}
	for _, r := range s.byObject() {
		if r.Dst.Bits() == 0 {
			no("the default route goes by nexthop object %d, which stays on %s, and the host would be cut off; name its gateway instead", r.NexthopID, s.NIC.Name)
		}
	}
}

// encapsulates says how, and whether that can be copied as the kernel lists it: it lists
// no program of LWTUNNEL_ENCAP_BPF, and others may name a link by its index.
func encapsulates(others []netlink.Attribute) (kind string, copies bool) {
	copies = true
	for _, a := range others {
		if a.Type != unix.RTA_ENCAP_TYPE || len(a.Data) != 2 {
			continue
		}
		switch number := binary.NativeEndian.Uint16(a.Data); number {
		case lwtunnelMPLS, lwtunnelIP, lwtunnelIP6, lwtunnelSeg6:
		default:
			kind, copies = fmt.Sprintf("a tunnel of type %d", number), false
		}
	}
	return kind, copies
}

// LWTUNNEL_ENCAP_* of linux/lwtunnel.h that consist of addresses and numbers alone.
const (
	lwtunnelMPLS = 1
	lwtunnelIP   = 2
	lwtunnelIP6  = 4
	lwtunnelSeg6 = 5
)

// unknownSelectors are the types of a rule's attributes of which it is not known that
// the kernel takes them as it lists them.
func unknownSelectors(r *route.Rule) []uint16 {
	const last = 30 // FRA_DSCP_MASK, Linux 6.15
	var list []uint16
	for _, a := range r.Other {
		if typ := a.Type &^ (netlink.Nested | netlink.NetByteOrder); typ > last {
			list = append(list, typ)
		}
	}
	return list
}

// byObject are routes by nexthop objects on the NIC.
func (s *Snapshot) byObject() []route.Route {
	return slices.DeleteFunc(slices.Clone(s.Routes), func(r route.Route) bool { return r.NexthopID == 0 || !goesBy(&r, s.NIC.Index) })
}

// warn gives what goes on after a takeover, but otherwise than before.
func (s *Snapshot) warn(u *Uplink) []string {
	var list []string
	add := func(format string, args ...any) { list = append(list, fmt.Sprintf(format, args...)) }
	nic := s.NIC.Name
	if s.NIC.XDP {
		add("the XDP program on %s stays there: it goes on seeing all that comes in, now for pods too, and cannot send it on to a socket", nic)
	}
	for _, kind := range slices.Compact(slices.Clone(s.Hooks)) {
		add("the programs of qdisc %s on %s stay there: they go on seeing all packets, now those of pods too", kind, nic)
	}
	for _, l := range s.Links {
		if l.Lower == s.NIC.Index && l.Kind == "vlan" {
			add("VLAN %s stays on %s and goes on working; pods cannot reach it through the bridge", l.Name, nic)
		}
	}
	if n := len(s.Masqueraded); n > 0 {
		add("%d masqueraded connections of %s go out by %s, and may not survive: these programs have to connect again", n, addresses(slices.Compact(slices.Clone(s.Masqueraded))), nic)
	}
	if len(s.Groups) > 0 {
		add("the multicast groups %s were joined on %s and stay there: restart the mDNS, VRRP and routing daemons that joined them, and no network manager", addresses(s.Groups), nic)
	}
	for _, a := range s.Addresses {
		if a.Link == s.NIC.Index && a.Flags&addr.DADFailed != 0 {
			add("address %s is left behind: another host has it", a.Prefix)
		}
		if a.Link == s.NIC.Index && a.Prefix.Addr().Is6() && a.Flags&addr.Secondary != 0 {
			add("the temporary address %s becomes an ordinary one until its time is over", a.Prefix.Addr())
		}
	}
	for _, r := range s.byObject() {
		add("the route to %s goes by nexthop object %d, which stays on %s and leads nowhere from there: name its gateway instead", describe(&r), r.NexthopID, nic)
	}
	s.warnBridge(u, add)
	s.warnRoutes(add)
	return list
}

// warnBridge is about a bridge that was there before.
func (s *Snapshot) warnBridge(u *Uplink, add func(string, ...any)) {
	if s.Bridge == nil {
		return
	}
	if s.Bridge.MTU != s.NIC.MTU {
		add("bridge %s keeps its MTU of %d, where %s has %d", u.Bridge, s.Bridge.MTU, s.NIC.Name, s.NIC.MTU)
	}
	if s.Bridge.VLANFiltering {
		add("bridge %s filters VLANs: %s gets its default one", u.Bridge, s.NIC.Name)
	}
	if slices.ContainsFunc(s.Addresses, func(a addr.Address) bool { return a.Link == s.Bridge.Index && !a.Prefix.Addr().IsLinkLocalUnicast() }) {
		add("bridge %s has addresses of its own: they stay, and come before those of %s", u.Bridge, s.NIC.Name)
	}
}

// addresses names the first of many.
func addresses(list []netip.Addr) string {
	const most = 5
	var names []string
	for _, a := range list[:min(len(list), most)] {
		names = append(names, a.String())
	}
	if n := len(list) - most; n > 0 {
		names = append(names, fmt.Sprintf("%d others", n))
	}
	return strings.Join(names, ", ")
}

// warnRoutes is about routes that another link has in the same place.
func (s *Snapshot) warnRoutes(add func(string, ...any)) {
	m := newMove(s, s.NIC, Link{Index: noLink})
	var seen []netip.Prefix
	for _, r := range m.routes() {
		if onEachLink(&r) || slices.Contains(seen, r.Dst) || len(r.Nexthops) > 0 {
			continue
		}
		if rivals := m.rivals(&r); len(rivals) > 0 && !m.isFirst(&r) {
			seen = append(seen, r.Dst)
			add("another link has a route to %s too, of the same priority; of the two, the order is kept", describe(&r))
		}
	}
}

func describe(r *route.Route) string {
	if r.Dst.Bits() == 0 {
		return "everywhere"
	}
	return r.Dst.String()
}
