package cni

import (
	"net"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// Somebody has all rights in the namespace that an ADD is about to make an interface in,
// and has what is sent there answered by a server of theirs: as soon as there is an
// interface, what it sends goes there and not to the LAN.
func TestADDDoesNotBelieveThePodsOwnServer(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(conf{"guard": true, "ipam": conf{"type": "dhcp", "keeper": "optional"}})
	w.plugin["ipam"].(conf)["timeout"] = "8s" // two DISCOVERs; nobody is to answer
	p := l.pod("evil")
	// The LAN's server is gone, so that there is time.
	nstest.Run(t, l.router, "ip", "link", "set", "eth0", "down")
	added := make(chan error)
	go func() {
		_, err := w.tryAdd(p, publish(t, "8080:80/tcp"))
		added <- err
	}()
	l.eventually(t, func() bool {
		out, err := nstest.Try(p.NS, "ip", "-o", "link", "show", "eth0")
		return err == nil && strings.Contains(out, ",UP")
	})
	mac := nstest.MAC(t, p.NS, "eth0")
	rogue := &lan{node: l.node, router: nstest.Divert(t, p.NS, "eth0", "redirected")}
	nstest.Run(t, rogue.router, "ip", "address", "add", "192.168.50.66/24", "dev", "eth0")
	rogue.serve(t)
	if got, err := leaseInPod(t, p); err != nil || got.Server.String() != "192.168.50.66" {
		t.Fatalf("the attack does not work, so that the test shows nothing: %v, %v", got, err)
	}
	wantError(t, <-added, 11, "no answer to")
	if got := nstest.ReadIf(t, rogue.log); !strings.Contains(got, "DHCPOFFER(eth0) ") || !strings.Contains(got, mac) {
		t.Errorf("the ADD's DISCOVER did not come to the pod's server, so that the test shows nothing:\n%s", got)
	}
	l.wantNothing()
}

// A bridge sends what a pod broadcasts back to the pod where its port is in hairpin mode: so a
// server that the pod runs hears the ADD's DISCOVER, and its answer leaves by the pod's port.
func TestADDDoesNotBelieveWhatComesBackToThePod(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(conf{"hairpinMode": true, "ipam": conf{"type": "dhcp", "keeper": "optional"}})
	w.plugin["ipam"].(conf)["timeout"] = "8s" // two DISCOVERs; nobody is to answer
	p := l.pod("evil")
	nstest.Run(t, l.router, "ip", "link", "set", "eth0", "down")
	added := make(chan error)
	go func() {
		_, err := w.tryAdd(p)
		added <- err
	}()
	l.eventually(t, func() bool {
		out, err := nstest.Try(p.NS, "ip", "-o", "link", "show", "eth0")
		return err == nil && strings.Contains(out, ",UP")
	})
	mac := nstest.MAC(t, p.NS, "eth0")
	nstest.Run(t, p.NS, "ip", "address", "add", "192.168.50.66/24", "dev", "eth0")
	rogue := &lan{node: l.node, router: p.NS}
	rogue.serve(t, "--dhcp-option=option:router")
	err := <-added
	if got := nstest.ReadIf(t, rogue.log); !strings.Contains(got, "DHCPOFFER(eth0) ") || !strings.Contains(got, mac) {
		t.Errorf("the ADD's DISCOVER did not come to the pod's server, so that the test shows nothing:\n%s", got)
	}
	wantError(t, err, 11, "no answer to")
	l.wantNothing()
}

// leaseInPod leases as a client does that takes what it hears in the pod for true.
func leaseInPod(t *testing.T, p *pod) (*dhcpc.Lease, error) {
	t.Helper()
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 0xaa}
	client, err := dhcpc.New(&dhcpc.Config{
		MAC: mac, Broadcast: true, Retransmit: 200 * time.Millisecond, Timeout: patience,
		Dial: transport.Dialer(&transport.Config{NetNS: p.NS, Link: nstest.Index(t, p.NS, "eth0"), MAC: mac}),
	})
	must.Succeed(t, err)
	return client.Acquire(t.Context())
}

func TestThePortWhereDHCPServersAnswerIsNotPublished(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(nil)
	wantError(t, expect.Err(w.tryAdd(l.pod("a"), publish(t, "8068:68/udp"))), 7, "where DHCP servers answer")
	w.add(l.pod("b"), publish(t, "8068:68/tcp", "68:8068/udp"))
}

// The server's range has the host's own address in it, and it forgets what it has given.
func TestADDDeclinesWhatTheHostOrAnotherPodHas(t *testing.T) {
	t.Parallel()
	l := newLAN(t, "--dhcp-sequential-ip", "--dhcp-range=set:few,192.168.50.2,192.168.50.4,1h")
	l.ip("address add 192.168.50.2/24 dev br0")
	w := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional", "timeout": "2m"}})
	w.plugin["ipam"].(conf)["timeout"] = "2m"
	a := w.add(l.pod("a"))
	if got := nstest.ReadIf(t, l.log); ip4(a).String() != "192.168.50.3" || !strings.Contains(got, "DHCPDECLINE(eth0) 192.168.50.2 ") {
		t.Errorf("the pod has %s, want the one behind the host's; the server says:\n%s", ip4(a), got)
	}
	again := &lan{node: l.node, router: l.router}
	l.server.Stop()
	again.serve(t, "--dhcp-sequential-ip", "--dhcp-range=set:few,192.168.50.3,192.168.50.4,1h")
	b := w.add(l.pod("b"))
	if got := nstest.ReadIf(t, again.log); ip4(b).String() != "192.168.50.4" || !strings.Contains(got, "DHCPDECLINE(eth0) 192.168.50.3 ") {
		t.Errorf("the pod has %s, want the one behind the other pod's; the server says:\n%s", ip4(b), got)
	}
}

// A server that says what may do harm: the pod gets what can be had of it, and the host
// nothing. A bridge whose MTU nobody has set follows the lowest of its ports.
func TestAServersWordsChangeNothingOfTheHosts(t *testing.T) {
	t.Parallel()
	before := func(l *lan) string {
		return nstest.Run(t, l.ns, "sh", "-c", "ip -o link show br0 | grep -o 'mtu [0-9]*'; ip -4 route; ip -4 address; cat /etc/resolv.conf")
	}
	for name, options := range map[string][]string{
		"MTU of 68":    {"--dhcp-option-force=option:mtu,68"},
		"MTU of 576":   {"--dhcp-option-force=option:mtu,576"},
		"MTU of 65535": {"--dhcp-option-force=option:mtu,65535"},
		"half of the world each": {"--dhcp-option-force=option:classless-static-route,0.0.0.0/1,192.168.50.66,128.0.0.0/1,192.168.50.66",
			"--dhcp-option-force=option:router,8.8.8.8"},
		"names with line breaks": {"--dhcp-option-force=15,61:0a:6e:20:62",
			"--dhcp-option-force=119,03:61:0a:62:00", "--dhcp-option-force=6,0.0.0.0,127.0.0.1,255.255.255.255"},
		"time servers, a host name and other options": {"--dhcp-option-force=42,127.0.0.1", "--dhcp-option-force=12,root", "--dhcp-option-force=66,evil",
			"--dhcp-option-force=252,http://192.0.2.66/"},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			l := newLAN(t, options...)
			was := before(l)
			w, p := l.network(nil), l.pod("a")
			r := w.add(p)
			expect.Equal(t, before(l), was, "the host was\n%s\nand is", was)
			expect.Success(t, w.check(p))
			mtu := r.Interfaces[2].Mtu
			expect.That(t, mtu >= 576 && mtu <= 1500, "the pod's MTU is %d", mtu)
			for _, text := range append(append([]string{r.DNS.Domain}, r.DNS.Search...), r.DNS.Nameservers...) {
				expect.That(t, !strings.ContainsAny(text, " \n") && text != "127.0.0.1" && text != "0.0.0.0",
					"the result says %q", text)
			}
			w.del(p)
			l.wantNothing()
		})
	}
}

// Servers name the lease's own subnet among the routes (OpenStack's do), or a destination twice. The
// kernel has the one already, and takes the other once.
func TestRoutesThatAServerNamesTwiceDoNotStopAnADD(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]string{
		"its subnet, on link":        "192.168.50.0/24,0.0.0.0",
		"its subnet, by a router":    "192.168.50.0/24,192.168.50.66",
		"a destination, two routers": "10.9.0.0/16,192.168.50.9,10.9.0.0/16,192.168.50.8",
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			l := newLAN(t, "--dhcp-option=option:classless-static-route,"+first+",10.9.0.0/16,192.168.50.7,0.0.0.0/0,"+router4)
			w, p := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional"}}), l.pod("a")
			w.add(p)
			routes := nstest.Run(t, p.NS, "ip", "-4", "route")
			expect.That(t, strings.Count(routes, "10.9.0.0/16") == 1 && strings.Count(routes, "192.168.50.0/24") == 1 && !strings.Contains(routes, "192.168.50.66"),
				"routes:\n%s", routes)
			wantPing(t, p.NS, router4)
			expect.Success(t, w.check(p))
			w.del(p)
			l.wantNothing()
		})
	}
}

// A server that says that half of all addresses are on the pod's link would have the network's
// pods sent there without masquerade, and the pod itself send past the host.
func TestAServersMaskTakesNothingFromOtherPods(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	l.ip("address add 192.168.50.10/24 dev br0")
	w := l.network(conf{"ipMasq": true})
	w.add(l.pod("good"))
	rules := func() string { return nstest.Run(t, l.ns, "nft", "list", "chain", "inet", "tombolo", "masq-lan") }
	before := rules()
	l.server.Stop()
	evil := &lan{node: l.node, router: l.router}
	evil.serve(t, "--dhcp-option-force=1,128.0.0.0")
	p := w.addPod("b")
	expect.Contains(t, nstest.ReadIf(t, evil.log), "netmask  128.0.0.0", "the server named no such mask, so that the test shows nothing")
	expect.Equal(t, rules(), before, "masquerade was\n%s\nand is", before)
	got := nstest.Run(t, p.NS, "ip", "-4", "route", "show", "scope", "link")
	expect.That(t, strings.HasPrefix(got, "192.168.50.0/24 ") && strings.Count(got, "\n") == 1, "on the pod's link are:\n%s", got)
}
