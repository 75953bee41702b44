package containerd

import (
	"net/netip"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// The pod CIDRs of a node before and after they change, and what is the gateway in
// each.
const (
	oldCIDRs                 = "10.187.1.0/24,fd18:1::/64"
	oldGateway4, oldGateway6 = "10.187.1.1/24", "fd18:1::1/64"
	newCIDRs                 = "10.187.2.0/24,fd18:2::/64"
	newGateway4, newGateway6 = "10.187.2.1/24", "fd18:2::1/64"
)

func TestPodCIDRsAreWrittenOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.setPodCIDRs(oldCIDRs)
	n.updatePodCIDRs(newCIDRs)
	expect.Equal(t, n.loadedConflist(), renderTemplate(t, oldCIDRs), "containerd has replaced what it wrote, with")
	p := n.runPod("a")
	n.wantGateways(oldGateway4, oldGateway6)
	p.remove()
	n.wantNothing()
}

// containerd fills in the routes of both families, too, and what it makes is a network that works.
func TestTemplateOfAClusterMakesANetwork(t *testing.T) {
	t.Parallel()
	n := newNodeOf(t, clusterTemplate)
	n.setPodCIDRs(oldCIDRs)
	expect.Equal(t, n.loadedConflist(), render(t, clusterTemplate, oldCIDRs), "containerd makes another network of the template than the tests do")
	p := n.runPod("a")
	n.wantGateways(oldGateway4, oldGateway6)
	for i := range p.ips {
		wantAnswer(t, n.ns, "tcp", p.at(i))
	}
	p.remove()
	n.wantNothing()
}

func TestOldGatewaysStayUntilTheirPodsAreGone(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.outside()
	n.setPodCIDRs(oldCIDRs)
	first, last := n.runPod("first"), n.runPod("last")
	n.rewritePodCIDRs(newCIDRs)
	renewed := n.runPod("renewed")
	for i, cidr := range []string{"10.187.2.0/24", "fd18:2::/64"} {
		if !nstest.Prefix(cidr).Contains(renewed.ips[i]) {
			t.Errorf("address %s of a pod after the change, want one of %s", renewed.ips[i], cidr)
		}
	}
	n.wantGateways(oldGateway4, oldGateway6, newGateway4, newGateway6)
	uplinks := []string{uplink4, uplink6}
	servers := []netip.AddrPort{
		nstest.Serve(t, out, "tcp", hostPort(outside4, 0)), nstest.Serve(t, out, "tcp", hostPort(outside6, 0)),
	}
	works := func(pods ...*pod) {
		t.Helper()
		for _, a := range pods {
			for i := range a.ips {
				wantAnswer(t, n.ns, "tcp", a.at(i))
				wantAnswer(t, out, "tcp", a.at(i))
				for _, b := range pods {
					if seen := wantAnswer(t, a.ns, "tcp", b.at(i)); seen != a.ips[i] {
						t.Errorf("a pod sees another as %s, not as %s", seen, a.ips[i])
					}
				}
			}
			for i, to := range servers {
				if seen := wantAnswer(t, a.ns, "tcp", to); seen != nstest.Addr(uplinks[i]) {
					t.Errorf("%s sees a pod as %s, not as %s", to, seen, uplinks[i])
				}
			}
		}
	}
	works(first, last, renewed)

	first.remove()
	another := n.runPod("another")
	n.wantGateways(oldGateway4, oldGateway6, newGateway4, newGateway6)
	works(last, renewed, another)

	last.remove()
	final := n.runPod("final")
	n.wantGateways(newGateway4, newGateway6)
	works(renewed, another, final)
	for _, p := range []*pod{renewed, another, final} {
		p.remove()
	}
	n.wantNothing()
}

func TestNodeBecomesDualStack(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.setPodCIDRs("10.188.1.0/24")
	single := n.runPod("single")
	n.rewritePodCIDRs("10.188.1.0/24,fd18:2::/64")
	dual := n.runPod("dual")
	n.wantGateways("10.188.1.1/24", newGateway6)
	wantAnswer(t, n.ns, "tcp", dual.at(1))
	wantAnswer(t, single.ns, "tcp", dual.at(0))
	wantAnswer(t, dual.ns, "tcp", single.at(0))
	single.remove()
	dual.remove()
	n.wantNothing()
}

func TestNodeIsDualStackNoMore(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		cidr, gateway string
		family        int // which of a dual-stack pod's addresses goes on
	}{
		"ipv4": {"10.187.1.0/24", oldGateway4, 0},
		"ipv6": {"fd18:1::/64", oldGateway6, 1},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			n.setPodCIDRs(oldCIDRs)
			dual := n.runPod("dual")
			n.rewritePodCIDRs(c.cidr)
			single := n.runPod("single")
			n.wantGateways(oldGateway4, oldGateway6)
			for i := range dual.ips {
				wantAnswer(t, n.ns, "tcp", dual.at(i))
			}
			wantAnswer(t, single.ns, "tcp", dual.at(c.family))
			dual.remove()
			another := n.runPod("another")
			n.wantGateways(c.gateway)
			wantAnswer(t, another.ns, "tcp", single.at(0))
			single.remove()
			another.remove()
			n.wantNothing()
		})
	}
}
