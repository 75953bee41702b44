package uplink

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/route"
)

// Snapshot is all that planning has to know of a NIC, of the bridge that it is to
// be a port of, and of what has to do with either, at one moment. It can be
// recorded as JSON.
type Snapshot struct {
	// Time is when it was taken: lifetimes count from here.
	Time time.Time `json:"time"`
	NIC  Link      `json:"nic"`
	// Bridge is nil where there is no link of that name. Whether it is a bridge is for
	// the plan to look at.
	Bridge *Link `json:"bridge,omitempty"`
	// Links are those that rest on the NIC or the bridge, that which has the NIC as a
	// port, and other ports of the bridge.
	Links []Link `json:"links,omitempty"`
	// Addresses are the NIC's and the bridge's, in the kernel's order.
	Addresses []addr.Address `json:"addresses,omitempty"`
	// Routes are those of all tables that go by the NIC or the bridge, and those by
	// other links that have the same destination, priority and table as one of these;
	// in the kernel's order, which decides between them.
	Routes []route.Route `json:"routes,omitempty"`
	// Rules are those that name the NIC or the bridge.
	Rules []route.Rule `json:"rules,omitempty"`
	// Neighbours are the NIC's and the bridge's, those included that they answer for.
	Neighbours []route.Neighbour `json:"neighbours,omitempty"`
	// Settings are kernel parameters by their path below /proc/sys/net: those of the
	// NIC and of the bridge, and those of all links that matter; and without a bridge those
	// that a new link gets ("ipv4/conf/default/rp_filter") where the NIC has others.
	Settings map[string]string `json:"settings,omitempty"`
	// Hooks are the queueing disciplines of the NIC that run programs: "clsact",
	// "ingress".
	Hooks []string `json:"hooks,omitempty"`
	// Groups are the multicast groups that programs joined on the NIC.
	Groups []netip.Addr `json:"groups,omitempty"`
	// Masqueraded are the sources of flows that are translated to addresses of the NIC, one
	// for each flow.
	Masqueraded []netip.Addr `json:"masqueraded,omitempty"`
}

// Snapshot looks at a NIC and at a bridge, which need not be there. It changes
// nothing, and needs CAP_NET_ADMIN to see flows. The error matches
// fs.ErrNotExist where there is no such NIC.
func (c *Conn) Snapshot(ctx context.Context, nic, bridge string) (*Snapshot, error) {
	if err := c.usable(ctx); err != nil {
		return nil, err
	}
	s, err := c.whole(ctx, nic, bridge)
	if err == nil {
		err = c.lookFlows(ctx, s)
	}
	return s, err
}

// whole is Snapshot without flows, of which a plan alone tells.
func (c *Conn) whole(ctx context.Context, nic, bridge string) (*Snapshot, error) {
	s, err := c.look(ctx, nic, bridge)
	if err != nil {
		return nil, err
	}
	if s.Hooks, err = c.hooks(ctx, s.NIC.Index); err != nil {
		return nil, err
	}
	names := []string{nic}
	if s.Bridge != nil {
		names = append(names, bridge)
	}
	err = c.ns.Do(func() error {
		var err error
		s.NIC.Wireless = isWireless(nic, s.NIC.Index)
		if s.Settings, err = readSettings(names); err != nil {
			return err
		}
		if s.Bridge == nil {
			if err := readDefaults(s.Settings, nic); err != nil {
				return err
			}
		}
		s.Groups, err = readGroups(nic)
		return err
	})
	return s, err
}

// look is whole without what is read from /proc: what changes from step to step.
func (c *Conn) look(ctx context.Context, nic, bridge string) (*Snapshot, error) {
	s := &Snapshot{Time: time.Now()}
	links, err := c.links(ctx)
	if err != nil {
		return nil, err
	}
	found := find(links, nic)
	if found == nil {
		return nil, &tombolo.OpError{Op: "find link", Object: nic, Err: fs.ErrNotExist}
	}
	s.NIC, s.Bridge = *found, find(links, bridge)
	for _, l := range links {
		if s.concerns(&l) {
			s.Links = append(s.Links, l)
		}
	}
	for _, step := range []func(context.Context) error{
		func(context.Context) error { return c.lookAddresses(s) },
		func(context.Context) error { return c.lookRoutes(s) },
		func(context.Context) error { return c.lookNeighbours(s) },
	} {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if err := step(ctx); err != nil {
			return nil, fmt.Errorf("look at %s: %w", nic, err)
		}
	}
	return s, nil
}

// concerns says which other links are kept.
func (s *Snapshot) concerns(l *Link) bool {
	switch {
	case l.Index == s.NIC.Index, s.Bridge != nil && l.Index == s.Bridge.Index:
		return false
	case l.Lower == s.NIC.Index, l.Index == s.NIC.Master:
		return true
	}
	return s.Bridge != nil && (l.Master == s.Bridge.Index || l.Lower == s.Bridge.Index)
}

// own gives the indexes of the NIC and of the bridge.
func (s *Snapshot) own() []int {
	if s.Bridge == nil {
		return []int{s.NIC.Index}
	}
	return []int{s.NIC.Index, s.Bridge.Index}
}

func (c *Conn) lookAddresses(s *Snapshot) error {
	for _, link := range s.own() {
		list, err := c.addrs.List(addr.Filter{Link: link})
		if err != nil {
			return err
		}
		s.Addresses = append(s.Addresses, list...)
	}
	return nil
}

// lookRoutes takes all routes of the namespace: the kernel could pick those by a
// link, but not those that share a place with them.
func (c *Conn) lookRoutes(s *Snapshot) error {
	all, err := c.routes.List(route.Filter{})
	if err != nil {
		return err
	}
	s.Routes = keepRoutes(all, s.own())
	rules, err := c.routes.Rules(unix.AF_UNSPEC)
	if err != nil {
		return err
	}
	for _, r := range rules {
		if s.named(r.IIF) || s.named(r.OIF) {
			s.Rules = append(s.Rules, r)
		}
	}
	return nil
}

// named says that a rule's name is the NIC's or the bridge's, there or not.
func (s *Snapshot) named(link string) bool {
	return link != "" && (link == s.NIC.Name || s.Bridge != nil && link == s.Bridge.Name)
}

// keepRoutes gives the routes by the links, and those in the same place.
func keepRoutes(all []route.Route, links []int) []route.Route {
	ours := func(r *route.Route) bool {
		return slices.ContainsFunc(links, func(l int) bool { return goesBy(r, l) })
	}
	places := map[place]bool{}
	for i := range all {
		if r := &all[i]; !isLocal(r) && !onEachLink(r) && ours(r) {
			places[placeOf(r)] = true
		}
	}
	return slices.DeleteFunc(all, func(r route.Route) bool {
		return isLocal(&r) || !places[placeOf(&r)] && !ours(&r)
	})
}

func (c *Conn) lookNeighbours(s *Snapshot) error {
	for _, link := range s.own() {
		for _, proxy := range []bool{false, true} {
			list, err := c.routes.Neighbours(route.NeighbourFilter{Link: link, Proxy: proxy})
			if err != nil {
				return err
			}
			for _, n := range list {
				if !n.Addr.IsMulticast() && n.Link == link {
					s.Neighbours = append(s.Neighbours, n)
				}
			}
		}
	}
	return nil
}

// isGone says that an error means that something is not there.
func isGone(err error) bool { return errors.Is(err, fs.ErrNotExist) }
