package cni

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// caller is a place that host ports are called from, and the address of the host that it calls.
type caller struct {
	*netns.NS
	name, at string
}

// callers are the outside at eth0, a machine at eth1, another pod, the pod itself and the host.
func (n *node) callers(t *testing.T, w *network, p *pod) []caller {
	t.Helper()
	out, far, other := n.outside(), n.far(t), n.pod("other")
	w.add(other)
	return []caller{
		{out, "out", uplink4}, {out, "out", uplink6}, {far, "far", "198.51.100.1"}, {far, "far", "2001:db8:1::1"},
		{other.NS, "pod", gateway4}, {other.NS, "pod", uplink6}, {p.NS, "pod", uplink4},
		{n.ns, "host", uplink4}, {n.ns, "host", uplink6}, {n.ns, "host", "127.0.0.1"},
	}
}

// far returns a machine at eth1 of the host.
func (n *node) far(t *testing.T) *netns.NS {
	t.Helper()
	far := nstest.New(t)
	nstest.Veth(t, n.ns, "eth1", far, "eth0")
	n.run("sh", "-ec", "ip address add 198.51.100.1/24 dev eth1; ip address add 2001:db8:1::1/64 dev eth1 nodad")
	nstest.Run(t, far, "sh", "-ec", "ip address add 198.51.100.2/24 dev eth0; ip address add 2001:db8:1::2/64 dev eth0 nodad")
	return far
}

// answers fails the test unless the caller gets an answer, or else a refusal of the host's own.
func (c caller) answers(t *testing.T, network string, port int, want bool) {
	t.Helper()
	_, err := askPort(t, c.NS, network, c.at, port)
	expect.That(t, (err == nil) == want && (err == nil || strings.Contains(err.Error(), "refused")),
		"%s at %s, %s %d: %v, want an answer: %t", c.name, c.at, network, port, err, want)
}

func TestHostPortsAreTakenFromTheListedCallers(t *testing.T) {
	t.Parallel()
	from := func(names string) func(caller, string, int) bool {
		return func(c caller, _ string, _ int) bool { return strings.Contains(names, c.name) }
	}
	for _, tt := range []struct {
		name         string
		network, pod any
		open         func(c caller, network string, port int) bool // but for the host, which always reaches its ports
	}{
		{"no list", nil, nil, from("out far pod")},
		{"all", "all", []string{"all"}, from("out far pod")},
		{"a prefix", []string{"192.0.2.0/24"}, nil, func(c caller, _ string, _ int) bool { return c.name == "out" && c.at == uplink4 }},
		{"addresses", outside4 + ", " + outside6, nil, from("out")},
		{"the addresses beside", "192.0.2.3, 192.0.2.1, 2001:db8::1, 2001:db8::3, ::/3 tcp 7999, ::/3 tcp 8003-9000", nil, from("")},
		{"a link", []string{"eth1"}, nil, from("far")},
		{"the pods' bridge", "cbr0", nil, from("pod")},
		{"the host alone", "lo", nil, from("")},
		{"IPv6 alone", "::/0", nil, func(c caller, _ string, _ int) bool { return c.at == uplink6 || c.at == "2001:db8:1::1" }},
		{"ports", "0.0.0.0/0 tcp 8001, ::/0 tcp 8001, eth1 udp", nil, func(c caller, network string, port int) bool {
			return port == 8001 || network == "udp" && c.name == "far"
		}},
		{"the pod's own", nil, []string{"eth1", "cbr0"}, from("far pod")},
		{"both", "192.0.2.0/24, eth1", "2001:db8:1::/64, 192.0.2.2/31 tcp 8000-8001", func(c caller, network string, port int) bool {
			return c.at == "2001:db8:1::1" || c.name == "out" && c.at == uplink4 && (port == 8000 || port == 8001)
		}},
		{"no overlap", "eth0", "eth1", from("")},
		{"an annotation", "all", map[string]string{"tombolo-cni.github.io/publishFrom": "eth1"}, from("far")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			w := n.portnet(conf{"publishFrom": tt.network, "annotations": []string{"publishFrom"},
				"capabilities": conf{"portMappings": true, "publishFrom": true, podAnnotations: true}})
			if tt.network == nil {
				w = w.with(conf{"publishFrom": nil})
			}
			var options []option
			if annotations, is := tt.pod.(map[string]string); is {
				options = append(options, capability(podAnnotations, annotations))
			} else if tt.pod != nil {
				options = append(options, capability("publishFrom", tt.pod))
			}
			options = append(options, publish(t, "8000-8002:80/tcp", "5300:53/udp", "9000:9/tcp"))
			p := n.pod("p")
			r := w.add(p, options...)
			for port := range 3 {
				p.serve(t, "tcp", 80+port)
			}
			p.serve(t, "udp", 53)
			callers := n.callers(t, w, p)
			isOpen := func(c caller, network string, port int) bool { return c.name == "host" || tt.open(c, network, port) }
			for _, c := range callers {
				for port := 8000; port < 8003; port++ {
					c.answers(t, "tcp", port, isOpen(c, "tcp", port))
				}
				c.answers(t, "udp", 5300, isOpen(c, "udp", 5300))
			}

			// A program of the host hears the calls that the port is closed to. In the pod, no program listens.
			n.serve(t, 9000)
			for _, c := range callers {
				c.answers(t, "tcp", 9000, !isOpen(c, "tcp", 9000))
			}
			expect.Success(t, w.check(p, options...))
			limited := tt.name != "no list" && tt.name != "all"
			check := n.operate("check", "--state", n.state).stdout
			expect.Equal(t, strings.Contains(check, "too, which gets only the packets of callers that publishFrom excludes\n"), limited, "%s", check)
			expect.Equal(t, strings.Contains(check, "too, which gets none of its packets: "), !limited, "%s", check)
			n.run("sh", "-ec", "nft list ruleset | nft -c -f -")
			w.del(p, options...)
			left := n.run("nft", "list", "ruleset")
			expect.That(t, !strings.Contains(left, ip4(r).String()+" ") && !strings.Contains(left, "tcp . 80"), "after DEL:\n%s", left)
		})
	}
}

// serve answers at a port of the host, on all of its addresses.
func (n *node) serve(t *testing.T, port uint16) {
	t.Helper()
	(&pod{NS: n.ns}).serve(t, "tcp", int(port))
}

// A list holds for the pods that are added with it, also after a flush; a flow that is open goes on.
func TestAChangedListOfCallersHoldsForNewPods(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	w := n.portnet(conf{"publishFrom": "eth0, cbr0"})
	old, next := n.pod("old"), n.pod("next")
	w.add(old, publish(t, "8000:80/tcp", "5300:53/udp", uplink4+":8080:80/tcp"))
	old.serve(t, "tcp", 80)
	old.serve(t, "udp", 53)
	out := n.callers(t, w, old)[0]
	closed := w.with(conf{"publishFrom": "eth1"})
	closed.add(next, publish(t, "8001:80/tcp", "198.51.100.1:8080:80/tcp"))
	next.serve(t, "tcp", 80)
	for _, when := range []string{"at first", "after a flush", "after another", "after a restart"} {
		out.answers(t, "tcp", 8000, true)
		out.answers(t, "udp", 5300, true)
		out.answers(t, "tcp", 8001, false)
		for at, want := range map[string]bool{uplink4: true, "198.51.100.1": false} {
			nstest.Run(t, out.NS, "ip", "route", "replace", "198.51.100.0/24", "via", uplink4)
			caller{out.NS, "out", at}.answers(t, "tcp", 8080, want)
		}
		switch when {
		case "at first":
			n.nft("flush ruleset")
		case "after a flush":
			n.nft("flush set inet tombolo refused4; flush set inet tombolo excepted4")
		default:
			continue
		}
		must.Succeed(t, n.operate("repair", "--state", n.state).err())
	}
	w.del(old)
	const missing = "network podnet: publishFrom names link \"wg0\", which does not exist"
	absent := n.pod("absent")
	w.with(conf{"publishFrom": "wg0 tcp, lo, cbr0, ::1, 10.0.0.0/8"}).add(absent)
	expect.Contains(t, n.operate("check", "--state", n.state).stdout, missing)
	w.del(absent)
	expect.That(t, !strings.Contains(n.operate("check", "--state", n.state).stdout, "does not exist"), "check without it")
	closed.add(old, publish(t, "8000:80/tcp", "5300:53/udp"))
	out.answers(t, "tcp", 8000, false)
	out.answers(t, "udp", 5300, false) // its flow led to the pod until then
	closed.del(old)
	w.add(old, publish(t, "8000:80/tcp", "5300:53/udp"))
	out.answers(t, "udp", 5300, true) // its flow ended at the host until then
}

// firewalls are what others may have set up on the host: each gives a way to run commands, and whether it is open.
func firewalls() map[string]func(t *testing.T, n *node) (do func(line string), open bool) {
	shell := func(n *node) func(string) { return func(line string) { n.run("sh", "-ec", line) } }
	begin := func(line string) func(*testing.T, *node) (func(string), bool) {
		return func(_ *testing.T, n *node) (func(string), bool) { shell(n)(line); return shell(n), false }
	}
	actual := func(config string) func(*testing.T, *node) (func(string), bool) {
		return func(t *testing.T, n *node) (func(string), bool) {
			f := n.firewalldToBe(t)
			f.configure(t, config)
			f.beginBus(t)
			f.begin(t)
			n.mindOn(t, f.bus, nil)
			must.Until(t, "firewalld is attended to", n.attendsFirewalld)
			if config != "" && !isReallyStrict(t) {
				n.nft("add chain inet firewalld filter_FORWARD_dnat; add rule inet firewalld filter_FORWARD_dnat reject; insert rule inet firewalld filter_FORWARD ct status dnat jump filter_FORWARD_dnat")
			}
			return f.do, config == ""
		}
	}
	return map[string]func(*testing.T, *node) (func(string), bool){
		"none": func(_ *testing.T, n *node) (func(string), bool) { return shell(n), true },
		"ufw": func(t *testing.T, n *node) (func(string), bool) {
			do := n.ufw(t)
			return func(line string) { do(line) }, false
		},
		"iptables DROP":     begin("iptables -P FORWARD DROP; ip6tables -P FORWARD DROP"),
		"iptables -j DROP":  begin("iptables -A FORWARD -j DROP; ip6tables -A FORWARD -j DROP"),
		"nft":               begin("nft 'add table inet fw; add chain inet fw f { type filter hook forward priority 0; policy drop; }; add rule inet fw f meta mark & 0x10 == 0x10 accept'"),
		"firewalld":         actual(""),
		"firewalld, strict": actual("StrictForwardPorts=yes"),
	}
}

// isReallyStrict reports whether firewalld knows StrictForwardPorts, as from version 2.3 on.
func isReallyStrict(t *testing.T) bool {
	t.Helper()
	config := nstest.ReadIf(t, os.Getenv("TOMBOLO_MANAGERS_ROOT")+"/etc/firewalld/firewalld.conf")
	return strings.Contains(config, "StrictForwardPorts")
}

// By default Tombolo opens host ports in the firewalls that it can. With publishAdmission false it opens none, and the
// command that status and doctor print does.
func TestTheHostsFirewallAdmitsCallsOfHostPorts(t *testing.T) {
	t.Parallel()
	for name, begin := range firewalls() {
		for _, admits := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, publishAdmission %t", name, admits), func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				out := n.outside()
				do, open := begin(t, n)
				w := n.portnet(conf{"publishAdmission": admits})
				strict := name == "firewalld, strict"
				if strict { // firewalld's command redirects by itself
					w = w.with(conf{"publishFrom": outside4 + ", " + outside6})
				}
				p := n.pod("a")
				w.add(p, publish(t, "8080:80/tcp", "8081-8082:81/udp"))
				p.serve(t, "tcp", 80)
				p.serve(t, "udp", 82)
				hostReaches := !strict || !isReallyStrict(t)
				reaches := func(want bool) {
					t.Helper()
					for _, at := range []string{uplink4, uplink6} {
						for network, port := range map[string]uint16{"tcp": 8080, "udp": 8082} {
							within := map[bool]time.Duration{true: 20 * time.Second, false: 300 * time.Millisecond}[want]
							_, err := nstest.AskWithin(t, out, network, netip.AddrPortFrom(nstest.Addr(at), port), within)
							expect.That(t, (err == nil) == want, "%s at %s: %v, want an answer: %t", network, at, err, want)
						}
					}
					_, err := askPort(t, n.ns, "tcp", uplink4, 8080)
					expect.That(t, (err == nil) == hostReaches, "the host itself: %v", err)
				}
				wantPing(t, p.NS, outside4, outside6)
				admits := admits && !strict
				reaches(admits || open)
				status := n.operate("status", "--state", n.state)
				expect.Success(t, status.err())
				doctor := n.operate("doctor", "--dns", "none", "--state", n.state, "a")
				expect.Success(t, doctor.err())
				commands := regexp.MustCompile(`accepts its calls; this helps: ([^;\n]*)`).FindAllStringSubmatch(status.stdout, -1)
				expect.Equal(t, len(commands), map[bool]int{true: 0, false: 4}[admits || open], "commands of status: %s", status.stdout)
				var undo []string
				for _, command := range commands {
					expect.Contains(t, doctor.stdout, "this helps: "+command[1]+"\n")
					caller := map[bool]string{true: outside4, false: outside6}[strings.Contains(command[1], `family="ipv4"`)]
					expect.Equal(t, strings.Contains(command[1], "CALLER"), strict, "a caller in %s", command[1])
					line := strings.ReplaceAll(command[1], "CALLER", caller)
					do(line)
					line = regexp.MustCompile(`-[AI] FORWARD( \d+)?`).ReplaceAllString(line, "-D FORWARD")
					undo = append(undo, strings.NewReplacer("--add-rich-rule", "--remove-rich-rule", "route allow", "route delete allow").Replace(line))
				}
				if len(commands) > 0 {
					reaches(true)
				}
				if strict { // and the command opens no port to callers that publishFrom refuses
					_, err := askPort(t, n.far(t), "tcp", "198.51.100.1", 8080)
					expect.Failure(t, err, "a caller that is not listed")
				}
				expect.Success(t, w.check(p))
				if len(undo) > 0 && strings.HasPrefix(undo[0], "nft") || strict && !isReallyStrict(t) {
					return // nft deletes by handle, and a reload has ended the imitation
				}
				for _, line := range undo {
					do(line)
				}
				reaches(admits || open)
			})
		}
	}
}

// The recipes of docs/policy.md, in their order.
func TestRecipesOfPolicies(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.outside()
	nstest.Run(t, out, "sh", "-ec", "ip address add "+resolver4+"/24 dev eth0; ip address add 203.0.113.2/24 dev eth0")
	(&pod{NS: out}).serve(t, "tcp", 80)
	nstest.Serve(t, out, "udp", netip.MustParseAddrPort(resolver4+":53"))
	var pods []*pod
	var recipes []*network
	for _, b := range docBlocks(t) {
		if b.page != "docs/policy.md" || b.language != "json" {
			continue
		}
		fields := conf{}
		must.Succeed(t, json.Unmarshal([]byte(b.text), &fields))
		w := n.network(fields["name"].(string), fields)
		p := n.pod(w.name)
		w.add(p, publish(t, fmt.Sprintf("%d:80/tcp", 8000+len(pods))))
		p.serve(t, "tcp", 80)
		pods, recipes = append(pods, p), append(recipes, w)
	}
	must.That(t, len(pods) == 3, "%d recipes", len(pods))
	ufw := n.ufw(t)
	ufw("ufw allow 22/tcp")
	must.Succeed(t, n.operate("repair", "--state", n.state).err())
	calls := func(from *netns.NS, network, at string, port uint16, want bool) {
		t.Helper()
		within := map[bool]time.Duration{true: 20 * time.Second, false: 200 * time.Millisecond}[want]
		_, err := nstest.AskWithin(t, from, network, netip.AddrPortFrom(nstest.Addr(at), port), within)
		expect.That(t, (err == nil) == want, "%s:%d: %v, want an answer: %t", at, port, err, want)
	}

	web, db, agent := pods[0].NS, pods[1].NS, pods[2].NS
	calls(out, "tcp", uplink4, 8000, false)
	ufw("ufw route allow proto tcp from any to 10.80.0.2 port 80")
	calls(out, "tcp", uplink4, 8000, true)
	calls(out, "tcp", uplink4, 8001, true)
	calls(web, "tcp", uplink4, 8001, false)
	calls(db, "tcp", outside4, 80, false)
	for port := range uint16(3) {
		calls(n.ns, "tcp", "127.0.0.1", 8000+port, true)
		calls(agent, "tcp", uplink4, 8000+port, false)
	}
	calls(out, "tcp", uplink4, 8002, false)
	calls(agent, "tcp", outside4, 80, true)
	calls(agent, "udp", resolver4, 53, true)
	calls(agent, "tcp", resolver4, 80, false)
	calls(agent, "tcp", "10.80.0.2", 80, false)
	nstest.Run(t, out, "sh", "-ec", "ip address del 192.0.2.2/24 dev eth0; ip route add 192.0.2.1 dev eth0")
	n.run("ip", "route", "add", "203.0.113.0/24", "dev", "eth0")
	calls(out, "tcp", uplink4, 8000, true)
	calls(out, "tcp", uplink4, 8001, false)
	for i, w := range recipes {
		expect.Success(t, w.check(pods[i]))
	}
}
