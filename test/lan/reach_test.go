package lan

import (
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
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

// doctor follows a pod's packet beyond the bridge, and says where it was lost and whether the host itself fares better.
func TestDoctorFollowsAPacketOntoTheLAN(t *testing.T) {
	t.Parallel()
	for name, bridged := range map[string]bool{"by a shared NIC": false, "by the system's bridge": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, _ := newLab(t)
			if bridged {
				ip(t, l.host.ns, "link add "+bridge+" type bridge forward_delay 0")
				l.moveToBridge()
			}
			n := l.network(dualStack(nil))
			p := n.add(l.newPod("a"))
			n.keeper()
			doctor := func(to string, says ...string) {
				t.Helper()
				said, err := n.exec("tombolo", nil, nil, "doctor", "--dns", "none", "--state", n.state, "--leases", n.leases, "--to", to, p.id)
				status := 0
				if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
					status, said = exit.ExitCode(), err.Error()
				}
				want := 4
				if len(says) == 0 {
					want = 0
				}
				expect.Equal(t, status, want, "exit status of doctor --to %s: %s", to, said)
				for _, s := range says {
					expect.Contains(t, said, s, "doctor --to %s", to)
				}
			}
			const left = "it leaves the host by " + nic + ", and no answer comes back to the host"
			doctor(otherIP4 + "," + otherIP6 + "," + internetIP4 + "," + otherIP4 + ":81")
			doctor("192.168.50.99", "nothing beyond "+nic+", by which it leaves the host, answers for it", "see whether 192.168.50.99 is up")
			doctor("fd50::99", "does not answer by neighbour discovery: nothing beyond "+nic)
			doctor("198.51.100.77", "neither the host nor the pod reaches 198.51.100.77, to which a route leads by "+routerIP4+": "+left)
			nstest.Run(t, l.internet.ns, "nft", "table ip x { chain x { type filter hook input priority 0; ip saddr "+p.ip4.String()+" drop; tcp dport 82 drop; }; }")
			doctor(internetIP4, "the host reaches "+internetIP4+", and the pod "+p.ip4.String()+" does not: "+left, "and on the LAN's router")
			doctor(internetIP4+":81", left+", and the host itself reaches it")
			doctor(internetIP4+":82", left+", nor does the host itself reach it")

			// Beyond the NIC one MAC is let pass: that of a port of a cloud, or of a switch.
			nstest.Run(t, l.wire, "nft", "table bridge one { chain mac { type filter hook forward priority 0; iifname port3 ether saddr != "+macOf(t, l.host, nic)+" drop; }; }")
			ip(t, p.ns, "neigh flush all")
			const one = "drops frames of other MACs than the NIC's, as Wi-Fi, most clouds, ESXi"
			doctor(otherIP4, "answers for it, and the host gets an answer", one)
			doctor(routerIP6, "does not answer by neighbour discovery", "and the host gets an answer", one)
			n.conf["ipam"].(object)["timeout"] = "2s"
			_, err := n.verb("ADD", l.newPod("b"))
			expect.That(t, err != nil && strings.Contains(err.Error(), `"code":11,`) && strings.Contains(err.Error(), one) &&
				strings.Contains(err.Error(), "the host's router "+routerIP4+" answers the host"), "ADD: %v", err)
		})
	}
}
