package cni

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// The bridge of a network is made anew, and the chain ends there: a plugin after it fails.
func TestAPolicyByNameHoldsWhereAnADDEndsBeforeTheFirewall(t *testing.T) {
	t.Parallel()
	s := newSide(t, referenceDir(t), byName())
	list := func(bridge, subnet string) []string {
		return []string{
			`{"type":"bridge","isGateway":true,"bridge":"` + bridge + `","ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"` + subnet + `","routes":[{"dst":"0.0.0.0/0"}]}}`,
			`{"type":"firewall","ingressPolicy":"same-bridge"}`,
		}
	}
	one := list("cni0", "10.5.1.0/24")
	s.chain("ADD", "a", one)
	s.network = "other"
	s.chain("ADD", "c", list("cni1", "10.5.2.0/24"))
	s.network = ""
	wantNoPing(t, s.of("a").NS, "10.5.2.2")
	s.ip("address del 10.5.1.1/24 dev cni0")
	s.chain("ADD", "b", one[:1])
	wantPing(t, s.of("a").NS, "10.5.1.3")
	err := nstest.PingWith(t, s.of("a").NS, nstest.Addr("10.5.2.2"), nstest.Echo{Wait: noAnswer})
	expect.That(t, err != nil, "the network was built anew, and its pods reach another bridge's, against the policy that it has by name")
}

// Where the host forwards nothing by itself, what the plugin firewall lets through by name is what the
// reference's does; and what an operator drops stays dropped.
func TestFirewallByNameLetsThroughWhatTheReferencesDoes(t *testing.T) {
	t.Parallel()
	ipam := func(subnet string) string {
		return `"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"` + subnet + `","routes":[{"dst":"0.0.0.0/0"}]}`
	}
	const main = `{"type":"bridge","isGateway":true,"bridge":"BRIDGE",`
	for _, policy := range []string{"open", "same-bridge", "isolated"} {
		nstest.RunParallel(t, policy, func(t *testing.T) {
			want := ""
			for _, ours := range [][]string{nil, byName()} {
				s := newSide(t, referenceDir(t), ours)
				nstest.Sysctl(t, s.ns, "net/bridge/bridge-nf-call-iptables", "0")
				nstest.Sysctl(t, s.ns, "net/bridge/bridge-nf-call-ip6tables", "0")
				out := s.outside()
				nstest.Run(t, out, "ip", "route", "add", "10.5.0.0/16", "via", uplink4)
				s.run("iptables", "-P", "FORWARD", "DROP")
				firewall, admin := fmt.Sprintf(`{"type":"firewall","ingressPolicy":%q}`, policy), "CNI-ADMIN"
				if policy == "same-bridge" {
					firewall, admin = `{"type":"firewall","ingressPolicy":"same-bridge","iptablesAdminChainName":"MINE"}`, "MINE"
				}
				list := func(bridge, subnet string) []string {
					return []string{strings.ReplaceAll(main, "BRIDGE", bridge) + ipam(subnet) + "}", firewall}
				}
				one, other := list("cni0", "10.5.1.0/24"), list("cni1", "10.5.2.0/24")
				s.chain("ADD", "a", one)
				s.chain("ADD", "b", one)
				s.network = "other"
				s.chain("ADD", "c", other)
				pods := map[string]*netns.NS{"a": s.of("a").NS, "b": s.of("b").NS, "c": s.of("c").NS, "outside": out}
				at := map[string]string{"a": "10.5.1.2", "b": "10.5.1.3", "c": "10.5.2.2", "outside": outside4}
				fates := func() string {
					var list strings.Builder
					for _, from := range []string{"a", "c", "outside"} {
						for _, to := range []string{"a", "b", "c", "outside"} {
							if from == to {
								continue
							}
							err := nstest.PingWith(t, pods[from], nstest.Addr(at[to]), nstest.Echo{Wait: noAnswer})
							fmt.Fprintf(&list, "%s to %s: %t\n", from, to, err == nil)
						}
					}
					return list.String()
				}
				got := fates()
				if want == "" {
					want = got
				}
				if apart := strings.Contains(got, "a to c: false"); !strings.Contains(got, "a to outside: true") || apart != (policy != "open") {
					t.Errorf("with %q, policy %s is\n%s", ours, policy, got)
				}
				expect.Equal(t, cmp.Diff(want, got), "", "with %q, the reference's (-) and this one's (+)", ours)
				s.chain("CHECK", "c", other)
				s.chain("DEL", "c", other)
				s.chain("DEL", "c", other)
				s.network = ""
				{
					s.run("iptables", "-A", admin, "-s", "10.5.1.2", "-j", "DROP")
					if err := nstest.PingWith(t, pods["a"], nstest.Addr(outside4), nstest.Echo{Wait: noAnswer}); err == nil {
						t.Errorf("with %q, what the operator drops passes:\n%s", ours, s.run("nft", "list", "table", "ip", "filter"))
					}
				}
				s.chain("DEL", "a", one)
				s.chain("DEL", "b", one)
				if len(ours) > 0 {
					sets := s.run("nft", "list", "set", "inet", "tombolo", "pods4")
					expect.That(t, !strings.Contains(sets, "10.5."), "with %q, left:\n%s", ours, sets)
				}
			}
		})
	}
}

// Rules of legacy iptables that stop pods are named with a command that helps, for each sort of pod.
func TestLegacyRulesThatStopPodsAreNamedByName(t *testing.T) {
	t.Parallel()
	nstest.Need(t, "iptables-legacy")
	const ipam = `"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.1.0/24","routes":[{"dst":"0.0.0.0/0"}]}`
	for _, main := range []string{`{"type":"bridge","bridge":"cni0","isGateway":true,` + ipam + `}`} {
		for name, lines := range map[string]string{
			"a policy": "iptables-legacy -P FORWARD DROP", "a last rule": "iptables-legacy -A FORWARD -j REJECT",
		} {
			nstest.RunParallel(t, name+" "+main[9:15], func(t *testing.T) {
				s := newSide(t, referenceDir(t), byName())
				out := s.outside()
				nstest.Run(t, out, "ip", "route", "add", "10.5.1.0/24", "via", uplink4)
				chain := []string{main, `{"type":"portmap","runtimeConfig":{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]}}`, `{"type":"firewall"}`}
				s.chain("ADD", "a", chain)
				a := s.of("a")
				a.serve(t, "tcp", 80)
				s.run("sh", "-ec", lines)
				reaches := func() bool {
					return nstest.PingWith(t, a.NS, nstest.Addr(outside4), nstest.Echo{Wait: noAnswer}) == nil
				}
				must.That(t, !reaches(), "the rules stop nothing")
				o := s.operate("check", "--state", s.state)
				_, remedy, ok := strings.Cut(o.stdout, "this helps: ")
				remedy, _, _ = strings.Cut(remedy, " [configuration]")
				must.That(t, o.status == 4 && ok && strings.HasPrefix(remedy, "iptables-legacy "), "check: %+v", o)
				s.run("sh", "-ec", remedy)
				expect.That(t, reaches(), "it does not help: %s", remedy)
				_, err := nstest.AskWithin(t, out, "tcp", netip.AddrPortFrom(nstest.Addr(uplink4), 8080), 5*time.Second)
				expect.That(t, err == nil, "the host port after %s: %v", remedy, err)
				expect.Success(t, s.operate("check", "--state", s.state).err(), "check after it")
			})
		}
	}
}
