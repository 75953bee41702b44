package cni

import (
	"encoding/binary"
	"net/netip"
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
		"a policy, by name": {"add table inet fw; add chain inet fw f { type filter hook forward priority 5; policy drop; }; add rule inet fw f meta l4proto { icmp, ipv6-icmp } accept; add rule inet fw f tcp dport != 80 accept", "f"},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			out := n.outside()
			nstest.Serve(t, out, "tcp4", netip.MustParseAddrPort("0.0.0.0:80"))
			nstest.Serve(t, out, "tcp4", netip.MustParseAddrPort("0.0.0.0:443"))
			w := n.portnet(nil)
			w.addPod("a")
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
				"start the program that is to listen at queue 99"}},
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
