package nft

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// routedFrom are frames of a pod's network that the pod routes, from one of its addresses.
func routedFrom(src string) []namedFrame {
	ipv6 := func(packet []byte) []byte { return ether(otherMAC, podMAC, unix.ETH_P_IPV6, packet) }
	udp := datagram(1024, 9)
	return []namedFrame{
		{"UDP from " + src, ipv6(packet6(src, other6, 17, udp))},
		{"TCP from " + src, ipv6(packet6(src, other6, 6, make([]byte, 20)))},
		{"echo request from " + src, ipv6(packet6(src, other6, unix.IPPROTO_ICMPV6, icmp6(src, other6, 128, make([]byte, 4))))},
		{"destination options from " + src, ipv6(packet6(src, other6, unix.IPPROTO_DSTOPTS, padding6(17), udp))},
		{"first fragment from " + src, ipv6(packet6(src, other6, unix.IPPROTO_FRAGMENT, []byte{17, 0, 0, 1, 0, 0, 0, 7}, udp, udp))},
		{"last fragment from " + src, ipv6(packet6(src, other6, unix.IPPROTO_FRAGMENT, []byte{17, 0, 0, 16, 0, 0, 0, 7}, udp))},
	}
}

// passesFor are frames by which a pod would have an address of a prefix on this link.
func passesFor(a string) []namedFrame {
	ipv6 := func(packet []byte) []byte { return ether(allNodesMAC, podMAC, unix.ETH_P_IPV6, packet) }
	own, body := option(2, mac(podMAC)), make([]byte, 4)
	return []namedFrame{
		{"advertisement of " + a, ipv6(advert6(podLocal, allNodes, a, own))},
		{"advertisement of and from " + a, ipv6(advert6(a, allNodes, a, own))},
		{"advertisement of its own address from " + a, ipv6(advert6(a, allNodes, pod6, own))},
		{"advertisement behind options from " + a, ipv6(packet6(a, allNodes, unix.IPPROTO_DSTOPTS, padding6(unix.IPPROTO_ICMPV6),
			icmp6(a, allNodes, neighbourAdvert, []byte{0x20, 0, 0, 0}, ip(a), own)))},
		{"fragment of an advertisement from " + a, ipv6(packet6(a, allNodes, unix.IPPROTO_FRAGMENT, []byte{unix.IPPROTO_ICMPV6, 0, 0, 1, 0, 0, 0, 7},
			icmp6(a, allNodes, neighbourAdvert, []byte{0x20, 0, 0, 0}, ip(a), own)))},
		{"solicitation from " + a, ipv6(solicit6(a, allNodes, other6, option(1, mac(podMAC))))},
		{"solicitation without an option from " + a, ipv6(solicit6(a, allNodes, other6))},
		{"whether " + a + " is taken", ipv6(solicit6("::", allNodes, a))},
		{"router solicitation from " + a, ipv6(packet6(a, "ff02::2", unix.IPPROTO_ICMPV6, icmp6(a, "ff02::2", routerSolicit, body, option(1, mac(podMAC)))))},
		{"router advertisement from " + a, ipv6(packet6(a, allNodes, unix.IPPROTO_ICMPV6, icmp6(a, allNodes, routerAdvert, make([]byte, 12))))},
		{"redirect from " + a, ipv6(packet6(a, allNodes, unix.IPPROTO_ICMPV6, icmp6(a, allNodes, redirectMessage, body, ip(other6), ip(other6))))},
		{"from another's MAC and " + a, ether(otherMAC, foreignMAC, unix.ETH_P_IPV6, packet6(a, other6, 17, datagram(1024, 9)))},
		{"behind a VLAN tag from " + a, ether(otherMAC, podMAC, unix.ETH_P_8021Q, be16(5), be16(unix.ETH_P_IPV6), packet6(a, other6, 17, datagram(1024, 9)))},
	}
}

// withinAndBeside are the first and the last address of a prefix, and the ones next to these.
func withinAndBeside(text string) (within, beside []string) {
	p := netip.MustParsePrefix(text)
	last := p.Addr().As16()
	for i := p.Bits(); i < 128; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	end := netip.AddrFrom16(last)
	return []string{p.Addr().String(), end.String()}, []string{p.Addr().Prev().String(), end.Next().String()}
}

func TestGuardOfADelegatedPrefixLetsPassWhatIsOfItAlone(t *testing.T) {
	t.Parallel()
	for name, untrusted := range map[string]bool{"guard": false, "hosts only": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newGuardSite(t)
			nft(t, s.host, "flush chain bridge tombolo groups")
			const anothers = "fd00:61::1"
			endpoint := func(prefixes ...string) Endpoint {
				ep := s.guarded(pod4, pod6)
				ep.Untrusted = untrusted
				return routing(ep, prefixes...)
			}
			// What another pod routes is that pod's.
			mustAdd(t, s.c, routing(Endpoint{Owner: "00000000002", Network: "podnet", Bridge: "cbr0", MAC: mac(otherMAC), GuardedPort: "veth2",
				Addrs: endpoint().Addrs[:0]}, "fd00:61::/64"))
			was := endpoint()
			for _, prefix := range []string{"fd00:60:0:10::/60", "fd00:60::/56", "fd00:60:0:10::/61", "fd00:62::7/128", "2001:dc0::/33"} {
				within, beside := withinAndBeside(prefix)
				if was.Prefixes == nil {
					// Each arrives where nothing guards the port, and none where a guard knows of no prefix.
					s.want(t, slices.Concat(passesFor(within[0]), routedFrom(within[0]), routedFrom(anothers)), true)
					mustAdd(t, s.c, was)
					s.want(t, slices.Concat(passesFor(within[0]), routedFrom(within[0]), routedFrom(anothers)), false)
				}
				now := endpoint(prefix)
				if err := s.c.Move(t.Context(), was, now); err != nil {
					t.Fatal(err)
				}
				was = now
				for _, a := range within {
					s.want(t, routedFrom(a), true)
					s.want(t, passesFor(a), false)
				}
				for _, a := range append(beside, anothers) {
					s.want(t, routedFrom(a), false)
				}
				s.want(t, attacks(), false)
				s.want(t, slices.DeleteFunc(decent(), func(f namedFrame) bool { return untrusted && strings.HasPrefix(f.name, "DHCP") }), true)
			}
			if err := s.c.Move(t.Context(), was, endpoint()); err != nil {
				t.Fatal(err)
			}
			within, _ := withinAndBeside("2001:dc0::/33")
			s.want(t, routedFrom(within[0]), false)
		})
	}
}

// Of a keeper that was killed at a move, the record has both: whichever there is, a repair has all of it.
func TestGuardOfPrefixesThatOverlapIsMended(t *testing.T) {
	t.Parallel()
	const wide, narrow = "fd00:60::/56", "fd00:60:0:10::/60"
	for _, had := range []string{wide, narrow} {
		t.Run(had, func(t *testing.T) {
			t.Parallel()
			c, ns := dialNew(t)
			mustEnsure(t, c, guardNet())
			pod := guardedPod("0000000000a", "veth1", podMAC, pod4, pod6)
			mustAdd(t, c, routing(pod, had))
			both := routing(pod, narrow, wide)
			if err := c.Replace(t.Context(), both); err != nil {
				t.Fatal(err)
			}
			wantReady(t, c, guardNet(), both)
			wantEndpoints(t, c, routing(pod, wide))
			if err := c.Move(t.Context(), both, routing(pod, narrow)); err != nil {
				t.Fatal(err)
			}
			wantEndpoints(t, c, routing(pod, narrow))
			nft(t, ns, "flush set bridge tombolo guard-prefix")
			if ready, err := c.Ready(t.Context(), guardNet()); ready || err != nil {
				t.Errorf("a set that was emptied is ready: %v", err)
			}
			mustEnsure(t, c, guardNet())
			if err := c.Replace(t.Context(), routing(pod, narrow)); err != nil {
				t.Fatal(err)
			}
			if err := c.Remove(t.Context(), both); err != nil {
				t.Fatal(err)
			}
			wantEndpoints(t, c)
		})
	}
}
