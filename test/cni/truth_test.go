package cni

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

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
