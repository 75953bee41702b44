package cni

import (
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// These run on any kernel, and test/vm/run.sh noipv6 runs them on one that has IPv6
// switched off (ipv6.disable=1): nothing of IPv6 may be asked of it.

// ipv4Alone is a network without IPv6, with all that a pod can have in gateway mode.
func (n *node) ipv4Alone(fields conf) *network {
	return n.portnet(conf{"ipam": hostLocal(subnet4), "guard": true}).with(fields)
}

func TestPodWithIPv4AloneHasAllThatPodsHave(t *testing.T) {
	t.Parallel()
	for name, fields := range map[string]conf{
		"plain":       nil,
		"promiscuous": {"promiscMode": true, "hairpinMode": false},
		"small MTU":   {"mtu": 1000},
		"unguarded":   {"guard": false},
		"isolated":    {"ingressPolicy": "isolated"},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			out := n.outside()
			w := n.ipv4Alone(fields)
			expect.Success(t, w.status())
			a, b := n.pod("a"), n.pod("b")
			r := w.add(a, publish(t, "8080:80/tcp", "5300:53/udp"), limited(1e8, 2e8))
			rb := w.add(b)
			a.serve(t, "tcp", 80)
			a.serve(t, "udp", 53)
			wantPing(t, a.NS, gateway4, outside4)
			wantPing(t, n.ns, ip4(r).String(), ip4(rb).String())
			if name != "isolated" {
				wantPing(t, b.NS, ip4(r).String())
			}
			expect.Equal(t, seenAs(t, b.NS, out, outside4), uplink4, "the outside sees")
			for protocol, port := range map[string]int{"tcp": 8080, "udp": 5300} {
				expect.Success(t, expect.Err(askPort(t, out, protocol, uplink4, port)), "%s", protocol)
			}
			expect.Success(t, expect.Err(askPort(t, n.ns, "tcp", "127.0.0.1", 8080)))
			rates := n.rates()
			expect.That(t, len(rates) == 2, "rates %v, want two", rates)
			n.ipv4AloneIsMended(w, a)
			w.gc(a)
			w.del(a)
			w.del(b)
			n.wantNothing()
			expect.Success(t, n.remove(w.name).err())
			_, left := links(t, n.ns)["cbr0"]
			expect.That(t, !left, "the bridge is left")
		})
	}
}

// ipv4AloneIsMended takes a pod's rules and port away, and has them put back.
func (n *node) ipv4AloneIsMended(w *network, p *pod) {
	n.Helper()
	expect.Success(n, w.check(p))
	n.nft("flush ruleset")
	n.ip("link set " + w.port(p) + " nomaster")
	wantError(n, w.check(p), 113, "")
	if o := n.operate("ls", "--state", n.state); o.status != 0 || !strings.Contains(o.stdout, "differs") {
		n.Errorf("ls: status %d\n%s%s", o.status, o.stdout, o.stderr)
	}
	expect.Success(n, n.operate("repair", "--state", n.state).err())
	o := n.operate("check", "--state", n.state)
	expect.That(n, o.status == 0, "check: status %d\n%s%s", o.status, o.stdout, o.stderr)
	expect.Success(n, w.check(p))
	wantPing(n, p.NS, gateway4, outside4)
}

func TestLayer2WithIPv4Alone(t *testing.T) {
	n := parallelNode(t)
	a, b := n.pod("a"), n.pod("b")
	for i, p := range []*pod{a, b} {
		w := n.network("l2net", conf{"mode": "l2", "ipam": fixed(conf{"address": []string{"10.77.0.2/24", "10.77.0.3/24"}[i]})})
		w.add(p)
		expect.Success(t, w.check(p))
	}
	wantPing(t, a.NS, "10.77.0.3")
}

// homeLAN is a LAN on which the node has an address by its NIC, eth0.
func homeLAN(t *testing.T) *lan {
	t.Helper()
	nstest.Need(t, "dnsmasq")
	n := newNode(t)
	l := &lan{node: n, router: nstest.New(t)}
	nstest.Veth(t, n.ns, "eth0", l.router, "eth0")
	n.ip("address add 192.168.50.10/24 dev eth0")
	n.ip("route add default via " + router4)
	nstest.Run(t, l.router, "ip", "address", "add", router4+"/24", "dev", "eth0")
	nstest.Run(t, l.router, "ip", "link", "set", "lo", "up")
	l.serve(t)
	return l
}

func TestNICWithIPv4AloneIsSharedAndLeftAsItWas(t *testing.T) {
	t.Parallel()
	for _, by := range []string{"router", "host"} {
		nstest.RunParallel(t, "default route by the "+by, func(t *testing.T) {
			l := homeLAN(t)
			l.keep(t)
			before := l.run("ip", "-4", "address", "show", "dev", "eth0")
			w := l.node.network("home", conf{
				"mode": "lan", "uplink": "eth0", "bridge": "br0", "defaultRoute": by, "leaseDir": l.state + "-leases",
				"ipam": conf{"type": "dhcp"}, "guard": true, "capabilities": conf{"portMappings": true, "bandwidth": true},
			})
			expect.Success(t, w.status())
			p := w.addPod("a", publish(t, "8080:80/tcp"), limited(1e8, 2e8))
			p.serve(t, "tcp", 80)
			wantPing(t, p.NS, router4, "192.168.50.10")
			wantPing(t, l.ns, router4)
			wantPing(t, l.router, "192.168.50.10")
			expect.Success(t, expect.Err(askPort(t, l.router, "tcp", "192.168.50.10", 8080)))
			expect.Success(t, w.check(p))
			dirs := []string{"--state", l.state, "--leases", l.state + "-leases"}
			o := l.operate(append([]string{"uplink", "status"}, dirs...)...)
			expect.That(t, o.status == 0, "uplink status: %d\n%s%s", o.status, o.stdout, o.stderr)
			w.del(p)
			o = l.operate(append(append([]string{"remove"}, dirs...), "home")...)
			must.That(t, o.status == 0, "remove: %d\n%s%s", o.status, o.stdout, o.stderr)
			l.wantNothing()
			expect.Equal(t, l.run("ip", "-4", "address", "show", "dev", "eth0"), before, "the NIC had\n%sand has", before)
			wantPing(t, l.ns, router4)
		})
	}
}

// refusal is what asking for IPv6 is answered with, apart from what was asked for.
const refusal = "IPv6 is switched off in this kernel"

func TestKernelWithIPv4AloneSaysThatIPv6IsOff(t *testing.T) {
	t.Parallel()
	if nstest.HasIPv6() {
		t.Skip("this kernel has IPv6: test/vm/run.sh noipv6 boots one that has not")
	}
	for name, tt := range map[string]struct {
		fields conf
		asked  string
	}{
		"range beside an IPv4 one": {nil, "fd77::"},
		"range alone":              {conf{"ipam": hostLocal(subnet6)}, "fd77::"},
		"range, layer 2":           {conf{"mode": "l2", "ipam": hostLocal(subnet6)}, "fd77::"},
		"address":                  {conf{"ipam": fixed(conf{"address": "fd77::9/64", "gateway": gateway6})}, "an address in fd77::/64"},
		"address, layer 2":         {conf{"mode": "l2", "ipam": fixed(conf{"address": "fd77::9/64"})}, "an address in fd77::/64"},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			w := n.podnet(tt.fields)
			wantError(t, w.status(), 50, refusal)
			for _, says := range []string{refusal, tt.asked, "ipv6.disable=1"} {
				wantError(t, expect.Err(w.tryAdd(n.pod("a"))), 7, says)
			}
			n.wantNothing()
			// Without it, the same network goes.
			w.with(conf{"ipam": hostLocal(subnet4)}).add(n.pod("b"))
		})
	}
	nstest.RunParallel(t, "slaac", func(t *testing.T) {
		l := homeLAN(t)
		w := l.node.network("home", conf{"mode": "lan", "uplink": "eth0", "bridge": "br0", "ipv6": "slaac", "leaseDir": l.state + "-leases",
			"ipam": conf{"type": "dhcp", "keeper": "optional"}})
		wantError(t, w.status(), 50, refusal)
		_, err := w.tryAdd(l.pod("a"))
		wantError(t, err, 7, refusal)
		wantError(t, err, 7, "slaac")
		expect.Equal(t, l.leased(), "", "a lease was taken")
		_, made := links(t, l.ns)["br0"]
		expect.That(t, !made, "the NIC was taken over")
	})
}
