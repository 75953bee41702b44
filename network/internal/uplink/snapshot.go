package uplink

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/route"
)

// snapshot is the state of a NIC and its bridge at one moment, as far as planning needs it. It is stored as JSON.
type snapshot struct {
	NIC link.Info `json:"nic"`
	// Wireless is true if the NIC is a wireless device.
	Wireless bool `json:"wireless,omitempty"`
	// Bridge is nil if no link has the bridge's name.
	Bridge *link.Info `json:"bridge,omitempty"`
	// Links are the links on top of the NIC, the link that has the NIC as a port, and other ports of the bridge.
	Links []link.Info `json:"links,omitempty"`
	// Addresses are the addresses of the NIC and the bridge, in the kernel's order.
	Addresses []addr.Address `json:"addresses,omitempty"`
	// Routes are the routes of all tables through the NIC or the bridge, in the kernel's order. Routes that the
	// kernel added by itself are left out.
	Routes []route.Route `json:"routes,omitempty"`
	// Behind are IPv4 routes through other links in the same place as a route in Routes (see place). Now the kernel
	// prefers the route in Routes. After the move it would prefer the route in Behind.
	Behind []route.Route `json:"behind,omitempty"`
	// Neighbours are the neighbours on the NIC and the bridge.
	Neighbours []routing.NeighbourEntry `json:"neighbours,omitempty"`
	// Rules are the policy routing rules that name the NIC. Such a rule is a reason to refuse the takeover.
	Rules []routing.Rule `json:"rules,omitempty"`
}

// snapshot reads the present state of a NIC and a bridge. The bridge need not exist.
func (c *Conn) snapshot(ctx context.Context, nic, bridge string) (*snapshot, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}

	s := &snapshot{}
	if err := c.lookLinks(s, nic, bridge); err != nil {
		return nil, err
	}

	addresses, err := c.addrs.List(ctx, addr.Filter{})
	s.Addresses = slices.DeleteFunc(addresses, func(a addr.Address) bool { return !s.owns(a.Link) })
	neighbours, neighboursErr := routing.Neighbours(c.nl)
	s.Neighbours = slices.DeleteFunc(neighbours,
		func(n routing.NeighbourEntry) bool { return !s.owns(n.Link) || n.Addr.IsMulticast() })
	rules, rulesErr := routing.Rules(c.nl)
	s.Rules = slices.DeleteFunc(rules, func(r routing.Rule) bool { return r.IIF != nic && r.OIF != nic })
	if err := errors.Join(err, neighboursErr, rulesErr, c.lookRoutes(ctx, s)); err != nil {
		return nil, fmt.Errorf("look at %s: %w", nic, err)
	}

	return s, nil
}

// lookLinks finds the NIC, the bridge, and the links that depend on them.
func (c *Conn) lookLinks(s *snapshot, nic, bridge string) error {
	var links []link.Info
	err := link.List(c.nl, "list links", "", 0, func(l *link.Info) {
		one := link.Info{
			Index: l.Index, Name: l.Name, Kind: l.Kind, Type: l.Type, MAC: l.MAC, MTU: l.MTU, Flags: l.Flags,
			Master: l.Master, PortOf: l.PortOf, Lower: l.Lower,
		}
		if l.Elsewhere || l.Kind == "veth" {
			one.Lower = 0 // an index of another namespace, or the other end
		}

		switch links = append(links, one); l.Name {
		case nic:
			s.NIC = one
		case bridge:
			s.Bridge = &one
		}
	})
	if err != nil {
		return err
	}

	if s.NIC.Index == 0 {
		return &tombolo.OpError{Op: "find link", Object: nic, Err: fs.ErrNotExist}
	}

	for _, l := range links {
		isPort := s.Bridge != nil && l.Master == s.Bridge.Index && l.Index != s.NIC.Index
		if isPort || l.Lower == s.NIC.Index || l.Index == s.NIC.Master {
			s.Links = append(s.Links, l)
		}
	}

	// A NIC with the entry phy80211 is a wireless device. sysfs shows the links of the namespace in whose context it
	// was mounted, so in another namespace Wireless may be false.
	_, err = os.Stat("/sys/class/net/" + nic + "/phy80211")
	s.Wireless = err == nil
	return nil
}

// owns reports whether a link is the NIC or the bridge.
func (s *snapshot) owns(index int) bool {
	return index == s.NIC.Index || s.Bridge != nil && index == s.Bridge.Index
}

func (c *Conn) lookRoutes(ctx context.Context, s *snapshot) error {
	all, err := c.routes.List(ctx, route.Filter{})
	places := map[place]bool{}
	for _, r := range all {
		switch {
		case isKernelsOwn(&r):
		case usesLink(&r, s.NIC.Index), s.Bridge != nil && usesLink(&r, s.Bridge.Index):
			s.Routes = append(s.Routes, r)
			places[placeKey(&r)] = true
		case r.Family == unix.AF_INET && places[placeKey(&r)]:
			s.Behind = append(s.Behind, r)
		}
	}

	return err
}

// address returns the link's entry for an address, or nil.
func (s *snapshot) address(index int, a addr.Address) *addr.Address {
	for i := range s.Addresses {
		if have := &s.Addresses[i]; have.Link == index && have.Prefix == a.Prefix && have.Peer == a.Peer {
			return have
		}
	}
	return nil
}

// refuse returns an error with all reasons why the NIC cannot be taken over, each with advice.
func (s *snapshot) refuse(u *Uplink) error {
	var errs []error
	no := func(is bool, format string, args ...any) {
		if is {
			errs = append(errs, fmt.Errorf("%w: %s", ErrRefused, fmt.Sprintf(format, args...)))
		}
	}
	s.refuseNIC(no)
	no(s.Bridge != nil && s.NIC.Master == 0,
		"%s is there already; have your system make %s a port of it, with the host's addresses on %s, or delete it "+
			"(ip link delete %s), or name another bridge", u.Bridge, u.NIC, u.Bridge, u.Bridge)
	s.refuseManaged(no, u)
	s.refuseAbove(no)
	s.refuseRoutes(no)
	return errors.Join(errs...)
}

type refusal func(is bool, format string, args ...any)

// refuseNIC adds the reasons that lie in the NIC itself, such as its kind or a missing carrier.
func (s *snapshot) refuseNIC(no refusal) {
	nic := &s.NIC
	no(nic.Type != unix.ARPHRD_ETHER,
		"%s is not Ethernet (its type is %d), and a bridge takes nothing else; name the NIC that leads to the LAN",
		nic.Name, nic.Type)
	no(s.Wireless,
		"%s is a Wi-Fi interface, whose access point drops what comes from other MACs than its own; use a wired NIC",
		nic.Name)
	no(nic.Kind == "bridge", "%s is a bridge itself; name one of its ports, or put pods on it as it is", nic.Name)
	no(isChild(nic.Kind), "%s is of kind %s, which cannot carry other MACs; name the NIC that it rests on", nic.Name,
		nic.Kind)

	masterName := fmt.Sprintf("link %d", nic.Master)
	for _, l := range s.Links {
		if l.Index == nic.Master {
			masterName = l.Name
		}
	}

	no(nic.PortOf == "bridge", "%s is a port of bridge %s already, which networks use as it is: name that one, and "+
		"nothing is taken over", nic.Name, masterName)
	no(nic.Master != 0 && nic.PortOf != "bridge", "%s is a port of %s (%s) already; name %[2]s as the NIC", nic.Name,
		masterName, nic.PortOf)
	no(!nic.Up(), "%s is down, and the program that manages it may want it so; set it up with `ip link set %[1]s up`",
		nic.Name)
	no(nic.Up() && nic.Flags&unix.IFF_LOWER_UP == 0,
		"%s has no carrier, so that nothing could be tried; see to its cable", nic.Name)
}

// isChild reports whether a link of the kind takes its frames from another link, which then cannot be a bridge's
// port.
func isChild(kind string) bool {
	return slices.Contains([]string{"macvlan", "macvtap", "ipvlan", "ipvtap"}, kind)
}

// refuseManaged adds a reason against the takeover if a DHCP client or router advertisements configured the NIC. It
// finds this by addresses with a limited lifetime, and by the default route. As a port of a bridge the NIC no longer
// receives DHCP and router advertisements, so the host would lose these settings.
func (s *snapshot) refuseManaged(no refusal, u *Uplink) {
	var lifetimes []string
	for _, a := range s.Addresses {
		if a.Link == s.NIC.Index && a.Valid != nil && !a.Prefix.Addr().IsLinkLocalUnicast() {
			lifetimes = append(lifetimes, fmt.Sprintf("the address %s for a limited time", a.Prefix))
		}
	}

	for _, r := range s.Routes {
		learnt := r.Protocol == unix.RTPROT_DHCP || r.Protocol == unix.RTPROT_RA || r.Expires != nil
		if usesLink(&r, s.NIC.Index) && r.Dst.Bits() == 0 && learnt {
			lifetimes = append(lifetimes, fmt.Sprintf("its default route by %s", r.Gateway))
		}
	}

	no(len(lifetimes) > 0, "a DHCP client or router advertisements gave %s %s, and no program would renew that on %s; "+
		"mode \"lan\" shares %s without taking it, and its manager goes on: leave it out of any bridge, and name it "+
		"as the network's uplink",
		u.NIC, strings.Join(lifetimes, ", "), u.Bridge, u.NIC)
}

// refuseStale adds a reason for each route whose gateway is no longer in a network of the NIC. The kernel would not
// accept such a route again.
func (s *snapshot) refuseStale(no refusal) {
	nic := s.NIC.Index
	for _, r := range s.Routes {
		if r.Link != nic || !r.Gateway.IsValid() || r.OnLink || r.Gateway.IsLinkLocalUnicast() {
			continue
		}

		near := slices.ContainsFunc(s.Addresses, func(a addr.Address) bool {
			return a.Link == nic && (a.Peer == r.Gateway || !a.Peer.IsValid() && a.Prefix.Contains(r.Gateway))
		}) || slices.ContainsFunc(s.Routes, func(to route.Route) bool {
			return to.Link == nic && !to.Gateway.IsValid() && to.Dst.Bits() > 0 && to.Dst.Contains(r.Gateway)
		})
		family, to := "", r.Dst.String()
		if r.Gateway.Is6() {
			family = "-6 "
		}
		if r.Dst.Bits() == 0 {
			to = "default"
		}
		no(!near, "the route to %s goes by %s, which is in no network of %s any more, so the kernel would not take "+
			"it on the bridge; delete it (ip %sroute delete %s via %[2]s dev %[3]s)", describe(&r), r.Gateway,
			s.NIC.Name, family, to)
	}
}

// refuseAbove adds a reason for each link on top of the NIC, except VLANs, which go on working. Some links receive at
// the point where a bridge would, and the kernel permits only one receiver. Tunnels send through the NIC alone, and
// would be cut off.
func (s *snapshot) refuseAbove(no refusal) {
	for _, l := range s.Links {
		if l.Lower != s.NIC.Index || l.Kind == "vlan" {
			continue
		}
		receives := isChild(l.Kind) || l.Kind == "macsec"
		no(receives, "%s, of kind %s, rests on %s, which cannot be a port besides; delete it, or make it anew on the "+
			"bridge afterwards", l.Name, l.Kind, s.NIC.Name)
		no(!receives, "the tunnel %s, of kind %s, sends by %s alone and would be cut off; make it anew without naming "+
			"a link, or delete it", l.Name, l.Kind, s.NIC.Name)
	}
}

// refuseRoutes adds reasons for routes and rules whose loss would cut the host off.
func (s *snapshot) refuseRoutes(no refusal) {
	for _, r := range s.Routes {
		no(r.NexthopID != 0 && usesLink(&r, s.NIC.Index),
			"the route to %s goes by nexthop object %d, which stays on %s and leads nowhere from there; name its "+
				"gateway instead",
			describe(&r), r.NexthopID, s.NIC.Name)
	}

	for _, r := range s.Rules {
		no(true, "the rule %q names %s, which packets no longer come in by; delete it, and add it for the bridge "+
			"afterwards", r, s.NIC.Name)
	}

	s.refuseStale(no)
	for _, r := range s.Behind {
		no(true, "another link has a route to %s too, with the same metric, and would come first; give one of the "+
			"two another metric", describe(&r))
	}
}

// describe returns a route's destination for a message.
func describe(r *route.Route) string {
	if r.Dst.Bits() == 0 {
		return "everywhere"
	}
	return r.Dst.String()
}

// copySettings copies the kernel parameters (conf and neigh) of a NIC to a bridge. It leaves out parameters that cannot
// be read, or that a bridge does not have, and the parameters in others, such as those of setSourceChecks.
func copySettings(nic, bridge string) error {
	const root = "/proc/sys/"
	others := []string{"base_reachable_time", "retrans_time", "unres_qlen", // others show these values in a better unit
		"mc_forwarding", "stable_secret", "addr_gen_mode", "mtu", "rp_filter", "arp_filter"}
	paths, _ := filepath.Glob(root + "net/ipv?/*/" + nic + "/*")
	var errs []error
	for _, path := range paths {
		from := strings.TrimPrefix(path, root)
		value, err := sysctl.Read(from)
		if err != nil || slices.Contains(others, filepath.Base(path)) {
			continue
		}
		to := strings.Replace(from, "/"+nic+"/", "/"+bridge+"/", 1)
		if _, err := sysctl.Ensure(to, value); !isGone(err) {
			errs = append(errs, err)
		}
	}

	return errors.Join(errs...)
}

// setSourceChecks gives a bridge the NIC's parameters rp_filter and arp_filter. Without a NIC it sets loose ones. These
// are for the time when packets come in by the bridge and their replies leave by the NIC, or the reverse. A strict
// source check would then drop these packets, and arp_filter would leave ARP requests unanswered.
func setSourceChecks(bridge, nic string) (err error) {
	for name, value := range map[string]string{"rp_filter": "2", "arp_filter": "0"} {
		if nic != "" {
			value, err = sysctl.Read(sysctl.Link("ipv4", nic, name))
		}
		if err == nil {
			_, err = sysctl.Ensure(sysctl.Link("ipv4", bridge, name), value)
		}
		if err != nil && !isGone(err) {
			return err
		}
	}

	return nil
}
