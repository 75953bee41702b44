package uplink

import (
	"reflect"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/route"
)

// asBefore is what a record would have of before, were the NIC taken over now.
func (s *snapshot) asBefore(rec *Record) snapshot {
	m := backMove(s, rec)
	m.to = rec.Before.NIC
	n := rec.Before
	n.Time, n.Addresses, n.Routes, n.Rules = s.Time, nil, nil, nil
	for _, a := range m.addresses() {
		n.Addresses = append(n.Addresses, m.movedAddress(a))
	}
	for _, r := range m.routes() {
		n.Routes = append(n.Routes, m.movedRoute(r))
	}
	for _, r := range m.rules() {
		n.Rules = append(n.Rules, m.movedRule(r))
	}
	return n
}

// withLost returns the snapshot and, as if link had them, the addresses, routes and rules that
// the NIC had before the takeover and that neither it nor the bridge has now, since another
// program deleted them. Their lifetimes are those that are left.
//
// Leased addresses, and what was learnt from routers, are among them only with all: it is for
// a bridge that was deleted with them.
func (s *snapshot) withLost(rec *Record, link linkState, all bool) *snapshot {
	n := *s
	n.Addresses, n.Routes, n.Rules = slices.Clone(s.Addresses), slices.Clone(s.Routes), slices.Clone(s.Rules)
	m := newMove(&rec.Before, rec.Before.NIC, link)
	passed := s.Time.Sub(rec.Before.Time)
	var has, over []addr.Address
	for _, a := range m.addresses() {
		lost := m.movedAddress(a)
		switch {
		case s.somewhere(a):
			has = append(has, a)
		case a.Valid != nil && !all, !left(&lost.Valid, passed):
			over = append(over, a)
		default:
			has = append(has, a)
			left(&lost.Preferred, passed)
			n.Addresses = append(n.Addresses, lost)
		}
	}
	for _, r := range m.routes() {
		lost := m.movedRoute(r)
		wanted := all || !comesAndGoes(&r) || slices.ContainsFunc(has, func(a addr.Address) bool { return a.Valid == nil && comesWith(&r, &a) })
		if wanted && !s.hasPlace(&r) && !s.hasPlace(&lost) && !restsOn(&r, over, has) && left(&lost.Expires, passed) {
			n.Routes = append(n.Routes, lost)
		}
	}
	there := move{from: linkState{Name: rec.Bridge}, to: linkState{Name: rec.NIC}}
	for _, r := range m.rules() {
		if !slices.ContainsFunc(s.Rules, func(have routing.Rule) bool { return reflect.DeepEqual(there.movedRule(have), r) }) {
			n.Rules = append(n.Rules, m.movedRule(r))
		}
	}
	return &n
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

// comesAndGoes says that a route is for the kernel to keep, or for daemons: a routing engine's
// (BIRD, FRR), a DHCP client's or that of router advertisements. These have all numbers above
// static (linux/rtnetlink.h), but for ours.
func comesAndGoes(r *route.Route) bool {
	daemons := r.Protocol > unix.RTPROT_STATIC && r.Protocol != route.ProtocolTombolo
	return r.Expires != nil || r.Protocol == unix.RTPROT_KERNEL || r.Protocol == unix.RTPROT_REDIRECT || daemons
}

// restsOn says that a route cannot be without an address that is over: it comes with it, has it as
// its source, or its gateway is in its network alone.
func restsOn(r *route.Route, over, has []addr.Address) bool {
	return slices.ContainsFunc(over, func(a addr.Address) bool {
		reaches := func(other addr.Address) bool { return other.Prefix.Contains(r.Gateway) }
		return r.Source == a.Prefix.Addr() || comesWith(r, &a) || reaches(a) && !r.OnLink && !slices.ContainsFunc(has, reaches)
	})
}

// hasPlace says that the NIC or the bridge has a route in a route's place.
func (s *snapshot) hasPlace(r *route.Route) bool {
	return slices.ContainsFunc(s.Routes, func(have route.Route) bool { return placeOf(&have) == placeOf(r) })
}

// withoutReplaced is the record without what the host has replaced by now, by any
// program: an old address or an old router must not come back beside the new one. It is
// for a record that could not be updated.
func (r *Record) withoutReplaced(s *snapshot) *Record {
	n := *r
	n.Before.Addresses, n.Before.Routes = nil, nil
	stands := s.stands(r)
	var gone []addr.Address
	for _, a := range r.Before.Addresses {
		if s.isReplaced(r, a, stands) {
			gone = append(gone, a)
		} else {
			n.Before.Addresses = append(n.Before.Addresses, a)
		}
	}
	has := slices.Concat(n.Before.Addresses, s.Addresses)
	for _, one := range r.Before.Routes {
		if s.hasPlace(&one) || !s.hasOtherPriority(&one) && !restsOn(&one, gone, has) {
			n.Before.Routes = append(n.Before.Routes, one)
		}
	}
	return &n
}

// stands says that the NIC is a port of the bridge, and has nothing of its own: a change at that
// time is made on purpose.
func (s *snapshot) stands(rec *Record) bool {
	bare := true
	s.withoutKept(rec).tell(s.NIC, func(string, string) { bare = false })
	return bare && s.Bridge != nil && s.NIC.Master == s.Bridge.Index
}

// isReplaced says that the host has another address in the place of one that it has no
// longer. While the takeover stands, that may be one which it has always had beside; else it has
// to be new, since the one may be there by chance when the other was lost. An address of a
// service is in no other's place, nor is one that routers gave in that of one that was set.
func (s *snapshot) isReplaced(rec *Record, a addr.Address, stands bool) bool {
	has := s.withoutKept(rec)
	if has.somewhere(a) || a.Prefix.Addr().IsLinkLocalUnicast() {
		return false
	}
	return slices.ContainsFunc(has.Addresses, func(n addr.Address) bool {
		is := n.Prefix.Addr()
		switch {
		case is.Is4() != a.Prefix.Addr().Is4(), is.IsLinkLocalUnicast(), n.Prefix.IsSingleIP() && !a.Prefix.IsSingleIP():
			return false
		case is.Is6() && (n.Valid == nil) != (a.Valid == nil):
			return false
		}
		return stands || rec.Before.address(rec.Before.NIC.Index, n) == nil
	})
}

// hasOtherPriority says whether the NIC or the bridge has a route to the same destination at another priority.
func (s *snapshot) hasOtherPriority(r *route.Route) bool {
	return slices.ContainsFunc(s.Routes, func(have route.Route) bool {
		have.Priority = r.Priority
		return placeOf(&have) == placeOf(r)
	})
}
