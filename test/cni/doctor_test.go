package cni

import (
	"encoding/binary"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func (s *scene) examine() outcome {
	s.Helper()
	return s.operate("doctor", "--state", s.state, "--dns", outside4, "a")
}

const foundNothing = "container a, eth0 of network podnet: nothing found; tried: the port, the pod's interface and its addresses, the gateway " + gateway4 + " by ARP, the host's next hop " + outside4 +
	" by echo requests, the gateway " + gateway6 + " by neighbour discovery, the host's next hop " + outside6 + " by echo requests, the name server " + outside4 + "; --to ADDR[:PORT] tries more\n"

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
		"another MAC for the gateway":   {in("ip neigh replace " + gateway4 + " lladdr 02:00:00:00:00:99 dev eth0 nud permanent"), "gateway", []string{"has the MAC 02:00:00:00:00:99, not ", "set guard"}},
		"neighbour discovery dropped":   {drop("icmpv6 type nd-neighbor-solicit"), "gateway", []string{gateway6 + " does not answer by neighbour discovery: chain pre of table bridge evil drops or rejects, by its rule number 1", "nft delete rule bridge evil pre handle "}},
		"another has the pod's address": {func(s *scene) { s.intruder("10.77.0.2/24") }, "duplicate", []string{"another node answers for 10.77.0.2: 02:00:00:00:00:66"}},
		"another has the gateway's":     {func(s *scene) { s.intruder(gateway4 + "/24") }, "duplicate", []string{"another node on bridge cbr0 answers for the gateway " + gateway4 + ": 02:00:00:00:00:66"}},
		"no forwarding":                 {on("echo 1 > /proc/sys/net/ipv4/ip_forward; echo 0 > /proc/sys/net/ipv4/ip_forward"), "forwarding", []string{"does not forward", "tombolo repair"}},
		"no way out of the host":        {on("ip route del default"), "forwarding", []string{"the host itself has no default route", "give the host a default route"}},
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
	expect.That(t, o.status == 0 && o.stdout == "container a, eth0 of network backplane: nothing found; tried: the port, the pod's interface and its addresses; --to ADDR[:PORT] tries more\n", "%+v", o)
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

// What no interpreter of rules would have understood, doctor finds by a probe: table, chain, number and handle are
// those of the rule, and the command that it advises helps.
func TestDoctorNamesTheRuleThatDropsAProbe(t *testing.T) {
	t.Parallel()
	const chain = "add table inet fw; add chain inet fw f { type filter hook forward priority 5; }; add rule inet fw f ct state established accept; "
	for name, tc := range map[string]struct{ rules, chain string }{
		"a set":             {chain + "add set inet fw bad { type ipv4_addr . inet_service; }; add element inet fw bad { " + outside4 + " . 80 }; add rule inet fw f ip daddr . tcp dport @bad drop", "f"},
		"a mark":            {chain + "add chain inet fw m { type filter hook prerouting priority -150; }; add rule inet fw m tcp dport 80 meta mark set meta mark | 0x40; add rule inet fw f meta mark & 0x40 != 0 drop", "f"},
		"a verdict map":     {chain + "add chain inet fw no; add rule inet fw no counter; add rule inet fw no drop; add rule inet fw f tcp dport vmap { 80 : goto no, 443 : accept }", "no"},
		"a reject":          {chain + "add rule inet fw f tcp dport { 80, 81 } reject with tcp reset", "f"},
		"iptables' REJECT":  {"", "FORWARD"},
		"in a VLAN":         {"", "FORWARD"},
		"a policy, by name": {"add table inet fw; add chain inet fw f { type filter hook forward priority 5; policy drop; }; add rule inet fw f meta l4proto { icmp, ipv6-icmp } accept; add rule inet fw f tcp dport != 80 accept", "f"},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			out := n.outside()
			nstest.Serve(t, out, "tcp4", netip.MustParseAddrPort("0.0.0.0:80"))
			nstest.Serve(t, out, "tcp4", netip.MustParseAddrPort("0.0.0.0:443"))
			of := conf{}
			if name == "in a VLAN" {
				needVLANs(t)
				of["vlan"] = 100
			}
			n.portnet(of).addPod("a")
			table, last := "inet fw", "drops or rejects, by its rule number "
			if tc.rules == "" {
				n.run("iptables", "-A", "FORWARD", "-p", "tcp", "-m", "multiport", "--dports", "80,81", "-j", "REJECT")
				table = "ip filter"
			} else {
				n.nft(tc.rules)
			}
			doctor := func(to string) outcome {
				t.Helper()
				return n.operate("doctor", "--dns", "none", "--to", to, "--state", n.state, "a")
			}
			before := n.run("nft", "list", "ruleset")
			o := doctor(outside4 + ":80")
			if strings.Contains(tc.rules, "policy drop") {
				last = "drops, by its policy,"
			} else {
				listed := strings.Split(strings.TrimSpace(n.run("sh", "-ec", "nft -a list chain "+table+" "+tc.chain+" | grep -v chain | grep handle")), "\n")
				handle := regexp.MustCompile(`# handle (\d+)$`).FindStringSubmatch(listed[len(listed)-1])
				last += strconv.Itoa(len(listed)) + " with handle " + handle[1]
				must.That(t, !strings.Contains(listed[0], "type filter hook"), "listed: %q", listed)
			}
			must.That(t, o.status == 4 && strings.Contains(o.stdout, "chain "+tc.chain+" of table "+table+" "+last),
				"no line that says %q: %+v", last, o)
			after := n.run("nft", "list", "ruleset")
			expect.That(t, stripped(after) == stripped(before), "doctor left something:\n%s", after)
			expect.Success(t, doctor(outside4+":443").err(), "what passes")
			_, remedy, _ := strings.Cut(o.stdout, "this helps: ")
			remedy, _, _ = strings.Cut(remedy, "\n")
			n.run("sh", "-ec", remedy)
			expect.Success(t, doctor(outside4+":80").err(), "after %s", remedy)
		})
	}
}

// A rule that another program manages stays, and a drop by the program at a queue, or of one without a program, is
// found. A comment alone tells that somebody manages a rule.
func TestDoctorLeavesRulesToTheProgramsThatManageThem(t *testing.T) {
	t.Parallel()
	const at80, fw = "-p tcp --dport 80", "add table inet NAME; add chain inet NAME f { type filter hook forward priority 5; }; "
	chain := func(name, rule string) string {
		return "iptables -N " + name + "; iptables -A FORWARD -j " + name + "; iptables -A " + name + " " + at80 + " " + rule
	}
	table := func(name, comment string) string {
		return "nft '" + strings.ReplaceAll(fw, "NAME", name) + "add rule inet " + name + " f tcp dport 80 drop " + comment + "'"
	}
	noService := `-m comment --comment "y/web:http has no endpoints" -j REJECT`
	for name, tc := range map[string]struct {
		harm string
		says []string
	}{
		"kube-router": {chain("KUBE-POD-FW-ABC", `-m comment --comment "rule to REJECT traffic destined for POD name:b namespace: x" -j REJECT`),
			[]string{`"rule to REJECT traffic destined for POD name:b namespace: x"`, "kube-router's", "kubectl -n x get networkpolicy"}},
		"kube-proxy": {chain("KUBE-SERVICES", noService), []string{`"y/web:http has no endpoints"`, "kube-proxy's", "kubectl get services"}},
		"Docker":     {chain("DOCKER-FORWARD", "-j DROP"), []string{"Docker's", "docker network inspect"}},
		"ufw":        {chain("ufw-before-forward", "-j DROP"), []string{"ufw's", "ufw status verbose"}},
		"firewalld":  {table("firewalld", ""), []string{"firewalld's", "firewall-cmd --list-all-zones"}},
		"an engine":  {table("kube-network-policies", ""), []string{"kube-network-policies's", "kubectl get networkpolicy -A"}},
		"a comment":  {table("acme", "comment \"acme policy 7\""), []string{`"acme policy 7"`, "nft -a list chain inet acme f"}},
		"a queue": {"iptables -t mangle -A POSTROUTING " + at80 + " -j NFQUEUE --queue-num 98",
			[]string{"chain POSTROUTING of table ip mangle hands, by its rule number 1 with handle ", "to queue 98 what the pod sends to " + outside4,
				"the program that listens there drops or keeps it", "kubectl get networkpolicy -A"}},
		"a queue without a program": {"iptables -A FORWARD " + at80 + " -j NFQUEUE --queue-num 99",
			[]string{"chain FORWARD of table ip filter hands, by its rule number ", "to queue 99 what the pod sends to " + outside4 + ", and no program listens there",
				"start the program that listens at queue 99"}},
		"a queue for answers": {"iptables -A FORWARD -p tcp --sport 80 -j NFQUEUE --queue-num 98", []string{"to queue 98 the answer of " + outside4}},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			nstest.Serve(t, n.outside(), "tcp4", netip.MustParseAddrPort("0.0.0.0:80"))
			n.listenAtQueue(98)
			n.portnet(nil).add(n.pod("a"))
			n.run("sh", "-ec", tc.harm)
			o := n.operate("doctor", "--dns", "none", "--to", outside4+":80", "--state", n.state, "a")
			for _, says := range tc.says {
				expect.Contains(t, o.stdout, says, "doctor")
			}
			expect.That(t, o.status == 4 && !strings.Contains(o.stdout, "nft delete") && !strings.Contains(o.stdout, " -D "), "%+v", o)
			isDead := strings.Contains(tc.harm, "queue-num 99")
			o = n.operate("status", "--state", n.state)
			expect.Equal(t, strings.Contains(o.stdout, "queue 9"), isDead, "status: %+v", o)
			expect.Equal(t, o.status == 4, isDead, "status: %+v", o)
		})
	}
}

// listenAtQueue binds a queue of the node (NFQNL_MSG_CONFIG with NFQA_CFG_CMD), and gives no verdicts.
func (n *node) listenAtQueue(number uint16) {
	n.Helper()
	c := must.Of(nl.Dial(unix.NETLINK_NETFILTER, n.ns)).Get(n)
	n.Cleanup(func() { _ = c.Close() })
	const config, command, bind = unix.NFNL_SUBSYS_QUEUE<<8 | 2, 1, 1
	data := binary.BigEndian.AppendUint16([]byte{unix.AF_UNSPEC, unix.NFNETLINK_V0}, number)
	data = append(binary.NativeEndian.AppendUint16(binary.NativeEndian.AppendUint16(data, 8), command), bind, 0, 0, 0)
	var b nl.Batch
	b.Add("listen at queue", nil, netlink.Message{Header: netlink.Header{Type: config, Flags: netlink.Request | netlink.Acknowledge}, Data: data}, nil)
	must.Succeed(n, c.Execute(&b))
}

// Doctor's table is its own, and no change that tombolod has to look at.
func TestTombolodLeavesTheTableOfDoctorAlone(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	n.portnet(nil).add(n.pod("a"))
	m := n.mind(t)
	looks := func() int { return m.metric("firewall_looks_total") }
	before := looks()
	n.nft("add table inet fw; add chain inet fw f { type filter hook forward priority 5; }; add rule inet fw f tcp dport 80 drop")
	must.Until(t, "it looks at what another has changed", func() bool { return looks() > before })
	looked := time.Now()
	before = looks()
	o := n.operate("doctor", "--dns", "none", "--to", outside4+":80", "--state", n.state, "a")
	must.That(t, strings.Contains(o.stdout, "chain f of table inet fw drops"), "no table was made: %+v", o)
	time.Sleep(3 * time.Second)
	// It looks every half minute by itself.
	got, most := looks()-before, int(time.Since(looked)/(30*time.Second))
	expect.That(t, got <= most, "it looked %d times, want %d", got, most)
}

// stripped is a ruleset without its counters.
func stripped(ruleset string) string {
	return regexp.MustCompile(`packets \d+ bytes \d+`).ReplaceAllString(ruleset, "")
}

const far4, far6 = "198.51.100.7", "2001:db8:7::7"

// What others have set up on a node is named by check, or by doctor, with its true cause. The command that is advised
// is run as it stands, and helps. Where the advice is where to look, the row says what mends it.
func TestWhatOthersDoToAPodIsNamedAndMended(t *testing.T) {
	t.Parallel()
	nstest.Need(t, "iptables")
	const check = "check"
	doctor := func(args string) string { return "doctor --dns none " + args + " a" }
	toFar := doctor("--to " + far4)
	for name, tc := range map[string]struct {
		harm    string // on the node; IN is the beginning of a command in the pod, $P its port
		command string
		says    string
		mend    string // empty: what is advised
		note    bool   // the exit status stays 0
	}{
		"an address leads another node's subnet here": {harm: "ip address add 10.99.0.1/24 dev cbr0; ip route add 10.99.0.0/24 via " + outside4 + " metric 50", command: check,
			says: "bridge cbr0 has the address 10.99.0.1/24, which no network has on record and which leads 10.99.0.0/24 to the bridge, in place of the route 10.99.0.0/24 via " + outside4},
		"an address without another route":    {harm: "ip address add 10.99.0.1/24 dev cbr0", command: check, says: "has the address 10.99.0.1/24, which no network has on record", note: true},
		"an address that doctor is asked for": {harm: "ip address add 198.51.100.1/24 dev cbr0; ip route add 198.51.100.0/24 via " + outside4 + " metric 50", command: toFar, says: far4 + " does not answer by ARP on cbr0", mend: "ip address del 198.51.100.1/24 dev cbr0"},
		"a rule from the host's address":      {harm: "ip rule add from " + uplink4 + " lookup 100 priority 50; ip route add default via " + outside4 + " table 100", command: check, says: "what the host sends from " + uplink4 + " to pods does not go by cbr0, because of the rule 50: from " + uplink4 + "/32 table 100"},
		"a rule from its IPv6 address":        {harm: "ip -6 rule add from " + uplink6 + " lookup 100 priority 50; ip -6 route add default via " + outside6 + " table 100", command: check, says: "what the host sends from " + uplink6 + " to pods does not go by cbr0"},
		"a rule from the gateway's address":   {harm: "ip rule add from " + gateway4 + " unreachable priority 50", command: check, says: "because of the rule 50: from " + gateway4 + "/32 unreachable"},
		"a rule for what pods send":           {harm: "ip rule add iif cbr0 prohibit priority 50", command: check, says: "sends to elsewhere, because of the rule 50: from all iif cbr0 prohibit"},
		"a table for what pods send":          {harm: "ip rule add from " + subnet4 + " lookup 100 priority 50; ip route add blackhole default table 100", command: check, says: "because of the rule 50: from " + subnet4 + " table 100"},
		"a renamed bridge":                    {harm: "ip link set cbr0 down; ip link set cbr0 name old0; ip link set old0 up", command: check, says: "bridge cbr0 is missing, and its ports are on bridge old0"},
		"a bridge that was renamed while up":  {harm: "ip link set cbr0 name old0", command: doctor(""), says: "bridge cbr0 is missing, and its ports are on bridge old0"},
		"a NIC that hears no routers":         {harm: "sysctl -w net/ipv6/conf/all/forwarding=1; tombolo repair; ip -6 route del default; sysctl -w net/ipv6/conf/eth0/accept_ra=1", command: check, says: "link eth0 ignores router advertisements, because the host forwards IPv6", note: true},
		"the same, of doctor":                 {harm: "sysctl -w net/ipv6/conf/all/forwarding=1; tombolo repair; ip -6 route del default; sysctl -w net/ipv6/conf/eth0/accept_ra=1", command: doctor(""), says: "link eth0 ignores router advertisements, because the host forwards IPv6", mend: "ip -6 route add default via " + outside6},
		"no IPv6 default route":               {harm: "ip -6 route del default; sysctl -w net/ipv6/conf/eth0/accept_ra=2", command: doctor(""), says: "the host itself has no default route of IPv6", mend: "ip -6 route add default via " + outside6},
		"spanning tree":                       {harm: "ip link set cbr0 type bridge stp_state 1", command: check, says: "bridge cbr0 runs the spanning tree protocol, so that a new port forwards nothing for 30s"},
		"a port that waits":                   {harm: "ip link set cbr0 type bridge stp_state 1; ip link set $P down; ip link set $P up", command: doctor(""), says: "does not forward yet: bridge cbr0 runs the spanning tree protocol"},
		"a port that is blocked":              {harm: "bridge link set dev $P state 0", command: doctor(""), says: "does not forward, though both of its ends are up"},
		"a route that refuses":                {harm: "ip route add blackhole 198.51.100.0/24", command: toFar, says: "because of the route blackhole 198.51.100.0/24"},
		"an unreachable route":                {harm: "ip route add unreachable " + far4, command: toFar, says: "because of the route unreachable " + far4 + "/32"},
		"a rule for one destination":          {harm: "ip rule add from " + subnet4 + " to " + far4 + " prohibit priority 50", command: toFar, says: "because of the rule 50: from " + subnet4 + " to " + far4 + "/32 prohibit"},
		"a strict reverse path filter": {harm: "ip link set x0 address 02:00:00:00:05:01; ip address add 10.5.5.1/24 dev x0; OUT ip neigh add 10.5.5.1 lladdr 02:00:00:00:05:01 dev x1; OUT ip address add 10.5.5.2/24 dev x1; OUT ip route add " + uplink4 + "/32 via 10.5.5.1; tombolo repair; sysctl -w net/ipv4/conf/x0/rp_filter=1",
			command: toFar, says: "whose reverse path filter drops it (net.ipv4.conf.x0.rp_filter)"},
		"a gateway of the host's route": {harm: "ip route add 198.51.100.0/24 via 192.0.2.77", command: toFar, says: "192.0.2.77 does not answer by ARP on eth0", mend: "ip route del 198.51.100.0/24"},
		"the host's next hop":           {harm: "ip route replace default via 192.0.2.77", command: doctor(""), says: "192.0.2.77 does not answer by ARP on eth0", mend: "ip route replace default via " + outside4},
		"a gateway of the pod's route":  {harm: "IN ip route add 198.51.100.0/24 via 10.77.0.99", command: doctor(""), says: "the gateway 10.77.0.99 of the pod's route to 198.51.100.0/24 does not answer by ARP: nothing on the bridge cbr0 answers for it", mend: "IN ip route del 198.51.100.0/24"},
		"a filter at the port":          {harm: "tc qdisc add dev $P clsact 2>/dev/null || true; tc filter add dev $P ingress protocol ip prio 1 bpf da bytecode '1,6 0 0 2'", command: toFar, says: "does not get to the bridge cbr0", mend: "tc filter del dev $P ingress prio 1"},
		"a filter at the NIC":           {harm: "tc qdisc add dev eth0 clsact; tc filter add dev eth0 egress protocol ip prio 1 bpf da bytecode '1,6 0 0 2'", command: toFar, says: "passes the firewall and is not sent by eth0", mend: "tc qdisc del dev eth0 clsact"},
		"a rule of the bridge":          {harm: "nft 'add table bridge evil; add chain bridge evil f { type filter hook prerouting priority 0; }; add rule bridge evil f ip daddr " + far4 + " drop'", command: toFar, says: "chain f of table bridge evil drops or rejects, by its rule number 1"},
		"a rule against answers":        {harm: "nft 'add table inet fw; add chain inet fw f { type filter hook forward priority 5; }; add rule inet fw f ip saddr " + far4 + " drop'", command: toFar, says: "chain f of table inet fw drops or rejects, by its rule number 1 with handle 2, the answer of " + far4 + " to the pod"},
		"legacy iptables and answers":   {harm: "iptables-legacy -I FORWARD -s " + far4 + " -j DROP", command: toFar, says: "the answer comes to the host by eth0 and is lost in the hook forward, by no rule of nf_tables", mend: "iptables-legacy -F"},
		"legacy iptables before that":   {harm: "iptables-legacy -t raw -I PREROUTING -d " + far4 + " -j DROP", command: toFar, says: "is lost in the hook prerouting, by no rule of nf_tables", mend: "iptables-legacy -t raw -F"},
		"the pod's own firewall":        {harm: "IN nft 'add table ip k; add chain ip k o { type filter hook output priority 0; policy accept; }; add rule ip k o ip daddr " + far4 + " drop'", command: toFar, says: "it does not leave the pod's interface eth0", mend: "IN nft delete table ip k"},
		"what the pod does not take":    {harm: "IN nft 'add table ip k; add chain ip k i { type filter hook input priority 0; policy accept; }; add rule ip k i ip saddr " + far4 + " drop'", command: toFar, says: "the answer comes to the pod's interface eth0, and the pod does not take it", mend: "IN nft delete table ip k"},
		"a NIC that does not forward":   {harm: "sysctl -w net/ipv4/ip_forward=1; tombolo repair; sysctl -w net/ipv4/conf/eth0/forwarding=0", command: toFar, says: "the answer comes to the host by eth0, a link that does not forward (net.ipv4.conf.eth0.forwarding is 0)"},
		"the same, of no router":        {harm: "sysctl -w net/ipv4/conf/eth0/forwarding=0", command: toFar, says: "the answer comes to the host by eth0, a link that does not forward (net.ipv4.conf.eth0.forwarding is 0)\n              this helps: sysctl -w net/ipv4/conf/eth0/forwarding=116", mend: "sysctl -w net/ipv4/conf/eth0/forwarding=116"},
		"a filter for answers":          {harm: "nft 'add table netdev k; add chain netdev k i { type filter hook ingress device eth0 priority 0; }; add rule netdev k i ip saddr " + far4 + " drop'", command: toFar, says: "see what filters it: ip link show dev eth0; tc filter show dev eth0 ingress; nft list ruleset netdev", mend: "nft delete table netdev k"},
		"a route of the pod's refuses":  {harm: "IN ip route add blackhole " + far4, command: toFar, says: "see which route or rule in the pod refuses it", mend: "IN ip route del blackhole " + far4},
		"a kill switch":                 {harm: "IN ip route replace unreachable default", command: doctor(""), says: "see which route or rule in the pod refuses it", mend: "IN ip route del unreachable default; IN ip route add default via " + gateway4},
		"no answer to a connection":     {harm: "true", command: doctor("--to " + far4 + ":81"), says: "it leaves the host by eth0 as " + uplink4 + ", and no answer comes back to the host", mend: "OUT nft delete table ip mute"},
		"a port that is not served":     {harm: "OUT nft delete table ip mute", command: doctor("--to " + far4 + ":82"), says: "a connection to " + far4 + ":82", note: true, mend: "true"},
		"ARP that the host ignores":     {harm: "sysctl -w net/ipv4/conf/cbr0/arp_ignore=8; IN ip neigh flush dev eth0", command: doctor(""), says: gateway4 + " does not answer by ARP: it comes to the host by cbr0, and the host does not answer", mend: "sysctl -w net/ipv4/conf/cbr0/arp_ignore=0"},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			s := newScene(t)
			nstest.Run(t, s.out, "sh", "-ec", "ip link set lo up; ip address add "+far4+"/32 dev lo; nft 'add table ip mute; add chain ip mute i { type filter hook input priority 0; }; add rule ip mute i tcp dport 81 drop'")
			wantPing(t, s.a.NS, far4)
			out := nstest.Path(t, s.out)
			line := func(text string) string {
				text = strings.ReplaceAll(strings.ReplaceAll(text, "IN ", "nsenter --net="+s.a.path+" "), "OUT ", "nsenter --net="+out+" ")
				return strings.ReplaceAll(text, "tombolo repair", command()+" repair --state "+s.state)
			}
			if strings.Contains(tc.harm, "x0") {
				nstest.Veth(s, s.ns, "x0", s.out, "x1")
			}
			s.on(line(tc.harm))
			try := func() outcome {
				words := strings.Fields(tc.command)
				return s.operate(append([]string{words[0], "--state", s.state}, words[1:]...)...)
			}
			o := try()
			must.That(t, (o.status == 4) == !tc.note && strings.Contains(o.stdout, tc.says), "no line that says %q: %+v", tc.says, o)
			expect.That(t, !strings.Contains(o.stdout, "tombolo repair") || strings.Contains(name, "renamed"), "a repair is advised: %+v", o)
			advised := func() string {
				_, behind, _ := strings.Cut(o.stdout, tc.says)
				_, behind, ok := strings.Cut(behind, "this helps")
				must.That(t, ok, "nothing is advised: %+v", o)
				_, behind, _ = strings.Cut(behind, ": ")
				behind, _, _ = strings.Cut(behind, "\n")
				return strings.TrimPrefix(strings.TrimSuffix(behind, " [configuration]"), "unless the route is intended: ")
			}
			for range 2 { // a rule may be in the way of two things
				mend := tc.mend
				if mend == "" {
					mend = advised()
				}
				s.on(line(mend))
				if o = try(); !strings.Contains(o.stdout, tc.says) || tc.mend != "" {
					break
				}
			}
			for range 20 {
				if o = try(); o.status == 0 {
					break
				}
				time.Sleep(time.Second / 2)
			}
			expect.Success(t, o.err())
			expect.That(t, tc.note && tc.mend == "true" || !strings.Contains(o.stdout, tc.says), "afterwards: %+v", o)
			wantPing(t, s.a.NS, far4)
		})
	}
}

// A bridge with the spanning tree protocol is named by validate before an ADD, and by an ADD that gets no lease.
func TestSpanningTreeIsNamedByValidateAndByAFailedLease(t *testing.T) {
	n := parallelNode(t)
	n.ip("link add br0 type bridge stp_state 1")
	n.ip("link set br0 up")
	w := n.network("wire", conf{"mode": "l2", "bridge": "br0", "ipam": conf{"type": "dhcp", "keeper": "optional", "timeout": "3s"}})
	const says = "bridge br0 runs the spanning tree protocol, so that a new port forwards nothing for 30s"
	file := filepath.Join(t.TempDir(), "wire.conf")
	must.Succeed(t, os.WriteFile(file, w.stdin(nil), 0o600))
	o := n.operate("validate", file)
	expect.That(t, o.status == 0 && strings.Contains(o.stdout, "warning: "+says), "%+v", o)
	_, err := w.tryAdd(n.pod("a"))
	wantError(t, err, 11, says)
	n.ip("link set br0 type bridge stp_state 0")
	o = n.operate("validate", file)
	expect.That(t, o.status == 0 && !strings.Contains(o.stdout, says), "%+v", o)
}
