package uplink

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/routing"
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
