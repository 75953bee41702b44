package uplink

import (
	"reflect"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/route"
)

// onlyOf is what a link has of its own: addresses, routes and
// rules.
func (s *Snapshot) onlyOf(link int) *Snapshot {
	only := &Snapshot{Time: s.Time, NIC: s.NIC, Bridge: s.Bridge}
	for _, a := range s.Addresses {
		if a.Link == link {
			only.Addresses = append(only.Addresses, a)
		}
	}
	for _, r := range s.Routes {
		if goesBy(&r, link) {
			only.Routes = append(only.Routes, r)
		}
	}
	name := s.NIC.Name
	if s.Bridge != nil && s.Bridge.Index == link {
		name = s.Bridge.Name
	}
	for _, r := range s.Rules {
		if r.IIF == name || r.OIF == name {
			only.Rules = append(only.Rules, r)
		}
	}
	return only
}

// withLost is the snapshot as if a link had what the NIC had before the takeover and
// that neither it nor the bridge has now: what another program deleted. Lifetimes are what
// is left of them.
//
// What comes and goes by itself, because it was leased or learnt from routers, counts
// only if all is asked for: where the bridge has gone, and took it along.
func (s *Snapshot) withLost(rec *Record, link int, all bool) *Snapshot {
	before := rec.Before.onlyOf(rec.Before.NIC.Index)
	n := *s
	n.Addresses = slices.Clone(s.Addresses)
	n.Routes = slices.Clone(s.Routes)
	n.Rules = slices.Clone(s.Rules)
	name := rec.Bridge
	if link == s.NIC.Index {
		name = s.NIC.Name
	}
	passed := s.Time.Sub(rec.Before.Time)
	var with, over []addr.Address // on the NIC, as they were: those whose routes belong to them, and those whose time is up
	for _, a := range before.Addresses {
		was := a
		a.Label = (&move{from: rec.Before.NIC, to: Link{Name: name}}).label(a.Label)
		if a.Valid != nil && !all || a.Flags&addr.DADFailed != 0 {
			continue
		}
		if s.somewhere(a) {
			// Its route may be gone all the same: one that was being moved when somebody
			// took the bridge's end of it away.
			with = append(with, was)
			continue
		}
		if !left(&a.Valid, passed) {
			over = append(over, was)
			continue
		}
		left(&a.Preferred, passed)
		with = append(with, was)
		a.Link = link
		n.Addresses = append(n.Addresses, a)
	}
	back := &move{s: &Snapshot{}, from: rec.Before.NIC, to: Link{Index: link}}
	for _, r := range before.Routes {
		withAddress := slices.ContainsFunc(with, func(a addr.Address) bool { return comesWith(&r, &a) })
		if !all && comesAndGoes(&r) && !withAddress || r.NexthopID != 0 || isKernelMulticast(&r) || s.hasPlace(&r) || restsOn(&r, over, with) || !left(&r.Expires, passed) {
			continue
		}
		n.Routes = append(n.Routes, back.movedRoute(&r))
	}
	for _, r := range before.Rules {
		r.IIF, r.OIF = rec.renamed(r.IIF, name), rec.renamed(r.OIF, name)
		if !slices.ContainsFunc(s.Rules, func(have route.Rule) bool { return rec.sameRule(&have, &r) }) {
			n.Rules = append(n.Rules, r)
		}
	}
	return &n
}

// restsOn says that a route cannot be without an address whose time is up: the kernel
// refuses one that has it as its source, or a gateway in its network alone.
func restsOn(r *route.Route, over, with []addr.Address) bool {
	return slices.ContainsFunc(over, func(a addr.Address) bool {
		reaches := func(other addr.Address) bool { return other.Prefix.Contains(r.Gateway) }
		return r.Source == a.Prefix.Addr() || comesWith(r, &a) || reaches(a) && !r.OnLink && !slices.ContainsFunc(with, reaches)
	})
}

// asRecorded is the snapshot with the NIC's addresses as they were, where they are
// kept there: what is left of them has no end and no route.
func (s *Snapshot) asRecorded(rec *Record) *Snapshot {
	if !rec.KeepAddress {
		return s
	}
	n := *s
	n.Addresses = slices.Clone(s.Addresses)
	passed := s.Time.Sub(rec.Before.Time)
	for i := range n.Addresses {
		a := &n.Addresses[i]
		was := rec.Before.address(rec.Before.NIC.Index, *a)
		if a.Link != s.NIC.Index || was == nil {
			continue
		}
		a.Flags, a.Valid, a.Preferred = was.Flags, was.Valid, was.Preferred
		left(&a.Preferred, passed)
		left(&a.Valid, passed)
	}
	return &n
}

// comesAndGoes says that a route is for daemons, or for the kernel, to keep.
func comesAndGoes(r *route.Route) bool {
	return r.Expires != nil || r.Protocol == route.ProtocolKernel || r.Protocol == route.ProtocolRedirect || isDaemons(r.Protocol)
}

// isDaemons says that a protocol is a routing engine's (BIRD, FRR), a DHCP client's or that of
// router advertisements: all numbers above static are (linux/rtnetlink.h), but ours.
func isDaemons(p route.Protocol) bool { return p > route.ProtocolStatic && p != route.ProtocolTombolo }

func (rec *Record) renamed(link, to string) string {
	if link == rec.NIC {
		return to
	}
	return link
}

// sameRule says that two rules are the same but for which of the two links they name.
func (rec *Record) sameRule(a, b *route.Rule) bool {
	x, y := *a, *b
	for _, r := range []*route.Rule{&x, &y} {
		for _, name := range []*string{&r.IIF, &r.OIF} {
			if *name == rec.Bridge {
				*name = rec.NIC
			}
		}
	}
	return reflect.DeepEqual(x, y)
}

// left takes the time that passed off a lifetime, and is false where it is over. One
// without an end is not changed.
func left(d **time.Duration, passed time.Duration) bool {
	if *d == nil {
		return true
	}
	rest := max(**d-passed, 0)
	over := rest == 0 && **d != 0
	*d = &rest
	return !over
}

// somewhere says that the NIC or the bridge has an address.
func (s *Snapshot) somewhere(a addr.Address) bool {
	return slices.ContainsFunc(s.Addresses, func(have addr.Address) bool {
		return have.Prefix == a.Prefix && have.Peer == a.Peer
	})
}

// hasPlace says that there is a route in a route's place, by whichever link, or with
// the priority that one learnt from a router has after a move.
func (s *Snapshot) hasPlace(r *route.Route) bool {
	next := *r
	if r.Family == unix.AF_INET6 && r.Protocol == route.ProtocolRA {
		next.Priority++
	}
	return slices.ContainsFunc(s.Routes, func(have route.Route) bool {
		if onEachLink(r) && !slices.ContainsFunc(s.own(), func(l int) bool { return goesBy(&have, l) }) {
			return false
		}
		return placeOf(&have) == placeOf(r) || placeOf(&have) == placeOf(&next)
	})
}
