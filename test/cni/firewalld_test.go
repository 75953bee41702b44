package cni

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// firewalld is the real one, on a node, with a bus and a configuration of its own.
type firewalld struct {
	*node
	dir, bus string // the bus is an address
	environ  []string
	process  *exec.Cmd
}

func (n *node) firewalld(t *testing.T) *firewalld {
	t.Helper()
	f := n.firewalldToBe(t)
	f.beginBus(t)
	f.begin(t)
	return f
}

// firewalldToBe has nothing running yet.
func (n *node) firewalldToBe(t *testing.T) *firewalld {
	t.Helper()
	for _, program := range []string{"firewalld", "firewall-cmd", "dbus-daemon", "dbus-send"} {
		nstest.Need(t, program)
	}
	dir, err := os.MkdirTemp("", "fw") // short: a socket's address has room for 107 bytes
	must.Succeed(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	bus := "unix:path=" + filepath.Join(dir, "bus")
	return &firewalld{node: n, dir: dir, bus: bus, environ: append(os.Environ(), "DBUS_SYSTEM_BUS_ADDRESS="+bus)}
}

func (f *firewalld) beginBus(t *testing.T) {
	t.Helper()
	config := `<busconfig><type>session</type><listen>` + f.bus + `</listen><auth>EXTERNAL</auth><policy context="default">
		<allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/><allow own="*"/></policy></busconfig>`
	must.Succeed(t, os.WriteFile(filepath.Join(f.dir, "bus.conf"), []byte(config), 0o644))
	f.run(t, "dbus-daemon", "--config-file="+filepath.Join(f.dir, "bus.conf"), "--nofork", "--nopidfile")
	must.Until(t, "the bus", func() bool { _, err := os.Stat(filepath.Join(f.dir, "bus")); return err == nil })
}

func (f *firewalld) configure(t *testing.T, text string) {
	t.Helper()
	err := os.Mkdir(filepath.Join(f.dir, "etc"), 0o755)
	if err == nil {
		err = os.WriteFile(filepath.Join(f.dir, "etc", "firewalld.conf"), []byte(text+"\n"), 0o644)
	}
	must.Succeed(t, err)
}

// begin begins firewalld itself, which takes up its permanent configuration.
func (f *firewalld) begin(t *testing.T) {
	t.Helper()
	line := firewalldLine("firewalld", "--nofork", "--nopid", "--system-config", filepath.Join(f.dir, "etc"), "--log-target", "console")
	f.process = f.run(t, line[0], line[1:]...)
	must.Until(t, "firewalld", func() bool {
		return slices.Equal(f.ask("org.freedesktop.DBus.Properties.Get", firewalldName, "state"), []string{"RUNNING"})
	})
}

func (f *firewalld) end(t *testing.T) {
	t.Helper()
	must.Succeed(t, f.process.Process.Signal(syscall.SIGTERM))
	f.process.Wait()
}

func (f *firewalld) run(t *testing.T, name string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Env = f.environ
	return spawn(t, f.ns, filepath.Join(f.dir, name+".out"), cmd)
}

// firewalldLine runs a program of this machine, or in the root of another Debian (test/managers.sh).
func firewalldLine(line ...string) []string {
	root := os.Getenv("TOMBOLO_MANAGERS_ROOT")
	if root == "" {
		return line
	}
	const enter = `mount --bind /tmp "$0/tmp" && mount -t proc proc "$0/proc" && exec chroot "$0" "$@"`
	return append([]string{"unshare", "--mount", "sh", "-c", enter, root}, line...)
}

// zone is the one that a link is in; empty if it is in none.
func (f *firewalld) zone(link string) string {
	return strings.Join(f.ask(firewalldName+".zone.getZoneOfInterface", link), " ")
}

const firewalldName = "org.fedoraproject.FirewallD1" // on the bus

// ask calls a method with strings, and gives the strings of the answer; none if there is an
// error. firewall-cmd, which does the same, uses a hundred times as much CPU.
func (f *firewalld) ask(method string, args ...string) []string {
	f.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	send := []string{"--bus=" + f.bus, "--print-reply=literal", "--dest=" + firewalldName, "/org/fedoraproject/FirewallD1", method}
	for _, arg := range args {
		send = append(send, "string:"+arg)
	}
	o := must.Of(f.exec(ctx, "dbus-send", nil, f.environ, send...)).Get(f)
	return slices.DeleteFunc(strings.Fields(o.stdout), func(word string) bool {
		return slices.Contains([]string{"array", "[", "]", "variant"}, word)
	})
}

// try runs a line of shell on the node, with firewalld's bus.
func (f *firewalld) try(line string) outcome {
	f.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	args := firewalldLine("/bin/sh", "-ec", line)
	return must.Of(f.exec(ctx, args[0], nil, f.environ, args[1:]...)).Get(f)
}

func (f *firewalld) do(line string) {
	f.Helper()
	must.Succeed(f, f.try(line).err(), "%s", line)
}

// What check and doctor name where the real firewalld stops pods is what stops them, and the
// command that they advise helps, and lasts.
func TestFirewalldStopsPodsUntilTheAdvisedCommand(t *testing.T) {
	t.Parallel()
	for name, lines := range map[string][]string{
		"no link is in a zone":                          nil,
		"the links are in a zone that does not forward": {"--zone=public --add-interface=eth0", "--zone=public --add-interface=cbr0", "--zone=public --remove-forward"},
		"the bridge is in a zone that drops":            {"--zone=public --add-interface=eth0", "--zone=drop --add-interface=cbr0"},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			out := n.outside()
			w := n.portnet(nil)
			a := w.addPod("a", publish(t, "8080:80/tcp"))
			a.serve(t, "tcp", 80)
			wantPing(t, a.NS, outside4, outside6)
			f := n.firewalld(t)
			for _, line := range lines {
				f.do("firewall-cmd --permanent " + line)
			}
			if len(lines) > 0 {
				f.do("firewall-cmd --reload")
			}
			wantNoPing(t, a.NS, outside4, outside6)

			const command = "firewall-cmd --permanent --zone=trusted --change-interface=cbr0 && firewall-cmd --reload"
			if o := n.operate("check", "--state", n.state); o.status != 4 || !strings.Contains(o.stdout, "table inet firewalld") || !strings.Contains(o.stdout, "this helps: "+command+" [configuration]\n") {
				t.Errorf("check: %+v", o)
			}
			o := n.operate("doctor", "--dns", "none", "--state", n.state, "a")
			if _, remedy, ok := strings.Cut(o.stdout, "\n  firewall "); o.status != 4 || !ok || !strings.Contains(remedy, "filter_FORWARD of table inet firewalld") || !strings.Contains(remedy, "this helps: "+command+"\n") {
				t.Errorf("doctor: %+v", o)
			}
			wantError(t, w.status(), 50, command)

			f.do(w.advised(t))
			for _, when := range []string{"the advised command", "a reload", "a complete reload"} {
				wantPing(t, a.NS, outside4, outside6)
				_, err := nstest.AskWithin(t, out, "tcp", netip.AddrPortFrom(nstest.Addr(uplink4), 8080), 10*time.Second)
				expect.That(t, err == nil, "after %s, the published port: %v", when, err)
				expect.Success(t, n.operate("check", "--state", n.state).err(), "check after %s", when)
				expect.Success(t, n.operate("doctor", "--dns", "none", "--state", n.state, "a").err(), "doctor after %s", when)
				f.do(fmt.Sprintf("firewall-cmd %s", map[bool]string{true: "--complete-reload", false: "--reload"}[when == "a reload"]))
			}
			expect.Success(t, w.status())
		})
	}
}

// What a policy of firewalld stops, or a zone that comes before the bridge's, doctor names by a probe. STATUS and ADD
// judge no policies.
func TestDoctorNamesWhatFirewalldStopsPodsBy(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ policy, line, chain string }{
		"a policy for one way out": {policy: `<policy priority="-1" target="DROP"><ingress-zone name="trusted"/><egress-zone name="public"/></policy>`,
			line: "firewall-cmd --zone=public --change-interface=eth0", chain: "filter_FWD_policy_shut"},
		"a policy for all": {policy: `<policy priority="-1" target="DROP"><ingress-zone name="trusted"/><egress-zone name="ANY"/></policy>`,
			chain: "filter_FWD_policy_shut"},
		"a policy's rule": {policy: `<policy priority="-1" target="CONTINUE"><ingress-zone name="trusted"/><egress-zone name="ANY"/><rule priority="-7"><drop/></rule></policy>`,
			chain: "filter_FWD_policy_shut_pre"},
		"a policy's rule by source": {policy: `<policy target="CONTINUE"><ingress-zone name="trusted"/><egress-zone name="ANY"/><rule family="ipv4"><source address="10.0.0.0/8"/><drop/></rule></policy>`,
			chain: "filter_FWD_policy_shut_deny"},
		"a policy that rejects": {policy: `<policy priority="10" target="REJECT"><ingress-zone name="ANY"/><egress-zone name="ANY"/></policy>`,
			chain: "filter_FWD_policy_shut"},
		"a zone by addresses": {line: "firewall-cmd --permanent --zone=drop --add-source=10.0.0.0/8 && firewall-cmd --reload",
			chain: "filter_FWD_drop"},
		"a zone by a set": {line: "firewall-cmd --permanent --new-ipset=ours --type=hash:net && firewall-cmd --permanent --ipset=ours --add-entry=10.0.0.0/8 && firewall-cmd --permanent --zone=internal --add-source=ipset:ours && firewall-cmd --reload",
			chain: "filter_FWD_internal"},
		"trusted with a target": {line: "firewall-cmd --permanent --zone=trusted --set-target=DROP && firewall-cmd --reload", chain: "filter_FWD_trusted"},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			n.outside()
			w := n.podnet(nil)
			f := n.firewalld(t)
			n.mindOn(t, f.bus, nil)
			must.Until(t, "firewalld is attended to", n.attendsFirewalld)
			a := w.addPod("a")
			f.inTrusted(t, "cbr0")
			wantPing(t, a.NS, outside4)
			if tc.policy != "" {
				policies := filepath.Join(f.dir, "etc", "policies")
				must.Succeed(t, os.MkdirAll(policies, 0o755))
				must.Succeed(t, os.WriteFile(filepath.Join(policies, "shut.xml"), []byte(tc.policy), 0o644))
				f.do("firewall-cmd --reload")
			}
			f.inTrusted(t, "cbr0")
			if tc.line != "" {
				f.do(tc.line)
				f.inTrusted(t, "cbr0")
			}
			wantNoPing(t, a.NS, outside4)
			var advised []string
			for _, to := range []string{"", outside4 + ":80"} {
				o := n.operate("doctor", "--dns", "none", "--to", to, "--state", n.state, "a")
				expect.That(t, o.status == 4 && strings.Contains(o.stdout, "chain "+tc.chain+" of table inet firewalld drops or rejects, by its rule number "),
					"doctor --to %q: %+v", to, o)
				advised = regexp.MustCompile(`this helps: (firewall-cmd .*)`).FindStringSubmatch(o.stdout)
				must.That(t, advised != nil, "doctor --to %q advises no command: %s", to, o.stdout)
			}
			f.do(advised[1])
			f.inTrusted(t, "cbr0")
			wantPing(t, a.NS, outside4)
		})
	}
}

// From version 1 on a zone forwards between its links: then pods pass, and nobody says otherwise.
func TestFirewalldWhoseZoneForwardsIsInNobodysWay(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.podnet(nil)
	f := n.firewalld(t)
	f.do("firewall-cmd --permanent --zone=public --add-interface=eth0 && firewall-cmd --permanent --zone=public --query-forward && firewall-cmd --reload")
	a := w.addPod("a")
	wantPing(t, a.NS, outside4, outside6)
	for _, command := range [][]string{{"check"}, {"doctor", "--dns", "none"}} {
		expect.Success(t, n.operate(append(command, "--state", n.state)...).err(), "%s", command)
	}
	expect.Success(t, w.status())
}

// inTrusted waits until the link is in firewalld's zone trusted.
func (f *firewalld) inTrusted(t *testing.T, link string) {
	t.Helper()
	must.Until(t, link+" is in the zone trusted", func() bool { return f.zone(link) == "trusted" })
}

// The runtime asks STATUS before it adds the first pod, when nothing is on record yet.
func TestBridgesJoinFirewalldsZone(t *testing.T) {
	n := parallelNode(t)
	out := n.outside()
	w := n.portnet(nil)
	f := n.firewalld(t)
	f.do("firewall-cmd --permanent --zone=public --remove-forward && firewall-cmd --reload")
	a, b := n.pod("a"), n.pod("b")

	alone := n.mindOn(t, f.bus, []string{"--firewalld=false"})
	_, err := w.tryAdd(a)
	must.That(t, err != nil, "an ADD succeeds without the zone")
	wantError(t, w.status(), 50, "--zone=trusted")
	alone.end(t)
	expect.Equal(t, f.zone("cbr0"), "", "with --firewalld=false the bridge is in zone")

	m := n.mindOn(t, f.bus, nil)
	must.Until(t, "STATUS succeeds", func() bool { return w.status() == nil })
	w.add(a, publish(t, "8080:80/tcp"))
	a.serve(t, "tcp", 80)
	for _, after := range []string{"", "firewall-cmd --reload", "firewall-cmd --complete-reload", "firewalld begins anew"} {
		switch after {
		case "":
		case "firewalld begins anew":
			f.end(t)
			f.begin(t)
		default:
			f.do(after)
		}
		f.inTrusted(t, "cbr0")
		wantPing(t, a.NS, outside4, outside6)
		_, err := nstest.AskWithin(t, out, "tcp", netip.AddrPortFrom(nstest.Addr(uplink4), 8080), 10*time.Second)
		expect.That(t, err == nil, "after %q, the published port: %v", after, err)
		for _, command := range [][]string{{"check"}, {"doctor", "--dns", "none"}} {
			expect.Success(t, n.operate(append(command, "--state", n.state)...).err(), "%s after %q", command, after)
		}
		expect.Success(t, w.status(), "after %q", after)
	}
	f.do("! firewall-cmd --permanent --get-zone-of-interface=cbr0") // it is in none
	log := nstest.ReadIf(t, m.log)
	expect.That(t, strings.Count(log, "a bridge joins a zone of firewalld") >= 2 && !strings.Contains(log, "trying again"), "log: %s", log)

	// The next tombolod undoes what this one did.
	m.end(t)
	w.add(b)
	wantPing(t, b.NS, outside4)
	w.del(a, publish(t, "8080:80/tcp"))
	w.del(b)
	must.Succeed(t, n.remove("podnet").err(), "remove")
	n.mindOn(t, f.bus, nil)
	must.Until(t, "the bridge left the zone", func() bool { return f.zone("cbr0") == "" })
}

func TestBridgesJoinAFirewalldThatComesLater(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.podnet(nil)
	f := n.firewalldToBe(t)
	m := n.mindOn(t, f.bus, nil)
	a := w.addPod("a")
	wantPing(t, a.NS, outside4)
	f.beginBus(t)
	f.begin(t)
	f.inTrusted(t, "cbr0")
	wantPing(t, a.NS, outside4, outside6)
	// A second network's, while it runs.
	second := n.network("second", conf{"bridge": "cbr1", "ipam": conf{"type": "host-local", "subnet": "10.23.0.0/16"}})
	second.add(n.pod("b"))
	if zone := f.zone("cbr1"); zone != "trusted" {
		t.Errorf("after the ADD that built the network its bridge is in zone %q; log: %s", zone, nstest.ReadIf(t, m.log))
	}
}

// While firewalld is reloaded, a table of its drops all new connections. An ADD waits for the end of that.
func TestAnADDWaitsForFirewalldsReload(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	f := n.firewalld(t)
	n.mindOn(t, f.bus, nil)
	must.Until(t, "firewalld is attended to", n.attendsFirewalld)
	w := n.podnet(nil)
	// What firewalld 1.3 has there, for as long as this test wants.
	n.nft("add table inet firewalld_policy_drop; add chain inet firewalld_policy_drop filter_forward { type filter hook forward priority 9; policy drop; };" +
		" add rule inet firewalld_policy_drop filter_forward ct state { established, related } accept")
	expect.Success(t, w.status(), "STATUS meanwhile")
	a := n.pod("a")
	added := make(chan error)
	go func() { _, err := w.tryAdd(a); added <- err }()
	f.inTrusted(t, "cbr0") // the ADD has seen that table
	n.nft("delete table inet firewalld_policy_drop")
	must.Succeed(t, <-added, "ADD")
	wantPing(t, a.NS, outside4, outside6)
}

func TestAnOperatorsZoneOfFirewalldStays(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	f := n.firewalldToBe(t)
	// So a reload keeps what runs, and with it what we did.
	f.configure(t, "FlushAllOnReload=no")
	f.beginBus(t)
	f.begin(t)
	f.do("firewall-cmd --permanent --zone=block --add-interface=permanent")
	m := n.mindOn(t, f.bus, nil)
	must.Until(t, "firewalld is attended to", n.attendsFirewalld)
	add := func(bridge, subnet string) error {
		w := n.network(bridge, conf{"bridge": bridge, "ipam": conf{"type": "host-local", "subnet": subnet}})
		_, err := w.tryAdd(n.pod(bridge))
		return err
	}
	wantError(t, add("permanent", "10.1.0.0/16"), 117, "--zone=trusted --change-interface=permanent")
	f.do("firewall-cmd --zone=drop --add-interface=running")
	f.do("firewall-cmd --zone=public --add-interface=managed") // as network managers do
	for bridge, subnet := range map[string]string{"running": "10.2.0.0/16", "managed": "10.3.0.0/16", "free": "10.4.0.0/16"} {
		err := add(bridge, subnet)
		expect.That(t, err == nil || bridge == "running", "%s: %v", bridge, err)
	}
	f.inTrusted(t, "managed")
	f.inTrusted(t, "free")
	f.do("firewall-cmd --permanent --zone=drop --add-interface=free; firewall-cmd --zone=block --change-interface=managed; firewall-cmd --reload")
	must.Until(t, "the free bridge goes where it is put", func() bool { return f.zone("free") == "drop" })
	must.Until(t, "it is seen", func() bool { return strings.Count(nstest.ReadIf(t, m.log), "stays in the zone") == 3 })
	for bridge, want := range map[string]string{"running": "drop", "permanent": "block", "managed": "block", "free": "drop"} {
		expect.Equal(t, f.zone(bridge), want, "%s is in zone", bridge)
	}
}

// What firewalld closes to a bridge in no zone it closes to one that tombolod put into the zone trusted, and to no other.
func TestTheZoneTrustedOpensNoBridgeOfOthers(t *testing.T) {
	t.Parallel()
	for kind, lines := range map[string]string{
		"bridge": "ip link add virbr1 up type bridge; ip link set wire1 master virbr1; ip address add 172.17.0.1/16 dev virbr1; ip address add fd17::1/64 dev virbr1 nodad",
		"veth": `ip link set wire1 down name virbr1; ip link set virbr1 up; ip address add 172.17.0.1/32 dev virbr1; ip address add fd17::1/128 dev virbr1 nodad
			ip route add 172.17.0.2 dev virbr1; ip route add fd17::2 dev virbr1`,
	} {
		nstest.RunParallel(t, kind, func(t *testing.T) {
			n := newNode(t)
			n.outside()
			machine, stranger := nstest.New(t), nstest.New(t)
			nstest.Veth(t, n.ns, "wire1", machine, "eth0")
			nstest.Veth(t, n.ns, "wire2", stranger, "eth0")
			n.run("sh", "-ec", lines+`
				ip link add other up type bridge; ip link set wire2 master other; ip address add 172.18.0.1/16 dev other; ip address add fd18::1/64 dev other nodad
				echo 1 >/proc/sys/net/ipv4/ip_forward; echo 1 >/proc/sys/net/ipv6/conf/all/forwarding`)
			for ns, subnet := range map[*netns.NS]string{machine: "17", stranger: "18"} {
				nstest.Run(t, ns, "sh", "-ec", strings.ReplaceAll(`ip address add 172.NN.0.2/16 dev eth0; ip address add fdNN::2/64 dev eth0 nodad
					ip route add default via 172.NN.0.1; ip route add default via fdNN::1`, "NN", subnet))
			}
			const theirs4, theirs6 = "172.17.0.2", "fd17::2"
			f := n.firewalld(t)
			f.do("firewall-cmd --permanent --zone=internal --add-interface=virbr1 && firewall-cmd --reload")
			w := n.portnet(conf{"ipMasq": true})
			m := n.mindOn(t, f.bus, nil)
			must.Until(t, "firewalld is attended to", n.attendsFirewalld)
			a := w.addPod("a", publish(t, "8080:80/tcp"))
			f.inTrusted(t, "cbr0")

			closed := func(when string) {
				t.Helper()
				t.Log(when)
				wantNoPing(t, a.NS, theirs4, theirs6)
				wantNoPing(t, stranger, theirs4, theirs6)
				wantPing(t, a.NS, outside4, outside6)
				wantPing(t, machine, "172.17.0.1", "fd17::1")
			}
			open := func(when string) {
				t.Helper()
				must.Until(t, when+": the way is open", func() bool {
					return nstest.Ping(t, a.NS, nstest.Addr(theirs4)) == nil && nstest.Ping(t, a.NS, nstest.Addr(theirs6)) == nil
				})
			}
			closed("after the ADD")
			// What the owner of a machine publishes is reached.
			at := nstest.Serve(t, machine, "tcp", netip.AddrPortFrom(nstest.Addr(theirs4), 0))
			n.run("iptables-nft", "-t", "nat", "-A", "PREROUTING", "-d", uplink4, "-p", "tcp", "--dport", "81", "-j", "DNAT", "--to-destination", at.String())
			_, err := nstest.AskWithin(t, a.NS, "tcp", netip.AddrPortFrom(nstest.Addr(uplink4), 81), time.Minute)
			expect.Success(t, err, "a port that the machine's owner publishes")

			f.do("firewall-cmd --reload")
			f.inTrusted(t, "cbr0")
			closed("after a reload")
			n.nft("delete table inet tombolo")
			must.Until(t, "the rules are back", func() bool { return w.check(a) == nil })
			closed("after a flush")
			m.end(t)
			n.nft("delete table inet tombolo")
			must.Succeed(t, n.operate("repair", "--state", n.state).err(), "repair")
			closed("after a repair without tombolod")
			f.end(t)
			n.mindOn(t, f.bus, nil)
			open("without firewalld")
			f.begin(t)
			f.inTrusted(t, "cbr0")
			closed("with a firewalld that began anew")
			// The operator's choice.
			f.do("firewall-cmd --permanent --zone=trusted --add-interface=cbr0 && firewall-cmd --reload")
			open("in a zone that the operator chose")
		})
	}
}

// attendsFirewalld says whether a tombolod says so to ADDs.
func (n *node) attendsFirewalld() bool {
	for _, name := range n.files(n.state) {
		if filepath.Base(name) == "firewalld.lock" {
			return true
		}
	}
	return false
}

// A node in a container may have got its host's bus.
func TestAFirewalldOfAnotherNetworkNamespaceIsLeftAlone(t *testing.T) {
	t.Parallel()
	host, n := newNode(t), newNode(t)
	f := host.firewalld(t)
	n.mindOn(t, f.bus, nil)
	host.mindOn(t, f.bus, nil)
	w := n.podnet(conf{"bridge": "inner"})
	w.add(n.pod("a"))
	host.podnet(nil).add(host.pod("b"))
	f.inTrusted(t, "cbr0")
	expect.Equal(t, f.zone("inner"), "", "the other node's bridge is in zone")
}

// A bus that accepts connections and never answers keeps tombolod from nothing.
func TestABusThatNeverAnswersIsInNobodysWay(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	n.run("iptables", "-P", "FORWARD", "DROP")
	f := n.firewalldToBe(t)
	listener := must.Of(net.Listen("unix", strings.TrimPrefix(f.bus, "unix:path="))).Get(t)
	defer listener.Close()
	w := n.podnet(nil)
	a := n.pod("a")
	m := n.mindOn(t, f.bus, nil)
	conn, err := listener.Accept() // it waits for an answer from here on
	must.Succeed(t, err)
	defer conn.Close()
	w.add(a)
	n.nft("flush table inet tombolo")
	must.Until(t, "the firewall is put right", func() bool { return m.metric("firewall_mends_total") > 0 })
	must.Until(t, "CHECK succeeds", func() bool { return w.check(a) == nil })
	wantPing(t, a.NS, outside4)
	m.end(t)
}

// The name firewall has no part in it: the bridge is in the zone, and no pod's address is. Another zone is the
// operator's to put the bridge into.
func TestFirewallByNameLeavesFirewalldToTheBridge(t *testing.T) {
	t.Parallel()
	s := newSide(t, referenceDir(t), byName())
	s.outside()
	f := s.firewalld(t)
	s.bus = f.bus
	s.mindOn(t, f.bus, nil)
	must.Until(t, "firewalld is attended to", s.attendsFirewalld)
	list := []string{`{"type":"bridge","bridge":"cni0","isGateway":true,"ipMasq":true,"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.1.0/24","routes":[{"dst":"0.0.0.0/0"}]}}`, `{"type":"firewall","backend":"firewalld"}`}
	s.chain("ADD", "a", list)
	for range 2 {
		f.inTrusted(t, "cni0")
		wantPing(t, s.of("a").NS, outside4)
		sources := f.ask(firewalldName+".zone.getSources", "trusted")
		expect.That(t, len(sources) == 0, "sources: %q", sources)
		s.chain("CHECK", "a", list)
		f.do("firewall-cmd --reload")
	}
	conf := `{"cniVersion":"1.0.0","name":"net","stateDir":"STATE","prevResult":` + s.results["a"] + `,"type":"firewall","firewalldZone":"internal"}`
	o := s.call(verb{plugin: "firewall", verb: "ADD", id: "a", conf: conf})
	if e := failure(o.stdout); e == nil || e.Code != 7 || !strings.Contains(e.Msg, "firewall-cmd --permanent --zone=ZONE --change-interface=BRIDGE") {
		t.Errorf("ADD with another zone: %+v", o)
	}
	s.chain("DEL", "a", list)
}
