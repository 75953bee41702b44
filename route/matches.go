package route

import (
	"slices"
)

// Matches says whether have, as the kernel lists it, is what adding r makes: CHECK
// uses it. A Link of 0 is not compared where there is a Gateway, nor are Flags, Other and
// the time that is left of Expires; what a nexthop object holds is not compared with
// anything.
func (r Route) Matches(have Route) bool {
	want := r.normal()
	have = have.normal()
	return want.sameKey(&have) && want.sameHops(&have) &&
		want.Source == have.Source &&
		want.Protocol == have.Protocol && want.Type == have.Type && *want.Scope == *have.Scope &&
		want.MTU == have.MTU && want.AdvMSS == have.AdvMSS &&
		want.Pref == have.Pref && (want.Expires == nil) == (have.Expires == nil)
}

func (r *Route) sameKey(have *Route) bool {
	return r.Family == have.Family && r.Dst == have.Dst && r.From == have.From && r.TOS == have.TOS &&
		r.Table == have.Table && r.Priority == have.Priority
}

func (r *Route) sameHops(have *Route) bool {
	switch {
	case r.NexthopID != 0 || have.NexthopID != 0:
		return r.NexthopID == have.NexthopID
	case r.sendsNothing():
		return true // IPv6 names the loopback interface
	}
	hop := Nexthop{Gateway: r.Gateway, Link: r.Link, OnLink: r.OnLink}
	return hop.matches(Nexthop{Gateway: have.Gateway, Link: have.Link, OnLink: have.OnLink}) &&
		slices.EqualFunc(r.Nexthops, have.Nexthops, Nexthop.matches)
}

func (r *Route) sendsNothing() bool {
	return r.Type == Blackhole || r.Type == Unreachable || r.Type == Prohibit || r.Type == Throw
}

func (h Nexthop) matches(have Nexthop) bool {
	return h.Gateway == have.Gateway && h.OnLink == have.OnLink &&
		max(h.Weight, 1) == max(have.Weight, 1) &&
		(h.Link == have.Link || h.Link == 0 && h.Gateway.IsValid())
}
