package cni

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// scene is a node with a pod that has all that a pod can have, and what one does to it.
type scene struct {
	*network
	a, b *pod
	out  *netns.NS
}

func newScene(t *testing.T) *scene {
	t.Helper()
	n := newNode(t)
	out := n.outside()
	n.run("iptables", "-P", "FORWARD", "DROP")
	s := &scene{out: out, network: n.portnet(conf{"guard": true, "isDefaultGateway": true}), a: n.pod("a"), b: n.pod("b")}
	s.add(s.a, publish(t, "8080:80/tcp"), limited(1e7, 2e7))
	s.add(s.b)
	s.quiet("before")
	return s
}

func (s *scene) quiet(when string) {
	s.Helper()
	o := s.operate("check", "--state", s.state)
	must.That(s, o.status == 0 && strings.Count(o.stdout, "\n") == 1, "check %s: %+v", when, o)
}

func (s *scene) in(line string) { s.Helper(); nstest.Run(s, s.a.NS, "sh", "-ec", line) }

// on runs a line on the node, with P for the port of a, and I for its ifb.
func (s *scene) on(line string) {
	s.Helper()
	port := s.port(s.a)
	s.run("sh", "-ec", strings.NewReplacer("$P", port, "$I", "ifb"+strings.TrimPrefix(port, "veth")).Replace(line))
}

// Without the state directory pods go on, and check says what brings each under control again.
// repair mends all that it says it mends: what belongs to no pod.
func TestWhatCheckAdvisesWithoutTheStateDirectoryIsTrue(t *testing.T) {
	t.Parallel()
	nstest.Need(t, "iptables")
	s := newScene(t)
	must.Succeed(t, os.RemoveAll(s.state))
	s.addPod("c")
	// What a pod has left that is gone.
	s.on("nft 'add element inet tombolo pods4 { cbr0 . 10.77.0.99 comment \"tombolo:1:00000000abc:podnet\" }'")
	o := s.operate("check", "--state", s.state)
	for _, line := range []string{
		"port " + s.port(s.a) + " of network podnet has no record [recreate pod]\n", "port " + s.port(s.b) + " of network podnet has no record [recreate pod]\n",
		"elements of endpoint 00000000abc of network podnet have no record [repair]\n",
	} {
		expect.That(t, o.status == 4 && strings.Contains(o.stdout, line), "no line %q: %+v", line, o)
	}
	o = s.operate("repair", "--state", s.state)
	left := strings.Count(o.stdout, "left: ")
	expect.That(t, o.status == 4 && left == 2 && strings.Contains(o.stdout, "repaired: elements of endpoint 00000000abc"), "repair: %+v", o)
	wantPing(t, s.a.NS, outside4, outside6)
	for _, p := range []*pod{s.a, s.b} {
		s.del(p)
	}
	s.add(s.a, publish(t, "8080:80/tcp"), limited(1e7, 2e7))
	s.add(s.b)
	s.quiet("after [recreate pod]")
	wantPing(t, s.a.NS, outside4, outside6)
}

// What check advises helps: each thing is broken, check names it with a remedy, and is quiet
// after that remedy.
func TestWhatCheckAdvisesIsTrue(t *testing.T) {
	t.Parallel()
	nstest.Need(t, "iptables")
	on := func(line string) func(*scene) { return func(s *scene) { s.Helper(); s.on(line) } }
	in := func(line string) func(*scene) { return func(s *scene) { s.Helper(); s.in(line) } }
	for name, tc := range map[string]struct {
		harm func(*scene)
		says string
		tag  string
	}{
		"ruleset flushed":         {on("nft flush ruleset"), "table inet tombolo and table bridge tombolo are missing (affects container a, container b)", "repair"},
		"table dormant":           {on("nft 'add table inet tombolo { flags dormant; }'"), "flag dormant does not belong there", "repair"},
		"chain flushed":           {on("nft flush chain inet tombolo forward"), "chain forward of table inet tombolo", "repair"},
		"set flushed":             {on("nft flush set inet tombolo pods4"), "set pods4 of table inet tombolo: element", "repair"},
		"element deleted":         {on("nft 'delete element inet tombolo hostports4 { tcp . 8080 }'"), "set hostports4 of table inet tombolo: element", "repair"},
		"rule added to a chain":   {on("nft insert rule inet tombolo forward counter"), "does not belong there", "repair"},
		"rules out of order":      {reorder, "order of the rules", "repair"},
		"rule in FORWARD deleted": {on("iptables -F FORWARD"), "FORWARD", "repair"},
		"a drop behind our rule is followed by another of ours": {on("iptables -A FORWARD -j DROP; iptables -A FORWARD -m mark --mark 0x10/0x10 -m comment --comment 'tombolo: forward what pods may send' -j ACCEPT; iptables -D FORWARD 1"),
			"FORWARD", "repair"},
		"bridge deleted":          {on("ip link del cbr0"), "bridge cbr0 is missing (affects container a, container b)", "repair"},
		"bridge down":             {on("ip link set cbr0 down"), "bridge cbr0: link is down", "repair"},
		"MTU of the bridge":       {on("ip link set cbr0 mtu 1400"), "bridge cbr0: MTU is 1400", "repair"},
		"gateway gone":            {on("ip address del " + gateway4 + "/24 dev cbr0"), "the gateway " + gateway4 + "/24 is missing", "repair"},
		"forwarding off":          {on("echo 1 > /proc/sys/net/ipv4/ip_forward; echo 0 > /proc/sys/net/ipv4/ip_forward"), "does not forward", "repair"},
		"forwarding of IPv6 off":  {on("echo 0 > /proc/sys/net/ipv6/conf/all/forwarding"), "does not forward", "repair"},
		"forwarding off by link":  {on("echo 0 > /proc/sys/net/ipv4/conf/cbr0/forwarding"), "net/ipv4/conf/cbr0/forwarding is 0", "repair"},
		"accept_ra of the bridge": {on("echo 2 > /proc/sys/net/ipv6/conf/cbr0/accept_ra"), "net/ipv6/conf/cbr0/accept_ra is 2, should be 0", "repair"},
		"no IPv6 on the bridge":   {on("echo 1 > /proc/sys/net/ipv6/conf/cbr0/disable_ipv6"), "the gateway " + gateway6 + "/64 is missing", "repair"},
		"route_localnet off":      {on("echo 0 > /proc/sys/net/ipv4/conf/cbr0/route_localnet"), "bridge cbr0:", "repair"},
		"port down":               {on("ip link set $P down"), "link is down", "repair"},
		"port off its bridge":     {on("ip link set $P nomaster"), "membership in bridge cbr0 is missing", "repair"},
		"hairpin":                 {on("ip link set $P type bridge_slave hairpin off"), "hairpin is off", "repair"},
		"learning":                {on("ip link set $P type bridge_slave learning off"), "learning is off", "repair"},
		"flooding":                {on("ip link set $P type bridge_slave flood off"), "flood is off", "repair"},
		"MTU of the port":         {on("ip link set $P mtu 1400"), "MTU is 1400", "repair"},
		"MAC of the port":         {on("ip link set $P address 02:00:00:00:00:99"), "MAC is 02:00:00:00:00:99", "repair"},
		"alias of the port":       {on("ip link set $P alias else"), `alias is "else"`, "repair"},
		"rp_filter of the port":   {on("echo 0 > /proc/sys/net/ipv4/conf/$P/rp_filter"), "rp_filter is 0", "repair"},
		"accept_ra of the port":   {on("echo 2 > /proc/sys/net/ipv6/conf/$P/accept_ra"), "accept_ra is 2", "repair"},
		"shaper gone":             {on("tc qdisc del dev $P root"), "tbf rate", "repair"},
		"ifb gone":                {on("ip link del $I"), "is missing", "repair"},
		"pod's interface gone":    {in("ip link del eth0"), ": link ", "recreate pod"},
		"namespace's path gone": {func(s *scene) {
			s.run("umount", s.a.path)
			s.a.path = nstest.Path(t, s.a.NS) // for the next ADD
		}, "its namespace is gone", "recreate pod"},
		"pod dead": {func(s *scene) {
			s.on("ip link del $P")
			s.run("umount", s.a.path)
		}, "it is dead: port", "gc"},
		"record damaged": {func(s *scene) {
			damage(s, filepath.Join(s.state, "attachments", s.name, strings.TrimPrefix(s.port(s.a), "veth")+".json"))
		}, "damaged: not valid JSON", "recreate pod"},
		"network's record damaged": {func(s *scene) {
			damage(s, filepath.Join(s.state, "networks", s.name+".json"))
		}, "damaged: not valid JSON", "recreate pod"},
		"elements of nobody": {on("nft 'add element inet tombolo pods4 { cbr0 . 10.77.0.99 comment \"tombolo:1:00000000abc:podnet\" }'"), "elements of endpoint 00000000abc of network podnet have no record", "repair"},
		"an ifb of nobody":   {on("ip link add ifb00000000abc type ifb; ip link set ifb00000000abc alias tombolo:1:00000000abc:podnet:"), "link ifb00000000abc has no record", "repair"},
		"the record deleted": {func(s *scene) {
			os.Remove(filepath.Join(s.state, "attachments", s.name, strings.TrimPrefix(s.port(s.a), "veth")+".json"))
		}, "has no record", "recreate pod"},
		"legacy iptables":         {on("iptables-legacy -P FORWARD DROP"), "iptables-legacy", "configuration"},
		"somebody's drop table":   {on("nft 'add table inet fw; add chain inet fw f { type filter hook forward priority 5; policy drop; }'"), "chain f of table inet fw drops", "configuration"},
		"firewalld's table":       {on("nft 'add table inet firewalld; add chain inet firewalld filter_FORWARD { type filter hook forward priority 10; policy accept; }; add rule inet firewalld filter_FORWARD ct state established accept; add rule inet firewalld filter_FORWARD reject'"), "firewalld", ""},
		"a drop ahead of our own": {on("iptables -I FORWARD -j DROP"), "by its rule number 1", "configuration"},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			s := newScene(t)
			tc.harm(s)
			o := s.operate("check", "--state", s.state)
			line := ""
			for l := range strings.Lines(o.stdout) {
				if strings.Contains(l, tc.says) {
					line = l
				}
			}
			must.That(t, o.status == 4 && line != "" && (strings.HasSuffix(line, " ["+tc.tag+"]\n") || tc.tag == ""),
				"no line that says %q, or not [%s]: %+v", tc.says, tc.tag, o)
			switch tc.tag {
			case "repair":
				if o := s.operate("repair", "--state", s.state); o.status != 0 || !strings.HasPrefix(o.stdout, "repaired: ") || strings.Contains(o.stdout, "left: ") {
					t.Errorf("repair: %+v", o)
				}
			case "gc":
				expect.Success(t, s.operate("gc", "--state", s.state).err(), "gc")
				s.a = s.pod("again")
				s.add(s.a, publish(t, "8080:80/tcp"), limited(1e7, 2e7))
			case "recreate pod":
				if o := s.operate("repair", "--state", s.state); o.status != 4 || !strings.Contains(o.stdout, "left: ") {
					t.Errorf("repair where something remains: %+v", o)
				}
				s.del(s.a)
				s.add(s.a, publish(t, "8080:80/tcp"), limited(1e7, 2e7))
			case "configuration":
				if o := s.operate("repair", "--state", s.state); o.status != 4 || !strings.Contains(o.stdout, "left: ") {
					t.Errorf("repair where something remains: %+v", o)
				}
				_, command, ok := strings.Cut(line, "this helps: ")
				must.That(t, ok, "no command in %q", line)
				s.run("sh", "-ec", strings.TrimSuffix(command, " [configuration]\n"))
			default:
				return // a program would have to be there for its command
			}
			s.quiet("after [" + tc.tag + "]")
			wantPing(t, s.a.NS, outside4, outside6)
			expect.Success(t, s.check(s.b))
		})
	}
}

// reorder makes a chain of the same rules, the first behind the last.
func reorder(s *scene) {
	s.Helper()
	s.on(`chain=$(nft -a list chain inet tombolo forward)
first=$(echo "$chain" | sed -n 's/ # handle [0-9]*$//; /comment "/{p;q}' | sed 's/counter packets [0-9]* bytes [0-9]*/counter/')
handle=$(echo "$chain" | sed -n '/ comment "/{s/.*# handle //p;q}' | tail -1)
handle=$(echo "$chain" | awk '/# handle/ && !/chain|table/ {print $NF; exit}')
rule=$(echo "$chain" | awk '/# handle/ && !/chain|table/ {sub(/ # handle.*/, ""); print; exit}')
nft "delete rule inet tombolo forward handle $handle; add rule inet tombolo forward $rule"`)
}

func damage(s *scene, path string) {
	s.Helper()
	must.Succeed(s, os.WriteFile(path, []byte("{"), 0o600))
}

// What cuts a pod off is named by check, CHECK and doctor alike, each with the one cause, and what
// they advise helps. Before it, the pod works; where something is cut, the pod shows that.
func TestWhatCutsAPodOffIsNamedAndTheRemedyHelps(t *testing.T) {
	t.Parallel()
	on := func(line string) func(*scene) { return func(s *scene) { s.Helper(); s.on(line) } }
	only4, only6 := []string{outside4}, []string{outside6}
	for name, tc := range map[string]struct {
		harm func(*scene)
		cut  []string // what the pod a no longer reaches
		says string
		tag  string
		step string       // of doctor
		undo func(*scene) // nil: what is advised is done
	}{
		"the subnet's route is deleted":       {on("ip route del " + subnet4 + " dev cbr0"), only4, "bridge cbr0: the host's route to " + subnet4 + " is missing", "repair", "forwarding", nil},
		"the subnet's IPv6 route is deleted":  {on("ip -6 route del " + subnet6 + " dev cbr0"), only6, "bridge cbr0: the host's route to " + subnet6 + " is missing", "repair", "forwarding", nil},
		"the subnet's route is replaced":      {on("ip route replace " + subnet4 + " via " + outside4), only4, "the host's route to " + subnet4 + " leads elsewhere: " + subnet4 + " via " + outside4, "repair", "forwarding", nil},
		"the subnet's IPv6 route is replaced": {on("ip -6 route replace " + subnet6 + " via " + outside6 + " metric 256"), only6, "the host's route to " + subnet6 + " leads elsewhere: " + subnet6 + " via " + outside6, "repair", "forwarding", nil},
		"the subnet's route refuses packets":  {on("ip route replace blackhole " + subnet4), only4, "the host's route to " + subnet4 + " leads elsewhere: blackhole " + subnet4, "repair", "forwarding", nil},
		"another IPv6 route is better": {on("ip -6 route add " + subnet6 + " via " + outside6 + " metric 1"), only6, "the host does not send packets for fd77::2 to cbr0", "configuration", "forwarding",
			on("ip -6 route del " + subnet6 + " via " + outside6)},
		"a route of the pod's address": {on("ip route add 10.77.0.2/32 via " + outside4), only4, "the host does not send packets for 10.77.0.2 to cbr0: see ip route get 10.77.0.2", "configuration", "forwarding",
			on("ip route del 10.77.0.2/32")},
		"a rule refuses what is for pods": {on("ip -6 rule add to " + subnet6 + " prohibit"), only6, "the host does not send packets for fd77::2 to cbr0", "configuration", "forwarding",
			on("ip -6 rule del to " + subnet6 + " prohibit")},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			s := newScene(t)
			nstest.Serve(t, s.out, "udp", netip.AddrPortFrom(nstest.Addr(outside4), 53))
			wantPing(t, s.a.NS, outside4, outside6)
			tc.harm(s)
			wantNoPing(t, s.a.NS, tc.cut...)
			o := s.operate("check", "--state", s.state)
			line := lineWith(o.stdout, tc.says)
			must.That(t, o.status == 4 && strings.HasSuffix(line, " ["+tc.tag+"]\n"),
				"check does not say %q, or not [%s]: %+v", tc.says, tc.tag, o)
			wantError(t, s.check(s.a), 113, tc.says)
			remedy := s.diagnosed(tc.step, tc.says)
			o = s.operate("repair", "--state", s.state)
			switch {
			case tc.tag == "repair":
				expect.That(t, o.status == 0 && strings.HasPrefix(lineWith(o.stdout, tc.says), "repaired: "),
					"repair: %+v", o)
			case o.status != 4 || !strings.HasPrefix(lineWith(o.stdout, tc.says), "left: "):
				t.Errorf("repair of what is another's: %+v", o)
			case tc.undo != nil:
				tc.undo(s)
			default:
				expect.Contains(t, line, "; this helps: "+remedy, "check advises another command than %q", remedy)
				s.on(remedy)
			}
			s.quiet("after the remedy")
			wantPing(t, s.a.NS, outside4, outside6)
			expect.Success(t, s.check(s.a))
		})
	}
}

func lineWith(output, text string) string {
	for line := range strings.Lines(output) {
		if strings.Contains(line, text) {
			return line
		}
	}
	return ""
}

// diagnosed has doctor find something at one step alone for the pod a, and say a text. It gives
// the remedy.
func (s *scene) diagnosed(step, text string) string {
	s.Helper()
	var reports []struct {
		Findings []struct{ Step, Evidence, Remedy string }
	}
	unmarshal(s, s.operate("doctor", "--json", "--state", s.state, "--dns", outside4, "a").stdout, &reports)
	remedy := ""
	for _, f := range reports[0].Findings {
		if strings.Contains(f.Evidence, text) {
			remedy = f.Remedy
		}
		expect.Equal(s, f.Step, step, "doctor finds something at step %s, where %s is the cause: %+v", f.Step, step, f)
	}
	expect.That(s, remedy != "", "doctor does not say %q: %+v", text, reports)
	return remedy
}

// reservation is the file of an address.
func (s *scene) reservation(address string) string {
	return filepath.Join(s.state, "ipam", s.name, address)
}

// A reservation that has become another pod's, as by the hand of an operator, is named by CHECK. DEL leaves it.
func TestDELLeavesTheReservationOfAnother(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	const others = "other\r\neth0"
	must.Succeed(t, os.WriteFile(s.reservation("10.77.0.2"), []byte(others), 0o600))
	wantError(t, s.check(s.a), 113, "10.77.0.2 is not reserved")
	s.del(s.a)
	s.del(s.a)
	expect.Equal(t, nstest.ReadIf(t, s.reservation("10.77.0.2")), others, "the reservation is")
	s.add(s.a)
	wantPing(t, s.a.NS, outside4, outside6)
}

// A reservation that is lost leads one ADD to an address that is in use. The next gets another.
func TestAnAddressWithoutItsReservationIsNotTakenFromItsPod(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	must.Succeed(t, os.RemoveAll(s.reservation("10.77.0.2")))
	must.Succeed(t, os.WriteFile(s.reservation("last_reserved_ip.0"), []byte("10.77.0.1"), 0o600))
	c := s.pod("c")
	wantError(t, expect.Err(s.tryAdd(c)), 112, "10.77.0.2")
	expect.Equal(t, ip4(s.add(c)).String(), "10.77.0.4", "the next pod has")
	wantPing(t, s.a.NS, outside4, outside6)
}

// An operator's own bridge has the gateway's address without a broadcast address, and routes go by it.
func TestAGatewayThatIsThereIsNotExchanged(t *testing.T) {
	n := parallelNode(t)
	n.run("sh", "-ec", "ip link add cbr0 type bridge; ip link set cbr0 up; ip address add "+gateway4+"/24 dev cbr0; ip route add 10.99.0.0/16 via 10.77.0.50; ip route add default via 10.77.0.254")
	before := n.run("ip", "route")
	w := n.podnet(nil)
	for _, id := range []string{"a", "b"} {
		w.add(n.pod(id))
	}
	n.operate("repair", "--state", n.state)
	for line := range strings.Lines(before) {
		expect.Contains(t, n.run("ip", "route"), strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(line), "linkdown")), "the route %sis gone", line)
	}
}

// advised gives the command that STATUS advises, as it stands in the plugin's output.
func (w *network) advised(t *testing.T) string {
	t.Helper()
	o := w.call(call{verb: "STATUS", stdin: w.stdin(nil)})
	e := failure(o.stdout)
	must.That(t, e != nil, "STATUS: %+v", o)
	_, command, ok := strings.Cut(e.Msg, "this helps: ")
	must.That(t, ok && strings.Contains(o.stdout, command),
		"no command, or another one than in the message: %s", o.stdout)
	return command
}

func TestAdvisedCommandLetsPodsAndTheirPublishedPortsPass(t *testing.T) {
	t.Parallel()
	for name, chain := range map[string]string{
		"before our chain": "nft 'add table inet fw; add chain inet fw f { type filter hook forward priority -300; policy accept; };" +
			" add rule inet fw f counter drop'",
		"behind our chain": "nft 'add table inet fw; add chain inet fw f { type filter hook forward priority 0; policy drop; }'",
		"of iptables":      "iptables -t mangle -P FORWARD DROP",
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			out := n.outside()
			w := n.portnet(nil)
			p := w.addPod("a", publish(t, "8080:80/tcp"))
			p.serve(t, "tcp", 80)
			n.run("sh", "-ec", chain)
			wantNoPing(t, p.NS, outside4)
			_, err := nstest.AskWithin(t, out, "tcp", netip.AddrPortFrom(nstest.Addr(uplink4), 8080), time.Second)
			must.That(t, err != nil, "it stops nothing")
			n.run("sh", "-ec", w.advised(t))
			wantPing(t, p.NS, outside4)
			expect.Success(t, expect.Err(askPort(t, out, "tcp", uplink4, 8080)))
			expect.Success(t, w.status())
			n.run("iptables", "-t", "mangle", "-S") // it can still read its tables
		})
	}
}

func TestStatusKnowsThatThePodsSubnetsMayPass(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	n.run("sh", "-ec", "nft 'add table inet fw; add chain inet fw f { type filter hook forward priority 0; policy drop; };"+
		" add rule inet fw f ip saddr "+subnet4+" accept; add rule inet fw f ip daddr "+subnet4+" accept;"+
		" add rule inet fw f ip6 saddr "+subnet6+" accept; add rule inet fw f ip6 daddr "+subnet6+" accept'")
	w := n.podnet(nil)
	p := w.addPod("a")
	wantPing(t, p.NS, outside4)
	expect.Success(t, w.status())
	n.run("nft", "flush chain inet fw f")
	wantNoPing(t, p.NS, outside4)
	wantError(t, w.status(), 50, "chain f of table inet fw drops")
}
