package cni

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// Kubenet took the first address of the CIDR for the gateway, whatever its IPAM
// said. These tests have one that says something else.

// answering is an ipam section of a third party's plugin, which answers so.
func answering(t *testing.T, answer string) fakeConf {
	t.Helper()
	section, _ := fake(t, fakeConf{Answer: json.RawMessage(answer)})
	return section
}

const gatewayFive = `{"cniVersion":"1.0.0","ips":[
	{"address":"10.77.0.9/24","gateway":"10.77.0.5"},
	{"address":"fd77::9/64","gateway":"fd77::5"}]}`

func TestKubenetRegressionTheGatewayIsTheOneOfTheResult(t *testing.T) {
	n := parallelNode(t)
	out := n.outside()
	w := n.podnet(conf{"ipam": answering(t, gatewayFive)})
	p := n.pod("a")
	r := w.add(p)
	for _, tt := range []struct{ family, gateway, first, outside, uplink string }{
		{"-4", "10.77.0.5", "10.77.0.1", outside4, uplink4},
		{"-6", "fd77::5", "fd77::1", outside6, uplink6},
	} {
		if got := nstest.Run(t, p.NS, "ip", tt.family, "route", "show", "default"); !strings.Contains(got, "via "+tt.gateway+" ") {
			t.Errorf("the pod's default route is %q, want one via %s", got, tt.gateway)
		}
		if got := n.run("ip", tt.family, "-o", "address", "show", "dev", "cbr0"); !strings.Contains(got, " "+tt.gateway+"/") || strings.Contains(got, " "+tt.first+"/") {
			t.Errorf("the bridge has %q, want %s and not %s", got, tt.gateway, tt.first)
		}
		wantPing(t, p.NS, tt.gateway, tt.outside)
		wantNoPing(t, p.NS, tt.first)
		expect.Equal(t, seenAs(t, p.NS, out, tt.outside), tt.uplink, "the outside sees")
	}
	expect.Success(t, w.check(p))
	expect.That(t, len(r.IPs) == 2 && r.IPs[0].Gateway.String() == "10.77.0.5" && r.IPs[1].Gateway.String() == "fd77::5",
		"result %v, want the gateways of the IPAM", r)
}

func TestKubenetRegressionDedupRulesNameTheGatewayOfTheResult(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(conf{"ipam": answering(t, gatewayFive), "promiscMode": true})
	w.add(n.pod("a"))
	rules := n.run("nft", "list", "table", "bridge", "tombolo")
	for _, want := range []string{"ip saddr 10.77.0.5 return", "ip6 saddr fd77::5 return",
		"ip saddr 10.77.0.0/24 ip daddr 10.77.0.0/24 drop", "ip6 saddr fd77::/64 ip6 daddr fd77::/64 drop"} {
		expect.Contains(t, rules, want)
	}
	for _, not := range []string{"10.77.0.1 ", "fd77::1 "} {
		expect.That(t, !strings.Contains(rules, not), "%q, which nobody named, in:\n%s", not, rules)
	}
}

func TestKubenetRegressionRangesWithoutGateway(t *testing.T) {
	n := parallelNode(t)
	// Host-local fills in the first address, and the engine takes what it says.
	w := n.podnet(conf{"ipam": conf{"type": "host-local", "ranges": []any{
		[]any{conf{"subnet": subnet4, "rangeStart": "10.77.0.100"}}, []any{conf{"subnet": subnet6, "gateway": "fd77::5", "rangeStart": "fd77::9"}}}}})
	p := n.pod("a")
	r := w.add(p)
	expect.Equal(t, r.IPs[0].Gateway.String(), gateway4, "the gateway is")
	wantPing(t, p.NS, gateway4, "fd77::5")
	wantNoPing(t, p.NS, gateway6)
}

func TestResultWithTwoSubnetsHasTheGatewayOfEach(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.podnet(conf{"ipam": answering(t, `{"cniVersion":"1.0.0","ips":[
		{"address":"10.77.0.9/24","gateway":"10.77.0.254"},
		{"address":"10.78.0.9/24","gateway":"10.78.0.7"}]}`)})
	p := w.addPod("a")
	wantPing(t, p.NS, "10.77.0.254", "10.78.0.7", outside4)
	expect.Contains(t, nstest.Run(t, p.NS, "ip", "-4", "route", "show", "default"), "via 10.77.0.254 ", "the default route")
}

func TestResultWithoutGateway(t *testing.T) {
	t.Parallel()
	const answer = `{"cniVersion":"1.0.0","ips":[{"address":"10.77.0.9/24"}]}`
	n := newNode(t)
	p := n.pod("a")
	// As the reference plugin, it takes the first address of the subnet.
	first := n.podnet(conf{"ipam": answering(t, answer)})
	r := first.add(p)
	expect.Equal(t, r.IPs[0].Gateway.String(), "10.77.0.1")
	expect.Equal(t, strings.Join(globals(t, n.ns, "cbr0"), " "), "10.77.0.1/24")
	wantPing(t, p.NS, "10.77.0.1")
	expect.Success(t, first.check(p))
	first.del(p)
	expect.Success(t, n.remove("podnet").err())
	n.wantNothing()
	// A bridge that is none does not need it.
	w := n.podnet(conf{"ipam": answering(t, answer), "isGateway": false})
	w.add(p)
	got := globals(t, n.ns, "cbr0")
	expect.That(t, len(got) == 0, "the bridge has %v, want no address", got)
}
