package lan

import (
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// A container in a network of the node and in one of the LAN is reached at its port, whichever network is first, and
// whichever gets the port.
func TestAPublishedPortOfAContainerOnTheLANAndOnTheNode(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		order string
		port  string // of which networks it is: as podman does it, both
		exit  string
		lease bool
	}{
		"LAN first":                        {"lan pods", "lan pods", "router", false},
		"node first":                       {"pods lan", "lan pods", "router", false},
		"node first, by the host":          {"pods lan", "lan pods", "host", false},
		"LAN first, by the host":           {"lan pods", "lan pods", "host", false},
		"node first, leased":               {"pods lan", "lan pods", "router", true},
		"node first, which has the port":   {"pods lan", "pods", "router", false},
		"LAN first, the node has the port": {"lan pods", "pods", "router", false},
		"leased, then node, with the port": {"lan pods", "pods", "router", true},
		"node with the port, then a lease": {"pods lan", "pods", "router", true},
		"node first, the LAN has the port": {"pods lan", "lan", "router", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, _ := newLab(t)
			n := l.network(dualStack(object{"defaultRoute": tt.exit}))
			if !tt.lease {
				n.conf["ipv6"] = ""
				n.conf["ipam"] = object{"type": "static", "addresses": []any{
					object{"address": "192.168.50.40/24", "gateway": routerIP4}, object{"address": "fd50::40/64", "gateway": routerIP6}}}
			}
			nets := map[string]*network{"lan": n, "pods": n.another(object{
				"name": "pods", "mode": "gateway", "bridge": "br7", "uplink": "", "ipv6": "", "defaultRoute": "", "ipMasq": false,
				"ipam": object{"type": "host-local", "dataDir": t.TempDir(), "ranges": []any{
					[]any{object{"subnet": "10.22.0.0/16"}}, []any{object{"subnet": "fd22::/64"}}}},
			})}
			c := l.newPod("c", published()...)
			both := map[string]*pod{}
			for i, name := range strings.Fields(tt.order) {
				one := *c
				one.ifname = []string{"eth0", "eth1"}[i]
				if !strings.Contains(tt.port, name) {
					one.ports = nil
				}
				both[name] = nets[name].add(&one)
			}
			l.serve(c.place, servicePort, 4, 6)
			for _, family := range []int{4, 6} {
				for _, from := range []place{l.other, l.internet, l.router, l.host} {
					l.ask(from, l.host.at(family), hostPort)
				}
			}
			if tt.port != "lan" { // the node's network has the port
				l.ask(l.host, nstest.Addr("127.0.0.1"), hostPort)
				for name, p := range both {
					nets[name].check(p)
				}
				if !tt.lease { // which no keeper renews here
					expect.Contains(t, n.operate("check"), "nothing differs", "check")
					l.hostRun("nft", "flush ruleset")
					n.operate("repair")
					l.ask(l.other, l.host.ip4, hostPort)
				}

				// Without the LAN, the port's callers are seen as they are.
				n.del(both["lan"])
				for _, family := range []int{4, 6} {
					for _, from := range []place{l.other, l.internet} {
						l.ask(from, l.host.at(family), hostPort, from.at(family))
					}
				}
			} else {
				n.del(both["lan"])
			}
			nets["pods"].del(both["pods"])
		})
	}
}
