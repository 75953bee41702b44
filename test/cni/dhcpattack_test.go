package cni

import (
	"net"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// Somebody has all rights in the namespace that an ADD is about to make an interface in,
// and has what is sent there answered by a server of theirs: as soon as there is an
// interface, what it sends goes there and not to the LAN.
func TestADDDoesNotBelieveThePodsOwnServer(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(conf{"macspoofchk": true, "ipam": conf{"type": "dhcp", "keeper": "optional"}})
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
	rogue := &lan{node: l.node, router: nstest.Divert(t, p.NS, "eth0", "redirected"), leases: t.TempDir() + "/leases", log: t.TempDir() + "/log"}
	nstest.Run(t, rogue.router, "ip", "address", "add", "192.168.50.66/24", "dev", "eth0")
	rogue.serve(t)
	if got, err := leaseInPod(t, p); err != nil || got.Server.String() != "192.168.50.66" {
		t.Fatalf("the attack does not work, so that the test shows nothing: %v, %v", got, err)
	}
	wantError(t, <-added, 11, "no answer to")
	if got := readFileIf(t, rogue.log); !strings.Contains(got, "DHCPOFFER(eth0) ") || !strings.Contains(got, mac) {
		t.Errorf("the ADD's DISCOVER did not come to the pod's server, so that the test shows nothing:\n%s", got)
	}
	l.wantNothing()
}

// leaseInPod leases as one does that believes what it hears in the pod.
func leaseInPod(t *testing.T, p *pod) (*dhcpc.Lease, error) {
	t.Helper()
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 0xaa}
	client, err := dhcpc.New(&dhcpc.Config{
		MAC: mac, Broadcast: true, Retransmit: 200 * time.Millisecond, Timeout: patience,
		Dial: transport.Dialer(&transport.Config{NetNS: p.NS, Link: nstest.Index(t, p.NS, "eth0"), MAC: mac}),
	})
	if err != nil {
		t.Fatal(err)
	}
	return client.Acquire(t.Context())
}

func TestThePortWhereDHCPServersAnswerIsNotPublished(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(nil)
	_, err := w.tryAdd(l.pod("a"), publish(t, "8068:68/udp"))
	wantError(t, err, 7, "where DHCP servers answer")
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
	if got := readFileIf(t, l.log); ip4(a).String() != "192.168.50.3" || !strings.Contains(got, "DHCPDECLINE(eth0) 192.168.50.2 ") {
		t.Errorf("the pod has %s, want the one behind the host's; the server says:\n%s", ip4(a), got)
	}
	again := &lan{node: l.node, router: l.router, leases: t.TempDir() + "/leases", log: t.TempDir() + "/log"}
	l.server.Process.Kill()
	l.server.Wait()
	again.serve(t, "--dhcp-sequential-ip", "--dhcp-range=set:few,192.168.50.3,192.168.50.4,1h")
	b := w.add(l.pod("b"))
	if got := readFileIf(t, again.log); ip4(b).String() != "192.168.50.4" || !strings.Contains(got, "DHCPDECLINE(eth0) 192.168.50.3 ") {
		t.Errorf("the pod has %s, want the one behind the other pod's; the server says:\n%s", ip4(b), got)
	}
}
