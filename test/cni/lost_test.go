package cni

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

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
				return strings.TrimPrefix(strings.TrimSuffix(behind, " [configuration]"), "unless it is meant: ")
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
