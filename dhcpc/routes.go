package dhcpc

import (
	"fmt"
	"net/netip"
	"slices"
)

// routes returns the routes of a lease as RFC 3442 demands: the classless ones or, if there are none, the static ones
// and a default route by the first router. Some servers send classless routes as option 249 instead of 121.
func (r *reader) routes(l *Lease) []Route {
	for _, code := range []uint8{121, 249} {
		v, ok := r.options[code]
		if !ok {
			continue
		}

		list, err := classlessRoutes(v)
		if err == nil && len(list) > 0 {
			l.noteRouters(list)
			return onLinkFirst(list, l.Address)
		}

		if err == nil {
			err = fmt.Errorf("no route in it")
		}

		// A part of a list could misdirect traffic, so use all of it or none.
		r.ignore(code, "%v", err)
	}

	list := r.staticRoutes()
	if len(l.Routers) > 0 {
		list = append(list, Route{Dst: netip.PrefixFrom(netip.IPv4Unspecified(), 0), Gateway: l.Routers[0]})
	}

	l.noteRouters(list)
	return onLinkFirst(list, l.Address)
}

// noteRouters sets OwnRouter if the leased address itself is among the routers.
func (l *Lease) noteRouters(list []Route) {
	own := l.Address.Addr()
	l.OwnRouter = slices.Contains(l.Routers, own) ||
		slices.ContainsFunc(list, func(r Route) bool { return r.Gateway == own })
}

// classlessRoutes parses the value of option 121. Each entry has the prefix length, the significant bytes of the
// destination, and the router's address.
func classlessRoutes(v []byte) ([]Route, error) {
	var list []Route
	for len(v) > 0 {
		bits := int(v[0])
		n := (bits + 7) / 8
		if bits > 32 {
			return nil, fmt.Errorf("a destination of %d bits", bits)
		}

		if len(v) < 1+n+4 {
			return nil, fmt.Errorf("cut short after %d routes", len(list))
		}

		var dst [4]byte
		copy(dst[:], v[1:1+n])
		route := Route{Dst: netip.PrefixFrom(netip.AddrFrom4(dst), bits).Masked()}
		via := netip.AddrFrom4([4]byte(v[1+n:]))
		if !via.IsUnspecified() {
			if !usable(via) {
				return nil, fmt.Errorf("router %s of %s is no host's address", via, route.Dst)
			}
			route.Gateway = via
		}

		list = append(list, route)
		v = v[1+n+4:]
	}

	return list, nil
}

// staticRoutes reads option 33, a list of pairs of destination and router. A destination's class determines its
// prefix length.
func (r *reader) staticRoutes() []Route {
	v := r.options[33]
	if len(v)%8 != 0 {
		r.ignore(33, "%d bytes are no list of pairs of addresses", len(v))
	}

	var list []Route
	for ; len(v) >= 8; v = v[8:] {
		dst, via := netip.AddrFrom4([4]byte(v)), netip.AddrFrom4([4]byte(v[4:]))

		// Reject unusable addresses. Among these is 0.0.0.0, since RFC 2132 forbids a default route in this option.
		if !usable(dst) || !usable(via) {
			r.ignore(33, "no route to %s via %s", dst, via)
			continue
		}

		prefix := netip.PrefixFrom(dst, classful(dst))
		if prefix.Masked().Addr() != dst {
			prefix = netip.PrefixFrom(dst, 32)
		}
		list = append(list, Route{Dst: prefix, Gateway: via})
	}

	return list
}

// onLinkFirst returns the routes in an order that the kernel accepts: first those on the link, then those with a
// router. If no route on the link leads to a router, for example because the address is a /32, it adds one.
func onLinkFirst(list []Route, own netip.Prefix) []Route {
	var onLink, others []Route
	list = slices.Clone(list)
	for i, r := range list {
		if r.Gateway == own.Addr() {
			// If the host is its own router, all destinations behind that router are on its link.
			list[i].Gateway = netip.Addr{}
		}
		if r = list[i]; !r.Gateway.IsValid() {
			onLink = append(onLink, r)
		}
	}

	for _, r := range list {
		if !r.Gateway.IsValid() || slices.Contains(others, r) {
			continue
		}
		reached := own.Bits() < 32 && own.Contains(r.Gateway) ||
			slices.ContainsFunc(onLink, func(l Route) bool { return l.Dst.Contains(r.Gateway) })
		if !reached {
			onLink = append(onLink, Route{Dst: netip.PrefixFrom(r.Gateway, 32)})
		}
		others = append(others, r)
	}

	return append(onLink, others...)
}
