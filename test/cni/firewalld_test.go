package cni

import (
	"context"
	"fmt"
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
	f.process = f.run(t, "firewalld", "--nofork", "--nopid", "--system-config", filepath.Join(f.dir, "etc"), "--log-target", "console")
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
	return must.Of(f.exec(ctx, "/bin/sh", nil, f.environ, "-ec", line)).Get(f)
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
