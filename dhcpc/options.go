package dhcpc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/insomniacslk/dhcp/rfc1035label"

	"github.com/tombolo-cni/tombolo/internal/trace"
)

// ignore records an unusable option, since one bad option does not make a server useless.
func (m *message) ignore(code uint8, format string, args ...any) {
	m.ignored = append(m.ignored, fmt.Sprintf("option %d: ", code)+fmt.Sprintf(format, args...))
}

// sized returns an option's value. It returns nil if the option is missing or its value does not have the given
// length in bytes. A wrong length is recorded in m.ignored.
func (m *message) sized(code uint8, length int) []byte {
	v, ok := m.Options[code]
	if ok && len(v) != length {
		m.ignore(code, "%d bytes, want %d", len(v), length)
		return nil
	}
	return v
}

// lease returns the lease in an OFFER or an ACK that answers a request sent at the given time. It returns an error if
// no host could use the lease.
func (m *Machine) lease(msg *message, sent time.Time) (*Lease, error) {
	if !usable(msg.address) {
		return nil, fmt.Errorf("%s is no host's address", msg.address)
	}

	l := &Lease{
		Server: msg.server, ServerMAC: msg.nextHop,
		MAC: Hex(m.cfg.MAC), ClientID: Hex(m.cfg.ClientID),
		Obtained: sent,
	}
	if err := msg.times(l); err != nil {
		return nil, err
	}

	l.Address = netip.PrefixFrom(msg.address, msg.prefixLen(msg.address))
	l.Routers = msg.addrs(3)
	l.Routes = msg.routes(l)
	l.DNS = msg.addrs(6)
	l.Domain, l.Search = msg.domain(), msg.search()
	l.MTU = msg.mtu(m.cfg.LinkMTU)
	l.Broadcast = msg.broadcast(l.Address)
	for _, code := range m.cfg.Request {
		if v, ok := msg.Options[code]; ok {
			if l.Options == nil {
				l.Options = map[uint8]Hex{}
			}
			l.Options[code] = Hex(v)
		}
	}

	l.Ignored = msg.ignored
	return l, nil
}

// times sets the times of a lease from options 51, 58 and 59. It replaces missing and unusable times by defaults. For
// an infinite lease time it sets none. A lease time of 0 is an error.
func (m *message) times(l *Lease) error {
	total, known, infinite := m.seconds(51)
	switch {
	case infinite:
		return nil
	case !known:
		m.ignored = append(m.ignored, fmt.Sprintf("no lease time: %s assumed", defaultLeaseTime))
		total = defaultLeaseTime
	case total == 0:
		return errors.New("it is for 0 s")
	case total < shortestLease:
		m.ignore(51, "a lease of %s: %s assumed", total, shortestLease)
		total = shortestLease
	}

	t2 := m.within(59, shortestT2, total, "T2 of %s in a lease of %s", total/8*7)
	t1 := m.within(58, shortestT1, t2, "T1 of %s with T2 of %s", min(total/2, t2/7*4))
	l.Renew, l.Rebind, l.Expire = l.Obtained.Add(t1), l.Obtained.Add(t2), l.Obtained.Add(total)
	return nil
}

// within returns the time in the option code if least <= time < below. If the option is missing, it returns usual. If
// the time is out of this range, it returns usual and adds format's text to m.ignored.
func (m *message) within(code uint8, least, below time.Duration, format string, usual time.Duration) time.Duration {
	d, known, infinite := m.seconds(code)
	if known && !infinite && d >= least && d < below {
		return d
	}
	if known {
		m.ignore(code, format, d, below)
	}
	return usual
}

// seconds reads an option with a time in seconds. known is false if the option is missing or has a wrong size. infinite
// means a value with all bits set (RFC 2131, section 3.3).
func (m *message) seconds(code uint8) (d time.Duration, known, infinite bool) {
	v := m.sized(code, 4)
	if v == nil {
		return 0, false, false
	}
	n := binary.BigEndian.Uint32(v)
	return time.Duration(n) * time.Second, true, n == math.MaxUint32
}

// shortestMask is the shortest accepted prefix length, as in a class A network. No link has a larger network. With a
// mask for half of all addresses, a server could make the client's packets to them bypass every router.
const shortestMask = 8

// prefixLen returns the prefix length from the subnet mask (option 1). Without a mask, or with an unusable one, it
// returns the prefix length of the address's class, and records that in m.ignored.
func (m *message) prefixLen(a netip.Addr) int {
	v, ok := m.Options[1]
	if bits, of := net.IPMask(v).Size(); of == 32 && bits >= shortestMask {
		return bits
	}

	bits := classful(a)
	if ok {
		m.ignore(1, "%s is no subnet mask: /%d assumed, by the address's class", Hex(v), bits)
	} else {
		m.ignored = append(m.ignored, fmt.Sprintf("no subnet mask: /%d assumed, by the address's class", bits))
	}
	return bits
}

// classful returns the prefix length of an address's class, which hosts assume without a mask (RFC 950).
func classful(a netip.Addr) int {
	bits, _ := ip(a).DefaultMask().Size()
	return bits
}

// addrs reads an option with a list of host addresses. It skips unusable addresses.
func (m *message) addrs(code uint8) []netip.Addr {
	v := m.Options[code]
	if len(v)%4 != 0 {
		m.ignore(code, "%d bytes are no list of addresses", len(v))
	}

	var list []netip.Addr
	for ; len(v) >= 4; v = v[4:] {
		a := netip.AddrFrom4([4]byte(v))
		if !usable(a) {
			m.ignore(code, "%s is no host's address", a)
			continue
		}
		list = append(list, a)
	}

	return list
}

func (m *message) broadcast(own netip.Prefix) netip.Addr {
	v := m.sized(28, 4)
	if v == nil {
		return netip.Addr{}
	}
	a := netip.AddrFrom4([4]byte(v))
	if a != broadcastAddr() && !own.Contains(a) {
		m.ignore(28, "%s is not in %s", a, own.Masked())
		return netip.Addr{}
	}
	return a
}

// mtu reads the MTU (option 26), and returns 0 if there is none. It raises a smaller value to 576 bytes, the packet
// size that every host must accept (RFC 791). If link, the MTU of the client's link, is not 0, it is the upper limit of
// the result.
func (m *message) mtu(link int) int {
	v := m.sized(26, 2)
	if v == nil {
		return 0
	}

	sent := int(binary.BigEndian.Uint16(v))
	mtu := max(sent, minMessage)
	if link > 0 {
		mtu = min(mtu, link)
	}

	if mtu != sent {
		m.ignore(26, "MTU %d: %d taken", sent, mtu)
	}

	return mtu
}

func (m *message) domain() string {
	// Some servers end the name with a zero byte, or with a dot.
	name := strings.TrimSuffix(strings.TrimRight(string(m.Options[15]), "\x00"), ".")
	if name == "" {
		return ""
	}
	if !trace.IsDomain(name) {
		m.ignore(15, "%q is no domain name", name)
		return ""
	}
	return name
}

func (m *message) search() []string {
	v := m.Options[119]
	if len(v) == 0 {
		return nil
	}

	labels, err := rfc1035label.FromBytes(v)
	if err != nil {
		m.ignore(119, "%v", err)
		return nil
	}

	var list []string
	for _, name := range labels.Labels {
		if !trace.IsDomain(name) {
			m.ignore(119, "%q is no domain name", name)
			continue
		}
		list = append(list, name)
	}

	return list
}

// routes returns the routes of a lease as RFC 3442 demands. These are the classless routes or, without such routes, the
// static routes and a default route by the first router. Some servers send classless routes as option 249 instead of
// 121. routes also sets l.OwnRouter.
func (m *message) routes(l *Lease) []Route {
	var list []Route
	for _, code := range []uint8{121, 249} {
		v, ok := m.Options[code]
		if !ok || len(list) > 0 {
			continue
		}

		var err error
		if list, err = classlessRoutes(v); err != nil {
			// A part of a list could misdirect traffic, so use all of it or none.
			m.ignore(code, "%v", err)
		}
	}

	if len(list) == 0 {
		list = m.staticRoutes()
		if len(l.Routers) > 0 {
			list = append(list, Route{Dst: netip.PrefixFrom(netip.IPv4Unspecified(), 0), Gateway: l.Routers[0]})
		}
	}

	own := l.Address.Addr()
	l.OwnRouter = slices.Contains(l.Routers, own) ||
		slices.ContainsFunc(list, func(r Route) bool { return r.Gateway == own })
	return onLinkFirst(list, l.Address)
}

// classlessRoutes parses the value of option 121. Each entry has the prefix length, the significant bytes of the
// destination, and the router's address. For a value that is malformed or empty it returns no routes and an error.
func classlessRoutes(v []byte) ([]Route, error) {
	if len(v) == 0 {
		return nil, errors.New("no route in it")
	}

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

// staticRoutes reads option 33, a list of pairs of destination and router. A destination's class determines its prefix
// length. A destination with host bits becomes a /32.
func (m *message) staticRoutes() []Route {
	v := m.Options[33]
	if len(v)%8 != 0 {
		m.ignore(33, "%d bytes are no list of pairs of addresses", len(v))
	}

	var list []Route
	for ; len(v) >= 8; v = v[8:] {
		dst, via := netip.AddrFrom4([4]byte(v)), netip.AddrFrom4([4]byte(v[4:]))

		// Reject unusable addresses. Among these is 0.0.0.0, since RFC 2132 forbids a default route in this option.
		if !usable(dst) || !usable(via) {
			m.ignore(33, "no route to %s via %s", dst, via)
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
// router. If neither the subnet nor a route on the link contains a router, onLinkFirst adds a route to this router.
func onLinkFirst(list []Route, own netip.Prefix) []Route {
	var onLink, others []Route
	for _, r := range list {
		switch {
		case !r.Gateway.IsValid(), r.Gateway == own.Addr():
			// If the host is its own router, all destinations behind that router are on its link.
			onLink = append(onLink, Route{Dst: r.Dst})
		case !slices.Contains(others, r):
			others = append(others, r)
		}
	}

	for _, r := range others {
		reached := own.Bits() < 32 && own.Contains(r.Gateway) ||
			slices.ContainsFunc(onLink, func(l Route) bool { return l.Dst.Contains(r.Gateway) })
		if !reached {
			onLink = append(onLink, Route{Dst: netip.PrefixFrom(r.Gateway, 32)})
		}
	}

	return append(onLink, others...)
}
