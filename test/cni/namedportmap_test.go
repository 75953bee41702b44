package cni

import (
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// portmapping is a configuration of portmap with its mappings.
func portmapping(more string, mappings ...string) string {
	return fmt.Sprintf(`{"type":"portmap"%s,"runtimeConfig":{"portMappings":[%s]}}`, more, strings.Join(mappings, ","))
}

// noAnswer is how long a call may take that may get no answer.
const noAnswer = 300 * time.Millisecond

// A client of UDP that goes on sending has its flow for ever, to where the port led when it began.
func TestPortmapByNameHasFlowsOfUDPFollowThePod(t *testing.T) {
	t.Parallel()
	s := newSide(t, referenceDir(t), byName())
	out := s.outside()
	plugins := []string{
		`{"type":"bridge","isGateway":true,"bridge":"cni0","ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.1.0/24","routes":[{"dst":"0.0.0.0/0"}]}}`,
		portmapping("", `{"hostPort":5300,"containerPort":53,"protocol":"udp"}`),
	}
	s.chain("ADD", "first", plugins[:1]) // from here on the kernel tracks connections
	client := newSender(t, out, addrPort(uplink4, 5300))
	client.send(t)
	expect.Contains(t, s.run("conntrack", "-L", "-p", "udp"), "dport=5300", "no flow to begin with")
	s.chain("ADD", "a", plugins)
	s.of("a").serve(t, "udp", 53)
	expect.Equal(t, client.ask(t), nstest.Addr(outside4), "the flow of a client that began before the port was published does not lead to the pod: answer from")
}

// fates says what becomes of calls to host ports: the source that the pod sees, or nothing.
func (s *side) fates(out *netns.NS, pod, other *pod) string {
	s.Helper()
	var list []string // appended to by this goroutine while others write into it
	var said sync.Mutex
	var calls sync.WaitGroup
	for _, tt := range []struct {
		name string
		from *netns.NS
		at   []string
	}{
		{"another machine", out, []string{uplink4, uplink6}},
		{"the host", s.ns, []string{uplink4, uplink6, "127.0.0.1"}},
		{"the pod itself", pod.NS, []string{uplink4, uplink6}},
		{"another pod", other.NS, []string{uplink4, uplink6}},
	} {
		for _, at := range tt.at {
			for _, port := range []string{"tcp 8080", "udp 5300", "tcp 8181"} {
				var network string
				var number uint16
				fmt.Sscan(port, &network, &number)
				to := netip.AddrPortFrom(nstest.Addr(at), number)
				said.Lock()
				i := len(list)
				list = append(list, "")
				said.Unlock()
				calls.Go(func() {
					seen, err := nstest.AskWithin(s, tt.from, network, to, noAnswer)
					if err != nil {
						seen, err = nstest.AskWithin(s, tt.from, network, to, late/4) // on a busy machine it comes late
					}
					if err == nil {
						said.Lock()
						defer said.Unlock()
						list[i] = fmt.Sprintf("%s at %s, %s: seen as %s\n", tt.name, at, port, seen.Addr())
					}
				})
			}
		}
	}
	calls.Wait()
	return strings.Join(list, "")
}

// In a chain by names, host ports lead to the same pods as by the reference's, from everywhere, and
// the pod sees the same callers; whichever made its interface.
func TestPortmapByNameLeadsWhereTheReferencesDoes(t *testing.T) {
	t.Parallel()
	const ipam = `"ipam":{"type":"host-local","dataDir":"DATA/n","ranges":[[{"subnet":"10.5.0.0/24"}],[{"subnet":"fd05::/64"}]],"routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0"}]}`
	ports := []string{
		`{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`, `{"hostPort":5300,"containerPort":53,"protocol":"udp"}`,
		`{"hostPort":8181,"containerPort":80,"protocol":"tcp","hostIP":"` + uplink4 + `"}`,
	}
	bridge, ptp, macvlan := `{"type":"bridge","isGateway":true,`+ipam+`}`, `{"type":"ptp",`+ipam+`}`, `{"type":"macvlan","master":"up0",`+ipam+`}`
	source := regexp.MustCompile(`: seen as .*`)
	// Of what the callers of this name lose their address by one of both alone, whether they are answered counts.
	answeredAlone := func(caller string) func(string) string {
		return func(fates string) string {
			var list strings.Builder
			for line := range strings.Lines(fates) {
				if strings.HasPrefix(line, caller+" ") {
					line = source.ReplaceAllString(line, "")
				}
				list.WriteString(line)
			}
			return list.String()
		}
	}
	// Of these callers nothing counts: they get no answer by the reference's.
	without := func(caller string) func(string) string {
		return func(fates string) string {
			return regexp.MustCompile(`(?m)^`+caller+` .*\n`).ReplaceAllString(fates, "")
		}
	}
	const nftables = `"backend":"nftables"`
	for _, tt := range []struct {
		name, main, more string
		call             bool                // bridged packets pass the firewall
		differs          func(string) string // takes out of the fates what differs
	}{
		{name: "bridge", main: bridge},
		// There, no pod of the bridge gets an answer of another.
		{name: "bridge, nftables", main: bridge, more: nftables, differs: without("another pod")},
		// There, a caller of the pod's subnet loses its address, needed or not.
		{name: "bridge, seen by the firewall", main: bridge, call: true, differs: answeredAlone("another pod")},
		{name: "bridge, nftables, seen by the firewall", main: bridge, more: nftables, call: true, differs: answeredAlone("another pod")},
		{name: "ptp", main: ptp, differs: answeredAlone("another pod")},
		{name: "ptp, nftables", main: ptp, more: nftables},
		{name: "macvlan", main: macvlan},
		{name: "bridge without snat", main: bridge, more: `"snat":false`},
		{name: "bridge without snat, nftables", main: bridge, more: `"snat":false,` + nftables},
		{name: "ptp without snat", main: ptp, more: `"snat":false`},
		{name: "bridge with masqAll", main: bridge, more: `"masqAll":true`},
		{name: "ptp with masqAll", main: ptp, more: `"masqAll":true,"markMasqBit":20`},
		{name: "bridge with masqAll and without snat", main: bridge, more: `"masqAll":true,"snat":false`},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			want := ""
			for _, ours := range [][]string{nil, byName(), {"portmap"}} {
				if len(ours) > 1 && tt.main != bridge {
					continue
				}
				s := newSide(t, referenceDir(t), ours)
				for _, f := range []string{"", "6"} {
					nstest.Sysctl(t, s.ns, "net/bridge/bridge-nf-call-ip"+f+"tables", map[bool]string{true: "1", false: "0"}[tt.call])
				}
				nstest.Sysctl(t, s.ns, "net/ipv6/conf/default/accept_dad", "0") // the reference does not wait for it on the host
				nstest.Sysctl(t, s.ns, "net/ipv4/ip_forward", "1")
				nstest.Sysctl(t, s.ns, "net/ipv6/conf/all/forwarding", "1")
				for _, id := range []string{"a", "b"} {
					nstest.Sysctl(t, s.of(id).NS, "net/ipv6/conf/default/accept_dad", "0")
				}
				out := s.outside()
				nstest.Veth(t, s.ns, "up0", s.ns, "up1")
				more := strings.TrimSuffix(","+tt.more, ",")
				with, none := []string{tt.main, portmapping(more, ports...)}, []string{tt.main, portmapping(more)}
				s.chain("ADD", "a", with)
				s.chain("ADD", "b", none)
				s.of("a").serve(t, "tcp", 80)
				s.of("a").serve(t, "udp", 53)
				got := "none" // the host does not reach the pods of its own link's macvlan
				if tt.main != macvlan {
					got = s.fates(out, s.of("a"), s.of("b"))
				}
				if tt.differs != nil {
					got = tt.differs(got)
				}
				if want == "" {
					want = got
				}
				expect.Equal(t, cmp.Diff(want, got), "", "with %q, the reference's (-) and this one's (+)", ours)
				s.chain("CHECK", "a", with)
				s.chain("DEL", "a", with)
				s.chain("DEL", "a", with)
				seen, err := nstest.AskWithin(t, out, "tcp", netip.MustParseAddrPort(uplink4+":8080"), noAnswer)
				expect.That(t, err != nil, "with %q, a port leads somewhere after the DEL, seen as %s", ours, seen)
				s.chain("DEL", "b", none)
			}
		})
	}
}

// Some runtimes hand a container's ports to all of its networks: the first has them, and the next one
// when that is gone.
func TestHostPortsOfAContainerOnTwoNetworksByName(t *testing.T) {
	t.Parallel()
	s := newSide(t, referenceDir(t), byName())
	out := s.outside()
	results := map[string]string{}
	call := func(what, plugin, ifName, network, more string) {
		t.Helper()
		conf := fmt.Sprintf(`{"cniVersion":"1.0.0","name":%q,"stateDir":"STATE","type":%q,%s`, network, plugin, more)
		if prev := results[ifName]; prev != "" {
			conf += `,"prevResult":` + prev
		}
		o := s.call(verb{plugin: plugin, verb: what, id: "a", ifName: ifName, conf: conf + "}"})
		must.That(t, o.status == 0, "%s of %s by %s: %s", what, ifName, plugin, o.stdout)
		if what == "ADD" {
			results[ifName] = o.stdout
		}
	}
	const ports = `"runtimeConfig":{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]}`
	ipam := func(n int) string {
		return fmt.Sprintf(`"bridge":"cni%d","isGateway":true,"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.%d.0/24","routes":[{"dst":"%s"}]}`, n, n, []string{"0.0.0.0/0", "198.51.100.0/24"}[n])
	}
	for n, ifName := range []string{"eth0", "eth1"} {
		call("ADD", "bridge", ifName, "net"+ifName, ipam(n))
		call("ADD", "portmap", ifName, "net"+ifName, ports)
	}
	s.of("a").serve(t, "tcp", 80)
	leads := func(want string) {
		t.Helper()
		if rules := s.run("nft", "list", "map", "inet", "tombolo", "hostports4"); !strings.Contains(rules, "tcp . 8080") || !strings.Contains(rules, want) {
			t.Errorf("the port leads elsewhere than to %s: %s", want, rules)
		}
	}
	leads("10.5.0.2 . 80")
	expect.Success(t, expect.Err(askPort(t, out, "tcp", uplink4, 8080)))
	call("DEL", "portmap", "eth0", "neteth0", ports)
	leads("10.5.1.2 . 80")
	call("DEL", "portmap", "eth1", "neteth1", ports)
	rules := s.run("nft", "list", "map", "inet", "tombolo", "hostports4")
	expect.That(t, !strings.Contains(rules, "tcp . 8080"), "the port leads somewhere: %s", rules)
}

// 127.0.0.1 leads to a pod in a VLAN by the host's link there and by the bridge. A DEL by portmap alone shuts both.
func TestPortmapByNameShutsBothWaysToAVLAN(t *testing.T) {
	t.Parallel()
	needVLANs(t)
	s := newSide(t, referenceDir(t), byName())
	ports := portmapping("", `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`)
	open := func(when, want string) {
		t.Helper()
		for _, link := range []string{"cni0", "cni0.100"} {
			expect.Equal(t, nstest.Sysctl(t, s.ns, "net/ipv4/conf/"+link+"/route_localnet"), want, "%s: route_localnet of %s is", when, link)
		}
	}
	main := `{"type":"bridge","isGateway":true,"vlan":100,"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24","routes":[{"dst":"0.0.0.0/0"}]}}`
	s.chain("ADD", "a", []string{main, ports})
	s.of("a").serve(t, "tcp", 80)
	open("after ADD", "1")
	expect.Success(t, expect.Err(nstest.AskWithin(t, s.ns, "tcp", netip.MustParseAddrPort("127.0.0.1:8080"), 5*time.Second)))
	s.chain("DEL", "a", []string{ports})
	open("after DEL by portmap", "0")
	s.chain("DEL", "a", []string{main})
}

// What portmap by name refuses, the reference's does once it has its name back, as the message says.
func TestPortmapByNameSaysWhatDoesWhatItRefuses(t *testing.T) {
	t.Parallel()
	s := newSide(t, referenceDir(t), nil)
	o := s.operate("install", "--names", "bridge,portmap", s.programs)
	must.That(t, o.status == 0, "install: %s%s", o.stdout, o.stderr)
	ports := []string{`{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`}
	main := `{"type":"bridge","isGateway":true,"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24","routes":[{"dst":"0.0.0.0/0"}]}}`
	prev := s.chain("ADD", "a", []string{main})
	conf := func(more string) string {
		return `{"cniVersion":"1.0.0","name":"net","stateDir":"STATE","prevResult":` + prev + "," + strings.TrimPrefix(portmapping(more, ports...), "{")
	}
	refused := []string{`"conditionsV4":["-s","198.51.100.0/24"]`, `"conditionsV6":["-s","2001:db8:1::/64"]`}
	command := ""
	for _, more := range refused {
		e := failure(s.call(verb{plugin: "portmap", verb: "ADD", id: "a", conf: conf("," + more)}).stdout)
		name, _, _ := strings.Cut(more[1:], `"`)
		must.That(t, e != nil && e.Code == 2 && strings.HasPrefix(e.Msg, name),
			"%s: %v, want error 2 by that name", more, e)
		_, command, _ = strings.Cut(e.Msg, "(tombolo ")
		command, _, _ = strings.Cut(command, ")")
	}
	// Empty ones, and DEL of a pod of before, are as without.
	for _, v := range []verb{
		{verb: "ADD", conf: conf(`,"conditionsV4":[],"conditionsV6":null`)}, {verb: "DEL", conf: conf("," + refused[0])}, {verb: "ADD", conf: conf(`,"externalSetMarkChain":"KUBE-MARK-MASQ"`)},
		{verb: "DEL", conf: conf("")},
	} {
		v.plugin, v.id = "portmap", "a"
		expect.Success(t, s.call(v).err(), "%s with %s", v.verb, v.conf)
	}
	o = s.operate(strings.Fields(strings.ReplaceAll(command, "DIR", s.programs))...)
	must.That(t, command != "" && o.status == 0, "tombolo %s: %s%s", command, o.stdout, o.stderr)
	for _, more := range refused {
		expect.Success(t, s.call(verb{plugin: "portmap", verb: "ADD", id: "a", conf: conf("," + more)}).err(), "the reference's with %s", more)
		if rules := s.run("iptables-save", "-t", "nat"); strings.Contains(more, "V4") != strings.Contains(rules, "-s 198.51.100.0/24") || !strings.Contains(rules, ":80") {
			t.Errorf("its rules with %s:\n%s", more, rules)
		}
		s.call(verb{plugin: "portmap", verb: "DEL", id: "a", conf: conf("," + more)})
	}
	s.chain("DEL", "a", []string{main})
}

// The network's record is lost, or damaged, and its pods run with ports that keep their callers' sources.
func TestALostNetworkRecordKeepsPortsWithoutSNATGoing(t *testing.T) {
	t.Parallel()
	for _, damage := range []string{"removed", "emptied"} {
		nstest.RunParallel(t, damage, func(t *testing.T) {
			s := newSide(t, referenceDir(t), byName())
			main := `{"type":"bridge","bridge":"cbr0","isGateway":true,"ipam":{"type":"host-local","dataDir":"DATA/ipam","subnet":"10.88.0.0/24"}}`
			list := []string{main, portmapping(`,"snat":false`, `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`)}
			s.chain("ADD", "a", list)
			record := s.state + "/networks/net.json"
			harm := func() error { return os.WriteFile(record, nil, 0o600) }
			if damage == "removed" {
				harm = func() error { return os.Remove(record) }
			}
			must.Succeed(t, harm())
			s.chain("ADD", "b", list[:1])
			s.run("nft", "flush", "ruleset")
			s.chain("ADD", "c", list[:1])
			expect.Contains(t, s.run("nft", "list", "ruleset"), "8080", "port 8080 leads to no pod any more")
		})
	}
}
