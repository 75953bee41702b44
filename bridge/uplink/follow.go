package uplink

import (
	"bytes"
	"context"
	"encoding/json"
	"net/netip"
	"slices"
	"sort"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/route"
)

// Present gives the record as it would be if the NIC was taken over now: with the
// addresses, routes and rules that the host has on the bridge by now,
// because its lease or its administrator changed them. The caller that keeps it (Record.Save, in
// the place of the one before, under the lock that goes with it) has a later Mend put
// those back that were there last, and not those of the day of the takeover.
//
// It is the very record that was given where there is nothing new, or where the takeover
// is undone in part: then Mend is first. It changes nothing.
func (c *Conn) Present(ctx context.Context, rec *Record) (*Record, error) {
	if err := c.taken(ctx, rec); err != nil {
		return nil, err
	}
	s, err := c.look(ctx, rec.NIC, rec.Bridge)
	if err != nil {
		return nil, err
	}
	if len(s.differences(rec)) > 0 {
		return rec, nil
	}
	before := s.asBefore(rec)
	if !isNews(&rec.Before, before) {
		return rec, nil
	}
	n := *rec
	n.Before = *before
	return &n, nil
}

// HostAddresses are those that the host had, by the record, without link-local ones.
func (r *Record) HostAddresses() []netip.Prefix {
	if r == nil {
		return nil
	}
	var list []netip.Prefix
	for _, a := range r.Before.Addresses {
		if a.Link == r.Before.NIC.Index && !a.Prefix.Addr().IsLinkLocalUnicast() && !slices.Contains(list, a.Prefix) {
			list = append(list, a.Prefix)
		}
	}
	sort.Slice(list, func(i, j int) bool { return list[i].Compare(list[j]) < 0 })
	return list
}

// Save writes the record by a journal.
func (r *Record) Save(j Journal) error {
	if r == nil || j == nil {
		return missing("record or journal")
	}
	return r.save(j)
}

// asBefore is what a record would have of before, were the NIC taken over now. What the
// bridge had of its own then is its own still.
func (s *Snapshot) asBefore(rec *Record) *Snapshot {
	old := &rec.Before
	var stays *Snapshot
	if rec.MadeBridge || old.Bridge == nil {
		stays = &Snapshot{}
	} else {
		stays = old.onlyOf(old.Bridge.Index)
	}
	nic, have := old.NIC.Index, s.onlyOf(s.Bridge.Index)
	n := *old
	n.Time = s.Time
	back := &move{s: &Snapshot{}, from: *s.Bridge, to: Link{Index: nic, Name: rec.NIC}}
	n.Addresses = slices.Clone(stays.Addresses)
	for _, a := range have.Addresses {
		if stays.atAll(a) || isLinkLocal6(a) && old.address(nic, a) == nil {
			continue
		}
		a.Link, a.Label = nic, back.label(a.Label)
		n.Addresses = append(n.Addresses, a)
	}
	n.Routes = slices.Clone(stays.Routes)
	for _, r := range have.Routes {
		if !slices.ContainsFunc(stays.Routes, r.Matches) {
			n.Routes = append(n.Routes, back.movedRoute(&r))
		}
	}
	n.Rules = slices.Clone(stays.Rules)
	for _, r := range have.Rules {
		if !slices.ContainsFunc(stays.Rules, func(own route.Rule) bool { return own.Family == r.Family && own.String() == r.String() }) {
			r.IIF, r.OIF = back.rename(r.IIF), back.rename(r.OIF)
			n.Rules = append(n.Rules, r)
		}
	}
	return &n
}

// atAll says that there is an address, on whichever link.
func (s *Snapshot) atAll(a addr.Address) bool {
	return slices.ContainsFunc(s.Addresses, func(have addr.Address) bool { return have.Prefix == a.Prefix && have.Peer == a.Peer })
}

// isNews says that what a snapshot would put on record is not on record yet. Lifetimes
// count only where those on record are half over: they are renewed all the time.
func isNews(was, is *Snapshot) bool {
	a, errA := json.Marshal(was.lasting())
	b, errB := json.Marshal(is.lasting())
	if errA != nil || errB != nil || !bytes.Equal(a, b) {
		return true
	}
	passed := is.Time.Sub(was.Time)
	for _, now := range is.Addresses {
		then := was.address(now.Link, now)
		if then != nil && then.Valid != nil && now.Valid != nil && (*then.Valid-passed)*2 < *now.Valid {
			return true
		}
	}
	return false
}

// lasting is a snapshot's layer 3 without what runs with the clock, and without what the
// kernel tells of its own accord.
func (s *Snapshot) lasting() *Snapshot {
	n := &Snapshot{}
	for _, a := range s.Addresses {
		a.Valid, a.Preferred = hasEnd(a.Valid), hasEnd(a.Preferred)
		a.Flags &= addr.NoPrefixRoute
		n.Addresses = append(n.Addresses, a)
	}
	for _, r := range s.Routes {
		r.Expires, r.Flags = hasEnd(r.Expires), 0
		r.Nexthops = slices.Clone(r.Nexthops)
		for i := range r.Nexthops {
			r.Nexthops[i].Flags = 0
		}
		n.Routes = append(n.Routes, r)
	}
	n.Rules = append(n.Rules, s.Rules...)
	return n
}

// hasEnd is the same for every lifetime with an end.
func hasEnd(d *time.Duration) *time.Duration {
	if d == nil {
		return nil
	}
	var some time.Duration
	return &some
}

// withoutReplaced is the record without what the host has replaced by now, by any
// program: an old address or an old router must not come back beside the new one. It is
// for a record that could not be updated.
func (r *Record) withoutReplaced(s *Snapshot) *Record {
	look := &replacement{s: s, rec: r, inPlace: s.inPlace(r)}
	n := *r
	nic := r.Before.NIC.Index
	n.Before.Addresses = slices.DeleteFunc(slices.Clone(r.Before.Addresses), func(a addr.Address) bool {
		gone := a.Link == nic && look.isReplaced(a)
		if gone {
			look.gone = append(look.gone, a)
		}
		return gone
	})
	n.Before.Routes = slices.DeleteFunc(slices.Clone(r.Before.Routes), func(one route.Route) bool {
		return goesBy(&one, nic) && look.isRouteReplaced(&one)
	})
	return &n
}

// inPlace says that the takeover itself stands: the NIC is a port of the bridge, and has
// nothing of its own. A change at that time is made on purpose.
func (s *Snapshot) inPlace(rec *Record) bool {
	bare := true
	if s.Bridge != nil {
		s.onNIC(rec, func(string, string) { bare = false })
	}
	return s.Bridge != nil && s.NIC.Master == s.Bridge.Index && bare
}

// replacement tells what of a record was replaced.
type replacement struct {
	s       *Snapshot
	rec     *Record
	inPlace bool
	gone    []addr.Address // those that were
}

// isReplaced says that the host has another address in the place of one that it has no
// longer: one of the same network, or one in whose network its router is. While the
// takeover stands, that may be one which it has always had beside; else it has to be new,
// since the one may be there by chance when the other was lost.
func (p *replacement) isReplaced(a addr.Address) bool {
	if p.s.somewhere(a) || a.Prefix.Addr().IsLinkLocalUnicast() {
		return false
	}
	return slices.ContainsFunc(p.s.Addresses, func(n addr.Address) bool {
		switch {
		case !p.isHosts(n) || n.Prefix.Addr().BitLen() != a.Prefix.Addr().BitLen():
			return false
		case n.Prefix.IsSingleIP() && !a.Prefix.IsSingleIP(): // an address of a service
			return false
		case a.Prefix.Addr().Is6() && (n.Valid == nil) != (a.Valid == nil): // set, and learnt from routers
			return false
		case !p.inPlace && p.rec.Before.address(p.rec.Before.NIC.Index, n) != nil:
			return false
		}
		return n.Prefix.Overlaps(a.Prefix) || p.leadsOut(n.Prefix)
	})
}

// isHosts leaves out addresses that say nothing of where the host is.
func (p *replacement) isHosts(n addr.Address) bool {
	temporary := n.Prefix.Addr().Is6() && n.Flags&addr.Secondary != 0
	own := p.rec.Before.Bridge != nil && !p.rec.MadeBridge && p.rec.Before.address(p.rec.Before.Bridge.Index, n) != nil
	return !n.Prefix.Addr().IsLinkLocalUnicast() && n.Flags&addr.DADFailed == 0 && !temporary && !own
}

// leadsOut says that the host's default route is by a router of a network.
func (p *replacement) leadsOut(network netip.Prefix) bool {
	return slices.ContainsFunc(p.s.Routes, func(r route.Route) bool {
		return r.Dst.Bits() == 0 && r.Gateway.IsValid() && network.Contains(r.Gateway) && slices.Contains(p.s.own(), r.Link)
	})
}

// isRouteReplaced says that the host has another route to the same destination, or has
// the address no longer that a route came with, is sent from, or needs to reach its
// router.
func (p *replacement) isRouteReplaced(r *route.Route) bool {
	if p.s.hasPlace(r) || onEachLink(r) || isKernelMulticast(r) {
		return false
	}
	for _, a := range p.gone {
		if r.Source == a.Prefix.Addr() {
			return true
		}
	}
	connected := !r.Gateway.IsValid() && len(r.Nexthops) == 0
	if connected && slices.ContainsFunc(p.gone, func(a addr.Address) bool { return r.Dst == a.Prefix.Masked() }) && p.isOutOfReach(r.Dst.Addr(), false) {
		return true
	}
	if p.isOutOfReach(r.Gateway, r.OnLink) || slices.ContainsFunc(r.Nexthops, func(h route.Nexthop) bool { return p.isOutOfReach(h.Gateway, h.OnLink) }) {
		return true
	}
	return slices.ContainsFunc(p.s.Routes, func(n route.Route) bool {
		return p.isRival(r, &n)
	})
}

// isRival says that a route of the host's goes to the same destination as one that was
// lost, at another priority.
func (p *replacement) isRival(r, n *route.Route) bool {
	where := placeOf(n)
	where.priority = r.Priority
	if where != placeOf(r) || !slices.ContainsFunc(p.s.own(), func(l int) bool { return goesBy(n, l) }) {
		return false
	}
	return p.inPlace || !slices.ContainsFunc(p.rec.Before.Routes, func(was route.Route) bool {
		same := placeOf(&was) == placeOf(n)
		if was.Family == unix.AF_INET6 && was.Protocol == route.ProtocolRA {
			was.Priority++
			same = same || placeOf(&was) == placeOf(n)
		}
		return same
	})
}

// isOutOfReach says that an address is of a network that the host has gone from.
func (p *replacement) isOutOfReach(gateway netip.Addr, onLink bool) bool {
	if !gateway.IsValid() || onLink || !slices.ContainsFunc(p.gone, func(a addr.Address) bool { return a.Prefix.Contains(gateway) }) {
		return false
	}
	near := func(a addr.Address) bool { return a.Prefix.Contains(gateway) }
	return !slices.ContainsFunc(p.s.Addresses, near) && !slices.ContainsFunc(p.rec.Before.Addresses, func(a addr.Address) bool {
		return near(a) && !slices.ContainsFunc(p.gone, func(g addr.Address) bool { return g.Prefix == a.Prefix && g.Link == a.Link })
	})
}
