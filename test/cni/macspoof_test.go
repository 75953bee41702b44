package cni

import (
	"bytes"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// spoofs are frames of a pod's to all, by what they claim, with a token at the end.
func spoofs(mac, other net.HardwareAddr, own, others, gateway netip.Addr, token string) map[string][]byte {
	all, foreign := net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, net.HardwareAddr{2, 0, 0, 0, 0, 0x77}
	arp := func(sender net.HardwareAddr, of netip.Addr) []byte {
		return slices.Concat([]byte{0, 1, 8, 0, 6, 4, 0, 1}, sender, of.AsSlice(), make([]byte, 6), others.AsSlice())
	}
	udp4 := func(from netip.Addr) []byte {
		ip := slices.Concat([]byte{0x45, 0}, be16(28+len(token)), []byte{0, 7, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}, from.AsSlice(), others.AsSlice())
		copy(ip[10:], sum16(ip))
		return slices.Concat(ip, be16(1024), be16(9), be16(8+len(token)), be16(0))
	}
	icmp6 := func(typ byte, from string, body []byte) []byte {
		src, to := nstest.Addr(from), nstest.Addr("ff02::1")
		message := slices.Concat([]byte{typ, 0, 0, 0}, body, []byte(token))
		copy(message[2:], sum16(slices.Concat(src.AsSlice(), to.AsSlice(), []byte{0, unix.IPPROTO_ICMPV6}, be16(len(message)), message)))
		return slices.Concat([]byte{0x60, 0, 0, 0}, be16(len(message)), []byte{unix.IPPROTO_ICMPV6, 255}, src.AsSlice(), to.AsSlice(), message[:len(message)-len(token)])
	}
	frame := func(from net.HardwareAddr, protocol int, body ...[]byte) []byte {
		return slices.Concat(all, from, be16(protocol), slices.Concat(body...), []byte(token))
	}
	advert := slices.Concat([]byte{0x20, 0, 0, 0}, nstest.Addr(gateway6).AsSlice(), []byte{2, 1}, mac)
	return map[string][]byte{
		"its own MAC and address":                    frame(mac, unix.ETH_P_ARP, arp(mac, own)),
		"a MAC of nobody's":                          frame(foreign, unix.ETH_P_ARP, arp(mac, own)),
		"another pod's MAC":                          frame(other, unix.ETH_P_IP, udp4(own)),
		"another pod's address":                      frame(mac, unix.ETH_P_IP, udp4(others)),
		"an address of a network inside the pod":     frame(mac, unix.ETH_P_IP, udp4(nstest.Addr("172.30.0.2"))),
		"the gateway's address, by ARP":              frame(mac, unix.ETH_P_ARP, arp(mac, gateway)),
		"another's MAC, inside of ARP":               frame(mac, unix.ETH_P_ARP, arp(foreign, own)),
		"the gateway's IPv6 address, by an advert":   frame(mac, unix.ETH_P_IPV6, icmp6(136, gateway6, advert)),
		"to be a router of IPv6":                     frame(mac, unix.ETH_P_IPV6, icmp6(134, "fe80::77", []byte{64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0})),
		"to be a router, by an address of its own":   frame(mac, unix.ETH_P_IPV6, icmp6(134, addr.LinkLocal(mac).String(), []byte{64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0})),
		"to be of a VLAN":                            frame(mac, unix.ETH_P_8021Q, be16(5), be16(unix.ETH_P_IP), udp4(own)),
		"nothing, by a protocol that is not IP's":    frame(mac, testProtocol, make([]byte, 46)),
		"an address of IPv6, in a network of no one": frame(mac, unix.ETH_P_IPV6, icmp6(128, "fd99::1", make([]byte, 4))),
	}
}

// TestMACSpoofCheckIsTheReferences has pods claim what is not theirs: of macspoofchk's both the
// reference and we drop what has another MAC, and nothing else; guard drops the rest, too.
func TestMACSpoofCheckIsTheReferences(t *testing.T) {
	t.Parallel()
	nstest.Need(t, "nft")
	reference := referenceDir(t)
	macsAlone := []string{"a MAC of nobody's", "another pod's MAC"}
	for name, tt := range map[string]struct {
		fields  conf
		stopped []string // nil is all but the decent one
		nested  bool     // whether a network behind the pod is reached
	}{
		"the reference, without": {fields: conf{"type": "bridge"}, stopped: []string{}, nested: true},
		"the reference":          {fields: conf{"type": "bridge", "macspoofchk": true}, stopped: macsAlone, nested: true},
		"without":                {stopped: []string{}, nested: true},
		"macspoofchk":            {fields: conf{"macspoofchk": true}, stopped: macsAlone, nested: true},
		"guard":                  {fields: conf{"guard": true}},
		"both":                   {fields: conf{"macspoofchk": true, "guard": true}},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			w := n.podnet(tt.fields)
			w.plugin["bridge"], w.plugin["isGateway"] = "cbr0", true
			if w.plugin["type"] == "bridge" {
				n.searchAlso(reference)
				delete(w.plugin, "stateDir")
				delete(w.plugin, "deadline")
				w.plugin["isDefaultGateway"] = true
				w.plugin["ipam"].(conf)["dataDir"] = t.TempDir()
			}
			a, b := n.pod("a"), n.pod("b")
			ra, rb := w.add(a), w.add(b)

			// A network of its own behind the pod, with addresses of its own.
			inner := nstest.New(t)
			nstest.Run(t, a.NS, "sh", "-ec", `ip link add inner type bridge; ip address add 172.30.0.1/24 dev inner; ip link set inner up; sysctl -qw net.ipv4.ip_forward=1`)
			nstest.Veth(t, a.NS, "down0", inner, "eth0")
			nstest.Run(t, a.NS, "sh", "-ec", "ip link set down0 master inner up")
			nstest.Run(t, inner, "sh", "-ec", "ip address add 172.30.0.2/24 dev eth0; ip link set eth0 up; ip route add default via 172.30.0.1")
			n.ip("route add 172.30.0.0/24 via " + ip4(ra).String())
			if tt.nested {
				wantPing(t, inner, gateway4)
			} else {
				wantNoPing(t, inner, gateway4)
			}
			wantPing(t, a.NS, gateway4, gateway6, ip4(rb).String(), ip6(rb).String())

			mac := func(p *pod) net.HardwareAddr {
				return must.Of(net.ParseMAC(nstest.MAC(t, p.NS, "eth0"))).Get(t)
			}
			frame := func(name, token string) []byte {
				return spoofs(mac(a), mac(b), ip4(ra), ip4(rb), nstest.Addr(gateway4), token)[name]
			}
			from, to := rawSocket(t, a.NS, "eth0"), rawSocket(t, b.NS, "eth0")
			send := func(name, token string) {
				t.Helper()
				must.Succeed(t, expect.Err(unix.Write(from, frame(name, token))))
			}
			names := slices.Sorted(maps.Keys(spoofs(mac(a), mac(b), ip4(ra), ip4(rb), nstest.Addr(gateway4), "")))
			var stopped []string
			buf := make([]byte, 2048)
			for i, name := range names {
				token, last, arrived := fmt.Sprintf("token-%02d", i), fmt.Sprintf("last--%02d", i), false
				send(name, token)
				send("its own MAC and address", last)
				for {
					got := must.Of(unix.Read(to, buf)).Get(t, "%s: wait for the frame behind it", name)
					if bytes.Contains(buf[:got], []byte(last)) {
						break
					}
					arrived = arrived || bytes.Contains(buf[:got], []byte(token))
				}
				if !arrived {
					stopped = append(stopped, name)
				}
			}
			if tt.stopped == nil {
				tt.stopped = slices.DeleteFunc(names, func(s string) bool { return s == "its own MAC and address" })
			}
			diff := cmp.Diff(tt.stopped, stopped, cmp.Transformer("set", func(s []string) string { return strings.Join(s, "\n") }))
			expect.That(t, diff == "", "claims that are stopped (-want +got):\n%s", diff)
			w.del(a)
			w.del(b)
			out := n.run("nft", "list", "ruleset")
			expect.That(t, !strings.Contains(out, "veth") || strings.Contains(out, `"veth*"`), "left behind:\n%s", out)
		})
	}
}
