package cni

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// egressSite is a node with what a pod might call: each place has a server at TCP 80, and at TCP and UDP 53.
type egressSite struct {
	*node
	out     *netns.NS
	web     *pod        // in the pod's network
	callers []*netns.NS // without a policy
	places  map[string][2]string
}

const resolver4, resolver6 = "10.99.0.53", "fd99::53"

// newEgressSite adds a pod to the network, and one to another network.
func newEgressSite(t *testing.T, w *network) *egressSite {
	t.Helper()
	s := &egressSite{node: w.node, out: w.outside(), web: w.pod("web")}
	for _, a := range []string{"10.99.0.2/24", resolver4 + "/24", "fd99::2/64 nodad", resolver6 + "/64 nodad"} {
		nstest.Run(t, s.out, "sh", "-ec", "ip address add dev eth0 "+a)
	}
	db := s.pod("db")
	web, other := w.add(s.web), s.network("away", conf{"bridge": "cbr7", "ipam": hostLocal("10.78.0.0/24", "fd78::/64")}).add(db)
	s.places = map[string][2]string{
		"internet": {outside4, outside6}, "private": {"10.99.0.2", "fd99::2"}, "resolver": {resolver4, resolver6}, "host": {uplink4, uplink6},
		"gateway": {gateway4, gateway6}, "neighbour": {ip4(web).String(), ip6(web).String()}, "other network": {ip4(other).String(), ip6(other).String()},
	}
	for _, p := range []*pod{{NS: s.out}, {NS: s.ns}, s.web, db} {
		for _, port := range []int{53, 80} {
			p.serve(t, "tcp", port)
		}
	}
	for place, ns := range map[string]*netns.NS{"internet": s.out, "private": s.out, "resolver": s.out, "host": s.ns, "gateway": s.ns, "neighbour": s.web.NS, "other network": db.NS} {
		for _, at := range s.places[place] {
			nstest.Serve(t, ns, "udp", netip.AddrPortFrom(nstest.Addr(at), 53)) // which answers from there
		}
	}
	s.callers = []*netns.NS{s.ns, db.NS}
	return s
}

// wantEgress asks all places from a pod, and has the places that can call the pod.
func (s *egressSite) wantEgress(t *testing.T, from *netns.NS, own [2]string, open func(place, protocol string, port int) bool) {
	t.Helper()
	for place, addresses := range s.places {
		for _, at := range addresses {
			for _, to := range []struct {
				protocol string
				port     int
			}{{"tcp", 80}, {"tcp", 53}, {"udp", 53}} {
				wait, is := min(left(t), 20*time.Second), open(place, to.protocol, to.port)
				if !is {
					wait = 60 * time.Millisecond
				}
				_, err := nstest.AskWithin(t, from, to.protocol, netip.AddrPortFrom(nstest.Addr(at), uint16(to.port)), wait)
				expect.That(t, (err == nil) == is, "%s at %s, %s %d: %v, want it open: %t", place, at, to.protocol, to.port, err, is)
			}
			if err := nstest.PingWith(t, from, nstest.Addr(at), nstest.Echo{Wait: 60 * time.Millisecond}); !open(place, "icmp", 0) {
				expect.That(t, err != nil, "%s at %s answers a ping", place, at)
			}
		}
	}
	for _, caller := range s.callers {
		for _, at := range own {
			_, err := nstest.AskWithin(t, caller, "tcp", netip.AddrPortFrom(nstest.Addr(at), 80), min(left(t), 20*time.Second))
			expect.Success(t, err, "the answer of the pod at %s", at)
		}
	}
}

func TestAPodCallsWhatItsPoliciesAllow(t *testing.T) {
	t.Parallel()
	everything := func(string, string, int) bool { return true }
	nothing := func(string, string, int) bool { return false }
	public := func(place, _ string, port int) bool { return place == "internet" || place == "resolver" && port == 53 }
	for _, tt := range []struct {
		name         string
		network, pod any
		open         func(place, protocol string, port int) bool
	}{
		{"none", nil, nil, everything},
		{"all", "all", "all", everything},
		{"the network's replies", "replies", nil, nothing},
		{"the pod's replies", nil, "replies", nothing},
		{"the network's public", "public", nil, public},
		{"the pod's public", nil, "public", public},
		{"a list", []string{"10.77.0.0/24 tcp 70-90", "10.78.0.0/24", "fd77::/64 tcp 80", "fd78::/64"}, nil, func(place, protocol string, port int) bool {
			return place == "other network" || port == 80 && (place == "gateway" || place == "neighbour")
		}},
		{"the pod's list", "all", "192.0.2.0/24 udp 53, 2001:db8::/32 udp", func(place, protocol string, port int) bool {
			return protocol == "udp" && (place == "internet" || place == "host")
		}},
		{"both", "public", []string{"0.0.0.0/0 tcp", "::/0 tcp"}, func(place, protocol string, port int) bool { return protocol == "tcp" && public(place, "", port) }},
		{"no overlap", "10.0.0.0/8, fd00::/8", "public", func(place, protocol string, port int) bool { return place == "resolver" && port == 53 }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			w := n.podnet(conf{"egressPolicy": tt.network, "capabilities": conf{"egressPolicy": true}, "dns": conf{"nameservers": []string{resolver4, resolver6}}})
			if tt.network == nil {
				w = w.with(conf{"egressPolicy": nil})
			}
			s := newEgressSite(t, w)
			p := n.pod("p")
			var options []option
			if tt.pod != nil {
				options = append(options, capability("egressPolicy", tt.pod))
			}
			r := w.add(p, options...)
			p.serve(t, "tcp", 80)
			s.wantEgress(t, p.NS, [2]string{ip4(r).String(), ip6(r).String()}, tt.open)
			expect.Success(t, w.check(p, options...))
			w.del(p, options...)
			left := n.run("nft", "list", "ruleset")
			expect.That(t, !strings.Contains(left, ip4(r).String()+" "), "after DEL:\n%s", left)
		})
	}
}

// internet4 and internet6 make packets of a pod, from an address and with a payload behind headers.
func internet4(from, to string, protocol byte, fragment int, payload []byte) []byte {
	b := slices.Concat([]byte{0x45, 0}, be16(20+len(payload)), []byte{0, 7}, be16(fragment), []byte{64, protocol, 0, 0}, nstest.Addr(from).AsSlice(), nstest.Addr(to).AsSlice())
	copy(b[10:], sum16(b))
	return append(b, payload...)
}

func internet6(from, to string, next byte, payload []byte) []byte {
	return slices.Concat([]byte{0x60, 0, 0, 0}, be16(len(payload)), []byte{next, 255}, nstest.Addr(from).AsSlice(), nstest.Addr(to).AsSlice(), payload)
}

// The test sends what a pod with NET_RAW and NET_ADMIN may try. Without a policy and a guard each packet arrives.
func TestAnAttackerGetsPastNoEgressPolicy(t *testing.T) {
	t.Parallel()
	udp := func(token string) []byte {
		return slices.Concat(be16(4000), be16(9999), be16(8+len(token)), []byte{0, 0}, []byte(token))
	}
	for _, tt := range []struct {
		name         string
		network, pod any
	}{{"no policy", nil, nil}, {"the network's", "replies", nil}, {"the pod's", nil, "replies"}} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			limited := tt.network != nil || tt.pod != nil
			n := newNode(t)
			out := n.outside()
			w := n.podnet(conf{"egressPolicy": tt.network, "ipMasq": false, "capabilities": conf{"egressPolicy": true}})
			if tt.network == nil {
				w = w.with(conf{"egressPolicy": nil})
			}
			p, o := n.pod("p"), n.pod("o")
			var options []option
			if tt.pod != nil {
				options = append(options, capability("egressPolicy", tt.pod))
			}
			r, ro := w.add(p, options...), w.add(o)
			routeBack(t, out)
			own4, own6, other4, other6 := ip4(r).String(), ip6(r).String(), ip4(ro).String(), ip6(ro).String()
			wantPing(t, n.ns, own4, own6, outside4, outside6)
			wantPing(t, out, own4, own6)
			if tt.network == nil { // else the policy is the neighbour's, too
				wantPing(t, o.NS, own4, own6) // answers, and neighbours are known
			}
			bridgeMAC, otherMAC, mac := hexMAC(t, n.ns, "cbr0"), hexMAC(t, o.NS, "eth0"), hexMAC(t, p.NS, "eth0")
			const linkLocal = "fe80::bad"
			nstest.Run(t, p.NS, "sh", "-ec", "ip address add 10.77.0.222/24 dev eth0; ip address add fd77::222/64 dev eth0 nodad")
			icmp := func(token string) []byte { // an error about a flow of others
				b := slices.Concat([]byte{3, 3, 0, 0, 0, 0, 0, 0}, internet4(outside4, own4, unix.IPPROTO_UDP, 0, udp(token)))
				copy(b[2:], sum16(b))
				return b
			}
			options6 := func(next byte) []byte { return []byte{next, 0, 1, 4, 0, 0, 0, 0} }
			ear, near, wire := rawSocket(t, out, "eth0"), rawSocket(t, o.NS, "eth0"), rawSocket(t, p.NS, "eth0")
			type attack struct {
				name   string
				packet func(token string) []byte
			}
			from4 := func(from, to string) func(string) []byte {
				return func(token string) []byte { return internet4(from, to, unix.IPPROTO_UDP, 0, udp(token)) }
			}
			from6 := func(from, to string) func(string) []byte {
				return func(token string) []byte { return internet6(from, to, unix.IPPROTO_UDP, udp(token)) }
			}
			behind := func(next byte, headers ...[]byte) func(string) []byte {
				return func(token string) []byte {
					return internet6(own6, outside6, next, append(slices.Concat(headers...), udp(token)...))
				}
			}
			for i, a := range []attack{
				{"UDP", from4(own4, outside4)}, {"UDP by IPv6", from6(own6, outside6)},
				{"a pod's source", from4(other4, outside4)}, {"a pod's IPv6 source", from6(other6, outside6)},
				{"the host's source", from4("10.77.0.99", outside4)}, {"a link-local source, to a neighbour", from6(linkLocal, other6)},
				{"a second address", from4("10.77.0.222", outside4)}, {"a second IPv6 address", from6("fd77::222", outside6)},
				{"to a neighbour", from4(own4, other4)}, {"to a neighbour by IPv6", from6(own6, other6)},
				{"a spoofed question that its answer would fit", from4(outside4, other4)},
				{"another protocol", func(token string) []byte { return internet4(own4, outside4, 253, 0, []byte(token)) }},
				{"another protocol of IPv6", func(token string) []byte { return internet6(own6, outside6, 253, []byte(token)) }},
				{"no next header", func(token string) []byte { return internet6(own6, outside6, 59, []byte(token)) }},
				{"an ICMP error", func(token string) []byte { return internet4(own4, outside4, unix.IPPROTO_ICMP, 0, icmp(token)) }},
				{"destination options", behind(unix.IPPROTO_DSTOPTS, options6(unix.IPPROTO_UDP))},
				{"hop-by-hop and destination options", behind(unix.IPPROTO_HOPOPTS, options6(unix.IPPROTO_DSTOPTS), options6(unix.IPPROTO_UDP))},
				{"a fragment that is whole", behind(unix.IPPROTO_FRAGMENT, []byte{unix.IPPROTO_UDP, 0, 0, 0, 0, 0, 0, 9})},
				{"a neighbour solicitation to elsewhere", func(token string) []byte {
					return internet6(own6, outside6, unix.IPPROTO_ICMPV6, slices.Concat([]byte{135, 0, 0, 0, 0, 0, 0, 0}, nstest.Addr(outside6).AsSlice(), []byte(token)))
				}},
			} {
				token := fmt.Sprintf("token-%03d-", i)
				packet, typ := a.packet(token), unix.ETH_P_IP
				if packet[0]>>4 == 6 {
					typ = unix.ETH_P_IPV6
				}
				to := bridgeMAC
				if bytes.Contains(packet[:40], nstest.Addr(other4).AsSlice()) && packet[0]>>4 == 4 && bytes.Equal(packet[16:20], nstest.Addr(other4).AsSlice()) ||
					packet[0]>>4 == 6 && bytes.Equal(packet[24:40], nstest.Addr(other6).AsSlice()) {
					to = otherMAC
				}
				must.Succeed(t, expect.Err(unix.Write(wire, slices.Concat(to, mac, be16(typ), packet))))
			}
			// Two fragments of one datagram, whole at the firewall.
			long := append(udp(string(bytes.Repeat([]byte("token-frag"), 4))), 0)
			must.Succeed(t, expect.Err(unix.Write(wire, slices.Concat(bridgeMAC, mac, be16(unix.ETH_P_IP), internet4(own4, outside4, unix.IPPROTO_UDP, 0x2000, long[:24])))))
			must.Succeed(t, expect.Err(unix.Write(wire, slices.Concat(bridgeMAC, mac, be16(unix.ETH_P_IP), internet4(own4, outside4, unix.IPPROTO_UDP, 3, long[24:48])))))
			wantPing(t, out, own4, own6) // answers come behind
			heard := heardTokens(ear)
			heard = append(heard, heardTokens(near)...)
			if limited {
				expect.That(t, len(heard) == 0, "these got past the policy: %q", heard)
				return
			}
			expect.That(t, len(heard) >= 18, "these alone arrived without a policy: %q", heard)
		})
	}
}

// heardTokens returns the tokens of the frames that a socket has received.
func heardTokens(fd int) (list []string) {
	buf := make([]byte, 2048)
	for {
		n, _, err := unix.Recvfrom(fd, buf, unix.MSG_DONTWAIT)
		if err != nil {
			return list
		}
		if i := bytes.Index(buf[:n], []byte("token-")); i >= 0 {
			list = append(list, string(buf[i:min(i+10, n)]))
		}
	}
}

// A flow that the pod opened before is cut by the next packet, and so is one whose network lost its rules for a while.
func TestAChangedEgressPolicyCutsFlows(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.outside()
	w := n.podnet(nil)
	p := n.pod("p")
	r := w.add(p)
	var flow net.Conn
	must.Succeed(t, out.Do(func() error {
		l, err := net.Listen("tcp4", outside4+":7")
		if err == nil {
			t.Cleanup(func() { l.Close() })
			go func() {
				if c, err := l.Accept(); err == nil {
					_, _ = io.Copy(c, c)
					c.Close()
				}
			}()
		}
		return err
	}))
	must.Succeed(t, p.NS.Do(func() (err error) { flow, err = net.DialTimeout("tcp", outside4+":7", time.Minute); return err }))
	defer flow.Close()
	say := func(wait time.Duration) error {
		_ = flow.SetDeadline(time.Now().Add(wait))
		_, err := flow.Write([]byte("x"))
		if err == nil {
			_, err = io.ReadFull(flow, make([]byte, 1))
		}
		return err
	}
	must.Succeed(t, say(time.Minute), "before")
	limited := w.with(conf{"egressPolicy": "replies"})
	limited.add(n.pod("o"))
	expect.Failure(t, say(300*time.Millisecond), "the flow goes on under the policy")
	wantPing(t, n.ns, ip4(r).String(), ip6(r).String())
	n.nft("flush ruleset")
	must.Succeed(t, n.operate("repair", "--state", n.state).err())
	wantNoPing(t, p.NS, outside4, outside6, gateway4)
	w.add(n.pod("q"))
	wantPing(t, p.NS, outside4, outside6, gateway4)
}
