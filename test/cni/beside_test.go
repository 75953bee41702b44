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

// What the docs say about pods beside routes, rules and links of the operator's own.

func TestAnOperatorsOwnSNATRuleCounts(t *testing.T) {
	t.Parallel()
	const own = "192.0.2.99"
	chain := func(priority string) string {
		return "add table ip own; add chain ip own post { type nat hook postrouting priority " + priority + "; }; add rule ip own post ip saddr 10.77.0.0/24 oifname eth0 snat to " + own
	}
	for name, tt := range map[string]struct {
		fields conf
		rules  string
		before bool // the rules are there before Tombolo's
		want   string
	}{
		"none":                        {nil, "add table ip own", false, uplink4},
		"an earlier priority":         {nil, chain("srcnat - 10"), true, own},
		"the same, loaded before":     {nil, chain("srcnat"), true, uplink4},
		"the same, loaded after":      {nil, chain("srcnat"), false, own},
		"without masquerade":          {conf{"ipMasq": false}, chain("srcnat"), true, own},
		"without it for destinations": {conf{"nonMasqueradeCIDRs": []string{outside4 + "/32"}}, chain("srcnat"), true, own},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			out := n.outside()
			n.ip("address add " + own + "/24 dev eth0")
			if tt.before {
				n.nft(tt.rules)
			}
			p := n.pod("a")
			n.podnet(tt.fields).add(p)
			if !tt.before {
				n.nft(tt.rules)
			}
			expect.Equal(t, seenAs(t, p.NS, out, outside4), tt.want, "the outside sees")
		})
	}
}

// A client behind the second uplink asks a host port; the host's default route leads by the first.
func TestPodsFollowRulesForTheirOwnSubnet(t *testing.T) {
	t.Parallel()
	const far = "198.51.100.9"
	n := newNode(t)
	n.outside()
	second := nstest.New(t)
	nstest.Veth(t, n.ns, "eth1", second, "eth0")
	n.ip("address add 203.0.113.2/24 dev eth1")
	nstest.Run(t, second, "sh", "-ec", "ip address add 203.0.113.1/24 dev eth0; ip address add "+far+"/32 dev eth0; ip route add default via 203.0.113.2 src "+far)
	w := n.portnet(nil)
	p := w.addPod("a", publish(t, "8080:80/tcp"))
	p.serve(t, "tcp", 80)
	answers := func() bool {
		o := nstest.Run(t, second, "sh", "-c", "curl -sS --http0.9 -m 3 --interface "+far+" http://203.0.113.2:8080 2>&1; echo status $?")
		return strings.Contains(o, "status 0") || strings.Contains(o, "status 56")
	}
	n.ip("route add default via 203.0.113.1 table 100")
	n.ip("rule add from 203.0.113.2 table 100")
	expect.Equal(t, answers(), false, "a rule from the host's address concerns what a pod answers")
	n.ip("rule add from " + subnet4 + " table 100")
	expect.Equal(t, answers(), true, "a rule from the pods' subnet concerns it")
	expect.Equal(t, seenAs(t, p.NS, second, far), "203.0.113.2", "the pod is masqueraded as")
	n.ip("rule del from " + subnet4 + " table 100")
	n.nft("add table ip own; add chain ip own pre { type filter hook prerouting priority mangle; }; " +
		"add rule ip own pre iifname eth1 ct state new ct mark set 7; add rule ip own pre iifname cbr0 ct mark 7 meta mark set 7")
	n.ip("rule add fwmark 7/0xff table 100")
	expect.Equal(t, answers(), true, "a mark of the connection leads the answer back")
}

// A VM has the pod's MAC and address, behind a bridge in the pod that has the pod's interface as a port.
func TestAVMBehindAPodNeedsAPortWithoutHairpin(t *testing.T) {
	t.Parallel()
	for _, hairpin := range []bool{true, false} {
		n := newNode(t)
		p := n.pod("vm")
		r := n.podnet(conf{"hairpinMode": hairpin, "ipam": hostLocal(subnet4)}).add(p)
		vm := nstest.New(t)
		nstest.Veth(t, p.NS, "tap0", vm, "eth0")
		nstest.Run(t, p.NS, "sh", "-ec", "ip address flush dev eth0; ip link set eth0 address 02:00:00:00:00:01; ip link add k6t type bridge; ip link set k6t up; ip link set eth0 master k6t; ip link set tap0 master k6t")
		nstest.Run(t, vm, "ip", "link", "set", "eth0", "address", r.Interfaces[2].Mac)
		nstest.Run(t, vm, "ip", "address", "add", r.IPs[0].Address.String(), "dev", "eth0")
		o := nstest.Run(t, vm, "sh", "-c", "ping -c 2 -W 2 "+gateway4+" | grep received")
		expect.Equal(t, strings.Contains(o, " 0 received"), hairpin, "hairpinMode %t: %s", hairpin, o)
	}
}

func TestRecordsOfANewerVersion(t *testing.T) {
	t.Parallel()
	const newer = "written by a newer version: version 99"
	for name, tt := range map[string]struct {
		file             string
		add, check, gone uint // error codes of an ADD of another pod, of CHECK and of DEL
		replaced         bool // by the ADD
	}{
		"an attachment's": {"attachments/podnet/*.json", 0, 5, 0, false},
		"a network's":     {"networks/podnet.json", 0, 0, 0, true},
		"the epoch's":     {"epoch", 5, 5, 5, false},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			w := n.podnet(nil)
			p := w.addPod("a")
			path := strings.Replace(n.state+"/"+tt.file, "*", strings.TrimPrefix(w.port(p), "veth"), 1)
			old := readFile(t, path)
			text := strings.ReplaceAll(old, `"version":1`, `"version":99`)
			must.Succeed(t, os.WriteFile(path, []byte(text), 0o600))
			want := func(err error, status uint, what string) {
				t.Helper()
				if status == 0 {
					expect.Success(t, err, "%s", what)
				} else {
					wantError(t, err, status, newer)
				}
			}
			want(expect.Err(w.tryAdd(n.pod("b"))), tt.add, "ADD")
			expect.Equal(t, readFile(t, path) != text, tt.replaced, "ADD replaced the record")
			want(w.check(p), tt.check, "CHECK")
			want(w.tryDel(p), tt.gone, "DEL")
			_, port := links(t, n.ns)[w.port(p)]
			expect.Equal(t, port, tt.gone != 0, "the port is there")
			if tt.gone != 0 { // the newer version is back, or somebody removes the directory
				must.Succeed(t, os.WriteFile(path, []byte(old), 0o600))
				w.del(p)
			}
		})
	}
}

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
			expect.Equal(t, o.stdout, "nothing to repair\n", "repair")
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
