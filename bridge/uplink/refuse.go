package uplink

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/route"
)

// refuse gives every reason for which the NIC cannot be taken over, each with what
// to do about it.
func (s *snapshot) refuse(u *Uplink) error {
	var errs []error
	no := func(is bool, format string, args ...any) {
		if is {
			errs = append(errs, fmt.Errorf("%w: "+format, append([]any{ErrRefused}, args...)...))
		}
	}
	s.refuseNIC(no)
	no(s.Bridge != nil && s.NIC.Master == 0, "%s is there already; have your system make %s a port of it, with the host's addresses on %s, or delete it (ip link delete %s), or name another bridge", u.Bridge, u.NIC, u.Bridge, u.Bridge)
	s.refuseAbove(no)
	s.refuseRoutes(no)
	return errors.Join(errs...)
}

type refusal func(is bool, format string, args ...any)

// refuseNIC looks at the NIC itself.
func (s *snapshot) refuseNIC(no refusal) {
	nic := &s.NIC
	no(nic.Type != unix.ARPHRD_ETHER, "%s is not Ethernet (its type is %d), and a bridge takes nothing else; name the NIC that leads to the LAN", nic.Name, nic.Type)
	no(nic.Wireless, "%s is a Wi-Fi interface, whose access point drops what comes from other MACs than its own; use a wired NIC", nic.Name)
	switch nic.Kind {
	case "bridge":
		no(true, "%s is a bridge itself; name one of its ports, or put pods on it as it is", nic.Name)
	case "macvlan", "macvtap", "ipvlan", "ipvtap":
		no(true, "%s is of kind %s, which cannot carry other MACs; name the NIC that it rests on", nic.Name, nic.Kind)
	}
	on := s.master()
	onBridge := nic.PortOf == "bridge"
	no(onBridge, "%s is a port of bridge %s already, which networks use as it is: name that one, and nothing is taken over", nic.Name, on)
	no(nic.Master != 0 && !onBridge, "%s is a port of %s (%s) already; name %s as the NIC", nic.Name, on, nic.PortOf, on)
	no(!nic.Up(), "%s is down, and the program that manages it may want it so; set it up with `ip link set %s up`", nic.Name, nic.Name)
	no(nic.Up() && nic.Flags&unix.IFF_LOWER_UP == 0, "%s has no carrier, so that nothing could be tried; see to its cable", nic.Name)
}

// master names what the NIC is a port of.
func (s *snapshot) master() string {
	if s.Bridge != nil && s.Bridge.Index == s.NIC.Master {
		return s.Bridge.Name
	}
	for _, l := range s.Links {
		if l.Index == s.NIC.Master {
			return l.Name
		}
	}
	return fmt.Sprintf("link %d", s.NIC.Master)
}

// refuseAbove looks at links that rest on the NIC. Some receive in the place where a
// bridge would, and the kernel lets one only; tunnels send by the routes of the NIC.
func (s *snapshot) refuseAbove(no refusal) {
	for _, l := range s.Links {
		if l.Lower != s.NIC.Index {
			continue
		}
		switch l.Kind {
		case "macvlan", "macvtap", "ipvlan", "ipvtap", "macsec":
			no(true, "%s, of kind %s, rests on %s, which cannot be a port besides; delete it, or make it anew on the bridge afterwards", l.Name, l.Kind, s.NIC.Name)
		case "vlan":
		default:
			no(true, "the tunnel %s, of kind %s, sends by %s alone and would be cut off; make it anew without naming a link, or delete it", l.Name, l.Kind, s.NIC.Name)
		}
	}
}

// refuseRoutes looks for routes by which the host would be cut off.
func (s *snapshot) refuseRoutes(no refusal) {
	for _, r := range s.byObject() {
		no(r.Dst.Bits() == 0, "the default route goes by nexthop object %d, which stays on %s, and the host would be cut off; name its gateway instead", r.NexthopID, s.NIC.Name)
	}
	for _, r := range s.Behind {
		no(true, "another link has a route to %s too, with the same metric, and would come first; give one of the two another metric", describe(&r))
	}
}

// byObject are routes by nexthop objects on the NIC.
func (s *snapshot) byObject() []route.Route {
	return slices.DeleteFunc(slices.Clone(s.Routes), func(r route.Route) bool { return r.NexthopID == 0 || !goesBy(&r, s.NIC.Index) })
}

// warn gives what goes on after a takeover, but otherwise than before.
func (s *snapshot) warn() []string {
	var list []string
	add := func(is bool, format string, args ...any) {
		if is {
			list = append(list, fmt.Sprintf(format, args...))
		}
	}
	nic := s.NIC.Name
	for _, l := range s.Links {
		add(l.Lower == s.NIC.Index && l.Kind == "vlan", "VLAN %s stays on %s and goes on working; pods cannot reach it through the bridge", l.Name, nic)
	}
	add(len(s.Masqueraded) > 0, "%d masqueraded connections of %s go out by %s, and may not survive: these programs have to connect again",
		len(s.Masqueraded), addresses(slices.Compact(slices.Clone(s.Masqueraded))), nic)
	add(len(s.Groups) > 0, "the multicast groups %s were joined on %s and stay there: restart the mDNS, VRRP and routing daemons that joined them, and no network manager", addresses(s.Groups), nic)
	for _, a := range s.Addresses {
		temporary := a.Link == s.NIC.Index && a.Prefix.Addr().Is6() && a.Flags&unix.IFA_F_SECONDARY != 0
		add(temporary, "the temporary address %s becomes an ordinary one until its time is over", a.Prefix.Addr())
	}
	for _, r := range s.byObject() {
		add(true, "the route to %s goes by nexthop object %d, which stays on %s and leads nowhere from there: name its gateway instead", describe(&r), r.NexthopID, nic)
	}
	return list
}

// addresses names the first of many.
func addresses(list []netip.Addr) string {
	const most = 5
	names := printable.List(list[:min(len(list), most)], ", ")
	if n := len(list) - most; n > 0 {
		names += fmt.Sprintf(", %d others", n)
	}
	return names
}

func describe(r *route.Route) string {
	if r.Dst.Bits() == 0 {
		return "everywhere"
	}
	return r.Dst.String()
}
