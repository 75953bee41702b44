package lan

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// servers answer at a place over TCP and UDP, on a port of all of its addresses.
func (l *lan) serve(p place, port uint16, families ...int) {
	l.Helper()
	for _, family := range families {
		unspecified := netip.IPv4Unspecified()
		if family == 6 {
			unspecified = netip.IPv6Unspecified()
		}
		for _, network := range []string{"tcp", "udp"} {
			nstest.Serve(l, p.ns, fmt.Sprint(network, family), netip.AddrPortFrom(unspecified, port))
		}
	}
}

// ask calls a server over TCP and UDP, which must see the caller as one of these;
// none: any. UDP is asked until it answers, or has not for long: what is first on
// a flow may be lost to a neighbour that is unknown.
func (l *lan) ask(from place, at netip.Addr, port uint16, seenAs ...netip.Addr) {
	l.Helper()
	for _, network := range []string{"tcp", "udp"} {
		seen, err := l.tryAsk(from, network, at, port, aMinute)
		if err != nil {
			l.Errorf("%s to %s: %v", from.name, at, err)
			continue
		}
		matches := len(seenAs) == 0
		for _, want := range seenAs {
			matches = matches || seen == want
		}
		expect.That(l, matches, "%s to %s over %s: it is seen as %s, want %v", from.name, at, network, seen, seenAs)
	}
}

// How long to wait for an answer that is to come, and for one that is not.
const aMinute, aMoment = time.Minute, 3 * time.Second

func (l *lan) tryAsk(from place, network string, at netip.Addr, port uint16, wait time.Duration) (netip.Addr, error) {
	l.Helper()
	family := 4
	if at.Is6() {
		family = 6
	}
	seen, err := nstest.AskWithin(l, from.ns, fmt.Sprint(network, family), netip.AddrPortFrom(at, port), wait)
	return seen.Addr(), err
}

// wantNoAnswer fails the test if TCP gets through: a test that shows what a guard is for
// has to see the fault without it.
func (l *lan) wantNoAnswer(from place, at netip.Addr, port uint16) {
	l.Helper()
	if seen, err := l.tryAsk(from, "tcp", at, port, aMoment); err == nil {
		l.Errorf("%s reaches %s, as %s: the test shows nothing", from.name, at, seen)
	} else if !isNoAnswer(err) {
		l.Errorf("%s to %s: %v, want no answer at all", from.name, at, err)
	}
}

// routeOf is the route of a place to an address, as it is used.
func (l *lan) routeOf(p place, to netip.Addr) string {
	l.Helper()
	return strings.TrimSpace(nstest.Run(l, p.ns, "ip", "route", "get", to.String()))
}

// wantVia fails the test unless a pod goes by a gateway, as it was told and not by
// somebody's redirect.
func (l *lan) wantVia(p place, to, gateway netip.Addr) {
	l.Helper()
	if got := l.routeOf(p, to); !strings.Contains(got, "via "+gateway.String()+" ") || strings.Contains(got, "redirected") {
		l.Errorf("%s goes to %s by:\n%s\nwant it via %s", p.name, to, got, gateway)
	}
}

// wantWithinSubnets fails the test unless a pod has what the LAN gives.
func wantWithinSubnets(t testing.TB, p place, subnets ...string) {
	t.Helper()
	for _, subnet := range subnets {
		if prefix := nstest.Prefix(subnet); !prefix.Contains(p.ip4) && !prefix.Contains(p.ip6) {
			t.Errorf("%s has %s and %s, none in %s", p.name, p.ip4, p.ip6, subnet)
		}
	}
}
