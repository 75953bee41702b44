package cni

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// inside is what a pod has: links, addresses, routes, rules and parameters, without what the other end of a link changes.
func inside(t testing.TB, p *pod) string {
	t.Helper()
	const script = `
ip -o link; ip -o addr; ip route show table all; ip -6 route show table main; ip rule; ip -6 rule; ip neigh show nud permanent
cd /proc/sys/net && grep -s . ipv6/conf/*/disable_ipv6 ipv6/conf/*/accept_ra ipv6/conf/*/accept_redirects ipv4/conf/*/accept_redirects ipv4/conf/*/rp_filter`
	changing := regexp.MustCompile(`NO-CARRIER,|,LOWER_UP|,M-DOWN|state [A-Z]+|linkdown|dead|valid_lft.*`)
	return changing.ReplaceAllString(nstest.Run(t, p.NS, "sh", "-c", script+"; true"), "")
}

// Whatever changes a pod inside after its ADD, the next plugin of its list, its runtime or the pod itself, it stays so: by
// repair, tombolod, and ADDs of other pods that build the network anew. check notes it, CHECK passes where the
// reference's bridge does, and DEL leaves nothing.
func TestTheInsideOfAPodIsItsOwn(t *testing.T) {
	t.Parallel()
	const sbr = "/usr/lib/cni/sbr"
	for name, tt := range map[string]struct {
		after []conf   // plugins further down the list
		net1  bool     // the pod has another interface before
		in    []string // what the pod's owner does
		quiet bool     // check has nothing to note
		more  bool     // CHECK passes though the reference's does not: it looks in all tables
	}{
		"nothing":                 {quiet: true},
		"Multus' default-route":   {net1: true, in: []string{"ip route del default dev eth0; ip route add default via 10.79.0.1 dev net1"}},
		"a VPN":                   {in: []string{"ip link add wg0 type veth; ip addr add 10.8.0.2/24 dev wg0; ip link set wg0 up; ip route replace default dev wg0"}},
		"a VPN by rules":          {in: []string{"ip link add wg0 up type veth; ip route add default dev wg0 table 51820; ip rule add not fwmark 51820 table 51820"}, quiet: true},
		"a kill switch":           {in: []string{"ip route del default; ip -6 route del default"}},
		"a kill switch that says": {in: []string{"ip route replace unreachable default; ip -6 route del default; ip -6 route add unreachable default metric 1"}},
		"route-override":          {in: []string{"ip route del default; ip route add 10.99.0.0/16 via 10.77.0.9 dev eth0"}},
		"gVisor":                  {in: []string{"ip route flush dev eth0; ip -6 route flush dev eth0; ip addr flush dev eth0"}},
		"KubeVirt": {in: []string{"ip addr flush dev eth0; ip link set eth0 down; ip link set eth0 name eth0-nic; ip link add k6t-eth0 type bridge; echo 1 >/proc/sys/net/ipv6/conf/k6t-eth0/disable_ipv6; ip link set k6t-eth0 up; ip link set eth0-nic master k6t-eth0 up",
			"ip link add eth0 type veth; ip link add tap0 up type veth; ip link set tap0 master k6t-eth0; ip addr add 10.77.0.2/32 dev eth0"}},
		"IPv6 off by tuning":        {after: []conf{{"type": "tuning", "sysctl": conf{"net.ipv6.conf.all.disable_ipv6": "1"}}}},
		"tuning":                    {after: []conf{{"type": "tuning", "mac": "02:00:00:00:00:77", "mtu": 1400, "promisc": true, "sysctl": conf{"net.ipv4.conf.IFNAME.accept_redirects": "1"}}}},
		"sbr":                       {after: []conf{{"type": "sbr"}}, more: true, quiet: true},
		"parameters of the runtime": {in: []string{"cd /proc/sys/net; echo 1 >ipv4/conf/all/accept_redirects; echo 2 >ipv6/conf/eth0/accept_ra; echo 1 >ipv6/conf/eth0/accept_redirects; echo 0 >ipv4/ip_forward"}, quiet: true},
		"a larger MTU":              {in: []string{"ip link set eth0 mtu 9000"}},
		"a smaller MTU":             {in: []string{"ip link set eth0 mtu 1280"}},
		"a MAC":                     {in: []string{"ip link set eth0 address 02:00:00:00:00:78"}},
		"promiscuous":               {in: []string{"ip link set eth0 promisc on"}, quiet: true},
		"the link down":             {in: []string{"ip link set eth0 down"}},
		"a second address":          {in: []string{"ip addr add 10.77.0.200/24 dev eth0; ip addr add fd77::200/64 dev eth0 nodad"}, quiet: true},
		"a name":                    {in: []string{"ip link set eth0 down; ip link set eth0 name net0; ip link set net0 up"}},
		"another link of the name":  {in: []string{"ip link set eth0 name net0; ip link add eth0 up type veth; ip addr add 10.66.0.2/24 dev eth0"}},
		"another namespace":         {in: []string{"ip link set eth0 netns $NS"}},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			n.outside()
			forwardByHand(t, n.ns) // as the reference does for its own network
			n.searchAlso(filepath.Dir(sbr))
			nstest.Sysctl(t, n.ns, "net/ipv4/ip_forward", "1") // as the reference's bridge makes it, of which check would tell
			nstest.Sysctl(t, n.ns, "net/ipv6/conf/all/forwarding", "1")
			ours := n.podnet(nil)
			theirs := n.network("theirs", conf{"type": "bridge", "bridge": "ref0", "isDefaultGateway": true, "stateDir": nil, "deadline": nil})
			ipam := hostLocal("10.78.0.0/24", "fd78::/64")
			ipam["dataDir"] = t.TempDir()
			theirs.plugin["ipam"] = ipam
			ours.after, theirs.after, ours.version, theirs.version = tt.after, tt.after, "1.0.0", "1.0.0"
			if name == "sbr" {
				if _, err := os.Stat(sbr); err != nil {
					t.Skip("no plugin sbr here")
				}
				ours.plugin["ipam"], ipam["ranges"] = hostLocal(subnet4), hostLocal("10.78.0.0/24")["ranges"]
			}

			a, b := n.pod("a"), n.pod("b")
			for p, w := range map[*pod]*network{a: ours, b: theirs} {
				if tt.net1 {
					n.network("more", conf{"bridge": "more0", "isDefaultGateway": false, "ipam": hostLocal("10.79.0.0/24")}).add(p, as("net1"))
				}
				w.add(p)
				for _, line := range tt.in {
					line = strings.ReplaceAll(line, "$NS", nstest.Path(t, nstest.New(t)))
					if p == b {
						line = strings.NewReplacer("10.77.", "10.78.", "fd77:", "fd78:").Replace(line)
					}
					nstest.Run(t, p.NS, "sh", "-ec", line)
				}
			}
			was := inside(t, a)
			reference := theirs.check(b)
			unchanged := func(when string) {
				t.Helper()
				expect.NoDiff(t, cmp.Diff(was, inside(t, a)), "%s, the pod is another inside", when)
				o := n.operate("check", "--state", n.state)
				expect.That(t, o.status == 0 && strings.Contains(o.stdout, "note: ") != tt.quiet && !strings.Contains(o.stdout, "["),
					"%s, check: %+v", when, o)
				err := ours.check(a)
				expect.That(t, (err == nil) == (reference == nil || tt.more), "%s, CHECK: %v; the reference's: %v", when, err, reference)
			}
			unchanged("at first")

			o := n.operate("repair", "--state", n.state)
			expect.Equal(t, o.stdout, "nothing is to be repaired\n", "repair")
			n.nft("flush ruleset")
			n.ip("link del cbr0")
			ours.add(n.pod("next"))
			unchanged("after another pod's ADD")
			n.ip("link del cbr0")
			o = n.operate("repair", "--state", n.state)
			expect.That(t, o.status == 0 && strings.HasPrefix(o.stdout, "repaired: "), "repair: %+v", o)
			unchanged("after repair")

			m := n.mind(t)
			n.nft("flush ruleset")
			n.ip("link set " + ours.port(a) + " nomaster")
			must.Until(t, "tombolod repairs", func() bool {
				return strings.Contains(n.ruleset(), "masq-podnet") && links(t, n.ns)[ours.port(a)].Master == "cbr0"
			})
			unchanged("with tombolod")
			m.end(t)

			ours.del(a)
			expect.That(t, links(t, n.ns)[ours.port(a)].Name == "", "DEL leaves the port")
		})
	}
}

// forwardByHand makes the host a router of both families.
func forwardByHand(t *testing.T, host *netns.NS) {
	t.Helper()
	nstest.Sysctl(t, host, "net/ipv4/ip_forward", "1")
	nstest.Sysctl(t, host, "net/ipv6/conf/all/forwarding", "1")
}
