package nstest

import (
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/netns"
)

// Site is a host with the bridge cbr0, two pods on it, and a machine outside that has
// routes to the pods.
type Site struct{ Host, Pod, Other, Outside *netns.NS }

// NewSite makes one. The host forwards, and bridged packets do not pass its firewall's hooks.
func NewSite(tb testing.TB) *Site {
	tb.Helper()
	s := &Site{Host: New(tb), Pod: New(tb), Other: New(tb), Outside: New(tb)}
	Run(tb, s.Host, "ip", "link", "add", "cbr0", "address", "02:00:00:00:00:01", "type", "bridge", "mcast_snooping", "0", "forward_delay", "0")
	Veth(tb, s.Host, "veth1", s.Pod, "eth0")
	Veth(tb, s.Host, "veth2", s.Other, "eth0")
	Veth(tb, s.Host, "up0", s.Outside, "eth0")
	Run(tb, s.Host, "sh", "-ec", `
		ip link set veth1 master cbr0
		ip link set veth2 master cbr0
		ip link set cbr0 up
		ip addr add 10.22.0.1/16 dev cbr0
		ip addr add fd00:22::1/64 dev cbr0 nodad
		ip addr add fe80::1/64 dev cbr0 nodad # neighbour discovery for others needs one
		ip addr add 192.0.2.1/24 dev up0
		ip addr add 2001:db8:1::1/64 dev up0 nodad
		ip addr add fe80::1/64 dev up0 nodad
		ip route add default via 192.0.2.2
		ip route add default via 2001:db8:1::2
		# The default in each new namespace is 1 where br_netfilter is there.
		for family in ip ip6; do
			sysctl=/proc/sys/net/bridge/bridge-nf-call-${family}tables
			! test -e $sysctl || echo 0 >$sysctl
		done
		echo 1 >/proc/sys/net/ipv4/ip_forward
		echo 1 >/proc/sys/net/ipv6/conf/all/forwarding`)
	Run(tb, s.Outside, "sh", "-ec", `
		ip link set lo up
		ip addr add 192.0.2.2/24 dev eth0
		ip addr add 2001:db8:1::2/64 dev eth0 nodad
		ip addr add fe80::2/64 dev eth0 nodad
		ip addr add 198.51.100.1/32 dev lo
		ip addr add 172.16.0.1/32 dev lo
		ip addr add 2001:db8:2::1/128 dev lo
		ip addr add fd00:16::1/128 dev lo
		ip route add 10.22.0.0/16 via 192.0.2.1
		ip route add fd00:22::/64 via 2001:db8:1::1`)
	Run(tb, s.Pod, "sh", "-ec", `
		ip link set eth0 address 02:00:00:00:00:05
		ip addr add 10.22.0.5/16 dev eth0
		ip addr add fd00:22::5/64 dev eth0 nodad
		ip route add default via 10.22.0.1
		ip route add default via fd00:22::1`)
	Run(tb, s.Other, "sh", "-ec", `
		ip addr add 10.22.0.6/16 dev eth0
		ip addr add 203.0.113.6/32 dev eth0
		ip route add default via 10.22.0.1`)
	WaitForAddresses(tb, s.Host, s.Outside, s.Pod)
	return s
}

// Reaches says whether a ping is answered; where none should be, it does not wait long.
func Reaches(tb testing.TB, from *netns.NS, to string, want bool) {
	tb.Helper()
	opt := Echo{}
	if !want {
		opt.Wait = 100 * time.Millisecond
	}
	// What is rejected is refused, in one way or another.
	if err := PingWith(tb, from, Addr(to), opt); (err == nil) != want {
		tb.Errorf("%s is reached: %v", to, err)
	}
}

// Programs are iptables and ip6tables.
func Programs() []string { return []string{"iptables", "ip6tables"} }

// Script runs lines of "iptables …" for both families, over nf_tables.
func Script(tb testing.TB, ns *netns.NS, lines ...string) {
	tb.Helper()
	for _, program := range Programs() {
		for _, line := range lines {
			Run(tb, ns, "sh", "-ec", strings.ReplaceAll(line, "iptables", program+"-nft"))
		}
	}
}
