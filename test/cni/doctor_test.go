package cni

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func (s *scene) examine() outcome {
	s.Helper()
	return s.operate("doctor", "--state", s.state, "--dns", outside4, "a")
}

const foundNothing = "container a, eth0 of network podnet: nothing found; tried: the port, the pod's interface and its addresses, the gateway " + gateway4 + " by ARP, the host's next hop " + outside4 +
	" by echo requests, the gateway " + gateway6 + " by neighbour discovery, the host's next hop " + outside6 + " by echo requests, the name server " + outside4 + "; more is tried by --to ADDR[:PORT]\n"

// Each thing that a pod's network needs is broken in turn: before that, the pod works and the
// doctor finds nothing.
func TestDoctorFindsWhatKeepsAPodFromTheNetwork(t *testing.T) {
	t.Parallel()
	on := func(line string) func(*scene) { return func(s *scene) { s.Helper(); s.on(line) } }
	in := func(line string) func(*scene) { return func(s *scene) { s.Helper(); s.in(line) } }
	for name, tc := range map[string]struct {
		harm func(*scene)
		step string
		says []string // evidence and remedy
	}{
		"dead":                          {func(s *scene) { s.on("ip link del $P"); s.run("umount", s.a.path) }, "namespace", []string{"it is dead", "tombolo gc"}},
		"interface deleted in the pod":  {in("ip link del eth0"), "link", []string{"is missing", "create it again"}},
		"interface down in the pod":     {in("ip link set eth0 down"), "link", []string{"interface eth0: link is down", "create it again"}},
		"port down":                     {on("ip link set $P down"), "link", []string{"link is down", "tombolo repair"}},
		"port off the bridge":           {on("ip link set $P nomaster"), "link", []string{"membership in bridge cbr0", "tombolo repair"}},
		"bridge down":                   {on("ip link set cbr0 down"), "link", []string{"bridge cbr0: link is down", "tombolo repair"}},
		"no address":                    {in("ip -4 address flush dev eth0"), "address", []string{"interface eth0: address", "create it again"}},
		"no default route":              {in("ip route del default"), "route", []string{"interface eth0: route", "create it again"}},
		"a route that leads elsewhere":  {in("ip link add other type veth; ip link set other up; ip route add " + gateway4 + "/32 dev other"), "route", []string{"no route to its gateway " + gateway4}},
		"no gateway":                    {on("ip address del " + gateway4 + "/24 dev cbr0"), "gateway", []string{"the gateway " + gateway4 + "/24 is missing", "tombolo repair"}},
		"ARP dropped":                   {drop("ether type arp"), "gateway", []string{gateway4 + " does not answer by ARP: chain pre of table bridge evil drops or rejects, by its rule number 1", "nft delete rule bridge evil pre handle "}},
		"another MAC for the gateway":   {in("ip neigh replace " + gateway4 + " lladdr 02:00:00:00:00:99 dev eth0 nud permanent"), "gateway", []string{"has its MAC as 02:00:00:00:00:99, and it is ", "set guard"}},
		"neighbour discovery dropped":   {drop("icmpv6 type nd-neighbor-solicit"), "gateway", []string{gateway6 + " does not answer by neighbour discovery: chain pre of table bridge evil drops or rejects, by its rule number 1", "nft delete rule bridge evil pre handle "}},
		"another has the pod's address": {func(s *scene) { s.intruder("10.77.0.2/24") }, "duplicate", []string{"another node answers for 10.77.0.2: 02:00:00:00:00:66"}},
		"another has the gateway's":     {func(s *scene) { s.intruder(gateway4 + "/24") }, "duplicate", []string{"another node on bridge cbr0 answers for the gateway " + gateway4 + ": 02:00:00:00:00:66"}},
		"no forwarding":                 {on("echo 1 > /proc/sys/net/ipv4/ip_forward; echo 0 > /proc/sys/net/ipv4/ip_forward"), "forwarding", []string{"does not forward", "tombolo repair"}},
		"no way out of the host":        {on("ip route del default"), "forwarding", []string{"the host itself has no route", "give the host a default route"}},
		"ruleset flushed":               {on("nft flush ruleset"), "firewall", []string{"table inet tombolo and table bridge tombolo are missing", "tombolo repair"}},
		"legacy iptables drops":         {on("iptables-legacy -P FORWARD DROP"), "firewall", []string{"iptables-legacy"}},
		"another's table drops":         {on("nft 'add table inet fw; add chain inet fw f { type filter hook forward priority 5; policy drop; }'"), "firewall", []string{"chain f of table inet fw drops", "nft add rule inet fw f"}},
		"a drop ahead of our own":       {on("iptables -I FORWARD -j DROP"), "firewall", []string{"by its rule number 1", "iptables -D FORWARD 1"}},
		"a rule against the pod":        {on("iptables -I FORWARD -s 10.77.0.2 -j DROP"), "firewall", []string{"chain FORWARD of table ip filter drops or rejects, by its rule number 1 with handle ", "nft delete rule ip filter FORWARD handle "}},
		"a legacy rule against the pod": {on("iptables-legacy -I FORWARD -s 10.77.0.2 -j DROP"), "firewall", []string{"the host's next hop " + outside4 + " gives the pod 10.77.0.2 no answer: it comes to the host by cbr0 and is lost in the hook forward, by no rule of nf_tables", "iptables-legacy-save"}},
		"what is long gets lost":        {func(s *scene) { nstest.Run(s, s.out, "ip", "link", "set", "eth0", "mtu", "1300") }, "mtu", []string{"packets of 1500 bytes"}},
		"the pod's MTU is too large":    {in("ip link set eth0 mtu 9000"), "mtu", []string{"interface eth0: MTU is 9000", "create it again"}},
		"queries for names dropped":     {on("iptables -I FORWARD -p udp --dport 53 -j DROP"), "dns", []string{"the name server " + outside4 + " does not answer"}},
		"bridged packets pass us by":    {on("ip link set cbr0 type bridge nf_call_iptables 0"), "firewall", []string{"nf_call_iptables is off", "tombolo repair"}},
		"the host's own firewall drops": {func(s *scene) {
			s.on("nft 'add table inet h; add chain inet h i { type filter hook input priority 0; policy drop; }'; ip -6 neigh flush all")
			s.in("ip -6 neigh flush dev eth0")
		}, "gateway", []string{gateway6 + " does not answer by neighbour discovery: chain i of table inet h drops, by its policy, ", "nft add rule inet h i iifname cbr0 "}},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			s := newScene(t)
			nstest.Serve(t, s.out, "udp", netip.AddrPortFrom(nstest.Addr(outside4), 53))
			wantPing(t, s.a.NS, outside4, outside6)
			if o := s.examine(); o.status != 0 || o.stdout != foundNothing {
				t.Fatalf("of a pod that works: %+v", o)
			}
			tc.harm(s)
			o := s.examine()
			found := false
			for part := range strings.SplitSeq(o.stdout, "\n  "+tc.step+" ") {
				all := true
				for _, says := range tc.says {
					all = all && strings.Contains(part, says)
				}
				found = found || all
			}
			expect.That(t, o.status == 4 && found && strings.Contains(o.stdout, "\n  "+tc.step+" "),
				"want %s, which says %q: %+v", tc.step, tc.says, o)
		})
	}
}

func TestDoctorKnowsItsPods(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	o := s.operate("doctor", "--state", s.state, "nobody")
	expect.That(t, o.status == 1 && strings.Contains(o.stderr, `no pod "nobody"`), "%+v", o)
	o = s.operate("doctor", "--state", s.state, "--dns", "somebody")
	expect.That(t, o.status == 2, "%+v", o)
	s.in("ip link set eth0 mtu 1400") // as the plugin tuning does
	expect.Success(t, s.operate("doctor", "--state", s.state, "--dns", "none", "a").err(), "of a pod with an MTU of its own")
	s.in("ip link set eth0 down")
	var reports []struct {
		ContainerID string
		Findings    []struct{ Step, Evidence, Remedy string }
	}
	unmarshal(t, s.operate("doctor", "--json", "--state", s.state, "--dns", "none").stdout, &reports)
	must.That(t, len(reports) == 2, "want both pods: %+v", reports)
	for _, r := range reports {
		expect.Equal(t, r.ContainerID == "a", (len(r.Findings) > 0), "want findings of a and none of b: %+v", r)
		for _, f := range r.Findings {
			expect.That(t, f.Step != "" && f.Evidence != "" && f.Remedy != "", "a finding that lacks something: %+v", f)
		}
	}
}

// The IPAM names a gateway for each subnet, which a network without one does not have.
func TestDoctorLooksForNoGatewayWhereNoneIs(t *testing.T) {
	n := parallelNode(t)
	w := n.network("backplane", conf{"mode": "l2", "bridge": "back0", "ipam": conf{"type": "host-local", "ranges": []any{[]any{conf{"subnet": "172.31.0.0/24"}}}}})
	p := w.addPod("a")
	o := n.operate("doctor", "--state", n.state, "--dns", "10.255.255.53")
	expect.That(t, o.status == 0 && o.stdout == "container a, eth0 of network backplane: nothing found; tried: the port, the pod's interface and its addresses; more is tried by --to ADDR[:PORT]\n", "%+v", o)
	nstest.Run(t, p.NS, "ip", "route", "add", "default", "via", "172.31.0.1")
	if o := n.operate("doctor", "--state", n.state, "--dns", "10.255.255.53"); o.status != 4 || !strings.Contains(o.stdout, "the gateway 172.31.0.1 does not answer by ARP") {
		t.Errorf("where the pod sends by it: %+v", o)
	}
}

// drop has the bridge drop what the pods send, and the pod forget its neighbours.
func drop(what string) func(*scene) {
	return func(s *scene) {
		s.Helper()
		s.on("nft 'add table bridge evil; add chain bridge evil pre { type filter hook prerouting priority -500; }; add rule bridge evil pre iifname veth* " + what + " drop'")
		s.in("ip neigh flush dev eth0; ip -6 neigh flush dev eth0")
	}
}

// intruder is a node on the bridge that has an address of another's.
func (s *scene) intruder(address string) {
	s.Helper()
	other := nstest.New(s)
	nstest.Veth(s, s.ns, "wild0", other, "eth0")
	s.ip("link set wild0 master cbr0")
	nstest.Run(s, other, "ip", "link", "set", "eth0", "address", "02:00:00:00:00:66")
	nstest.Run(s, other, "ip", "address", "add", address, "dev", "eth0")
}
