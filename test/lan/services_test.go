package lan

import (
	"fmt"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

const (
	toPod4, toPod6   = "10.96.0.10", "fd96::10" // services' addresses, of pod b and of the host
	toHost4, toHost6 = "10.96.0.11", "fd96::11"
	nodePort         = 30080
)

// kubeProxy has the host translate services' addresses and its own port to a pod's server, and drop what conntrack does
// not know. Nothing is forwarded but what these rules or Tombolo's accept.
func (l *lan) kubeProxy(pods ...*pod) {
	l.Helper()
	rules := `table inet kube {
		chain input { type filter hook input priority filter; ct state invalid counter drop; };
		chain forward { type filter hook forward priority filter; policy drop; ct state invalid counter drop;
			ct state established,related accept; ct status dnat accept; iifname pod0 accept; meta mark & 0x10 != 0 accept; };`
	var nat, back strings.Builder
	for _, f := range []struct{ name, toPod, toHost, pod, host, other string }{
		{"ip", toPod4, toHost4, pods[1].ip4.String(), hostIP4, otherIP4},
		{"ip6", toPod6, toHost6, pods[1].ip6.String(), hostIP6, otherIP6},
	} {
		to := func(address string, port int) string {
			if f.name == "ip6" {
				address = "[" + address + "]"
			}
			return fmt.Sprintf("dnat %s to %s:%d; ", f.name, address, port)
		}
		l4 := " meta l4proto { tcp, udp } th dport "
		fmt.Fprint(&nat, f.name, " daddr ", f.toPod, l4, "443 ", to(f.pod, servicePort),
			f.name, " daddr ", f.toHost, l4, "443 ", to(f.host, servicePort+1),
			f.name, " daddr ", f.host, l4, nodePort, " ", to(f.pod, servicePort))
		// NodePorts, and a pod that is its own backend.
		fmt.Fprint(&back, "ct status dnat ct original ", f.name, " daddr ", f.host, " masquerade; ",
			"ct status dnat ", f.name, " saddr ", f.pod, " ", f.name, " daddr ", f.pod, " masquerade; ")
	}
	l.nft(rules + `chain pre { type nat hook prerouting priority dstnat; ` + nat.String() + `};
		chain out { type nat hook output priority -100; ` + nat.String() + `};
		chain post { type nat hook postrouting priority srcnat; ` + back.String() + `}; }`)
}

// Services, published ports and a masqueraded network beside the LAN work from everywhere while bridged packets pass a
// firewall that drops what it does not know, whatever the host has of filters.
func TestServicesOfASharedNIC(t *testing.T) {
	for name, parameters := range map[string]map[string]string{
		"as it is":         nil,
		"strict rp_filter": {"ipv4/conf/*/rp_filter": "1"},
		"arp_ignore 1":     {"ipv4/conf/*/arp_ignore": "1"},
		"arp_ignore 2":     {"ipv4/conf/*/arp_ignore": "2"},
		"arp_filter 1":     {"ipv4/conf/*/arp_filter": "1"},
		// Pods reach no service's address there: what they send goes by the router.
		"without br_netfilter": nil,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, _ := newLab(t)
			for path, value := range parameters {
				for _, conf := range []string{"all", "default", nic} {
					nstest.Sysctl(t, l.host.ns, "net/"+strings.Replace(path, "*", conf, 1), value)
				}
			}
			byRouter := name == "without br_netfilter"
			l.callIPTables(map[bool]string{true: "0", false: "1"}[byRouter])
			masquerading(l)
			n := l.network(dualStack(object{"defaultRoute": map[bool]string{true: "router", false: "host"}[byRouter]}))
			a, b := n.add(l.newPod("a", published()...)), n.add(l.newPod("b"))
			for _, p := range []*pod{a, b} {
				l.serve(p.place, servicePort, both()...)
			}
			l.kubeProxy(a, b)
			for _, family := range both() {
				l.everybodyTalks(family, a.place, b.place)
				l.publishedPortIsReached(family, a.place, b.place)
				toPod, toHost := nstest.Addr(toPod4), nstest.Addr(toHost4)
				if family == 6 {
					toPod, toHost = nstest.Addr(toPod6), nstest.Addr(toHost6)
				}
				for _, from := range []place{l.host, l.pod, a.place, b.place} {
					if !byRouter || from == l.host || from == l.pod {
						l.ask(from, toPod, 443)
					}
				}
				if !byRouter {
					l.ask(a.place, toHost, 443)
				}
				for _, from := range []place{a.place, b.place, l.other, l.internet, l.pod} {
					l.ask(from, l.host.at(family), nodePort)
				}
				l.ask(l.pod, l.other.at(family), servicePort, l.host.at(family))
				l.ask(l.pod, a.at(family), servicePort)
			}
		})
	}
}

// The host is the LAN's DHCP server, by dnsmasq that listens at eth0 alone, and pods lease from it as others do.
func TestPodsLeaseFromAServerOfTheHost(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	d := nstest.NewDnsmasq(t, l.host.ns, nic, serving()...)
	n := l.network(dualStack(object{"defaultRoute": "router"}))
	a := n.add(l.newPod("a"))
	wantWithinSubnets(t, a.place, subnet4)
	expect.Contains(t, d.Leased(), a.ip4.String(), "the host's server")
	n.del(a)
	(&dhcp{l, d}).forgets(a.ip4.String())
}
