package lan

import (
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// rogueSubnet is what a pod leases that was told so by another pod.
const rogueFirst, rogueLast = "192.168.50.210", "192.168.50.220"

// A pod that has all rights in its namespace takes itself for the router, while that is
// silent: so a machine that takes the pod for the router gets an answer, and no other does.
// Package nft has more attacks, frame by frame.
func TestGuardedPodIsNotTakenForTheRouter(t *testing.T) {
	for _, guarded := range []bool{false, true} {
		t.Run(fmt.Sprintf("lanGuard %t", guarded), func(t *testing.T) {
			l := newHost(t)
			l.dnsmasq()
			fields := object{}
			if !guarded {
				fields["lanGuard"] = false // the default is true
			}
			n := l.network(fields)
			evil := n.add(l.newPod("evil"))
			ip(t, l.router.ns, "link set "+nic+" down")
			for _, p := range []place{l.other, l.host} {
				ip(t, p.ns, "neigh flush all")
			}
			impersonate(t, l, evil)

			wait := aMinute
			if guarded {
				wait = aMoment
			}
			for _, who := range []struct {
				place
				asks netip.Addr
			}{{l.other, l.router.ip4}, {l.other, l.router.ip6}, {l.host, l.router.ip4}} {
				believed := nstest.PingWith(t, who.ns, who.asks, nstest.Echo{Wait: wait}) == nil
				expect.That(t, believed != guarded, "%s takes the pod for %s: %t", who.name, who.asks, believed)
			}
			if guarded {
				n.conf["ipam"].(object)["timeout"] = "2s" // nobody is to answer
			}
			neighbour := l.newPod("neighbour")
			out, err := n.verb("ADD", neighbour)
			switch {
			case guarded && (err == nil || !strings.Contains(err.Error(), `"code":11,`)):
				t.Errorf("ADD of another pod: %s %v, want that no server answered", out, err)
			case !guarded && err != nil:
				t.Errorf("the pod's server does not work, so the test shows nothing: %v", err)
			case !guarded:
				neighbour.learn(t, out)
				if neighbour.ip4.Less(nstest.Addr(rogueFirst)) || nstest.Addr(rogueLast).Less(neighbour.ip4) {
					t.Errorf("the other pod has %s, which is not the pod's to give", neighbour.ip4)
				}
				n.del(neighbour)
			}
			// What it is it may go on to be.
			if guarded {
				ip(t, evil.ns, "address del "+routerIP4+"/24 dev "+nic, "address del "+routerIP6+"/64 dev "+nic)
				l.serve(l.other, servicePort, 4)
				l.ask(evil.place, l.other.ip4, servicePort, evil.ip4)
			}
			n.del(evil)
		})
	}
}

// impersonate gives a pod the router's addresses, and a DHCP server.
func impersonate(t *testing.T, l *lan, evil *pod) {
	t.Helper()
	nstest.Sysctl(t, evil.ns, "net/ipv6/conf/"+nic+"/disable_ipv6", "0")
	nstest.Sysctl(t, evil.ns, "net/ipv6/conf/"+nic+"/accept_dad", "0")
	ip(t, evil.ns, "address add "+routerIP4+"/24 dev "+nic, "address add "+routerIP6+"/64 dev "+nic+" nodad")
	nstest.WaitForAddresses(t, evil.ns)
	cmd := exec.Command("dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--no-ping", "--port=0",
		"--bind-interfaces", "--interface="+nic, "--except-interface=lo", "--dhcp-authoritative", "--pid-file=", "--user=root", "--leasefile-ro",
		"--log-facility="+t.TempDir()+"/log", "--dhcp-range="+rogueFirst+","+rogueLast+",2m")
	cmd.Stderr = l.Output()
	must.Succeed(t, evil.ns.Do(cmd.Start))
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	must.Until(l, "the pod serves DHCP", func() bool {
		return strings.Contains(nstest.Run(t, evil.ns, "ss", "-lnu"), ":67 ")
	})
}
