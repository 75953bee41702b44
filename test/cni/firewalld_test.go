package cni

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// firewalld is the real one, on a node, with a bus and a configuration of its own.
type firewalld struct {
	*node
	dir, bus string // the bus is an address
	environ  []string
	process  *exec.Cmd
}

// firewalld begins one.
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
		need(t, program)
	}
	dir, err := os.MkdirTemp("", "fw") // short: a socket's address has room for 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	bus := "unix:path=" + filepath.Join(dir, "bus")
	return &firewalld{node: n, dir: dir, bus: bus, environ: append(os.Environ(), "DBUS_SYSTEM_BUS_ADDRESS="+bus)}
}

func (f *firewalld) beginBus(t *testing.T) {
	t.Helper()
	config := `<busconfig><type>session</type><listen>` + f.bus + `</listen><auth>EXTERNAL</auth><policy context="default">
		<allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/><allow own="*"/></policy></busconfig>`
	if err := os.WriteFile(filepath.Join(f.dir, "bus.conf"), []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	f.run(t, "dbus-daemon", "--config-file="+filepath.Join(f.dir, "bus.conf"), "--nofork", "--nopidfile")
	f.until(t, "the bus", func() bool { _, err := os.Stat(filepath.Join(f.dir, "bus")); return err == nil })
}

// configure writes firewalld.conf.
func (f *firewalld) configure(t *testing.T, text string) {
	t.Helper()
	err := os.Mkdir(filepath.Join(f.dir, "etc"), 0o755)
	if err == nil {
		err = os.WriteFile(filepath.Join(f.dir, "etc", "firewalld.conf"), []byte(text+"\n"), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// begin begins firewalld itself, which takes up its permanent configuration.
func (f *firewalld) begin(t *testing.T) {
	t.Helper()
	f.process = f.run(t, "firewalld", "--nofork", "--nopid", "--system-config", filepath.Join(f.dir, "etc"), "--log-target", "file", "--log-file", filepath.Join(f.dir, "log"))
	f.until(t, "firewalld", func() bool {
		return slices.Equal(f.ask("org.freedesktop.DBus.Properties.Get", firewalldName, "state"), []string{"RUNNING"})
	})
}

func (f *firewalld) end(t *testing.T) {
	t.Helper()
	if err := f.process.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	f.process.Wait()
}

func (f *firewalld) run(t *testing.T, name string, args ...string) *exec.Cmd {
	t.Helper()
	out, err := os.Create(filepath.Join(f.dir, name+".out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd := exec.Command(name, args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = f.environ, out, out
	if err := f.ns.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			t.Logf("%s: %s%s", name, readFileIf(t, out.Name()), readFileIf(t, filepath.Join(f.dir, "log")))
		}
	})
	return cmd
}

func (f *firewalld) until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	c := &cluster{TB: t}
	c.until(what, ok)
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
	o, err := f.exec(ctx, "dbus-send", nil, f.environ, send...)
	if err != nil {
		f.Fatal(err)
	}
	return slices.DeleteFunc(strings.Fields(o.stdout), func(word string) bool {
		return slices.Contains([]string{"array", "[", "]", "variant"}, word)
	})
}

// try runs a line of shell on the node, with firewalld's bus.
func (f *firewalld) try(line string) outcome {
	f.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	o, err := f.exec(ctx, "/bin/sh", nil, f.environ, "-ec", line)
	if err != nil {
		f.Fatal(err)
	}
	return o
}

func (f *firewalld) do(line string) {
	f.Helper()
	if o := f.try(line); o.status != 0 {
		f.Fatalf("%s: %+v", line, o)
	}
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
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			out := n.outside()
			w := n.portnet(nil)
			a := n.pod("a")
			w.add(a, publish(t, "8080:80/tcp"))
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
				if _, err := nstest.AskWithin(t, out, "tcp", netip.AddrPortFrom(nstest.Addr(uplink4), 8080), 10*time.Second); err != nil {
					t.Errorf("after %s, the published port: %v", when, err)
				}
				if o := n.operate("check", "--state", n.state); o.status != 0 {
					t.Errorf("check after %s: %+v", when, o)
				}
				if o := n.operate("doctor", "--dns", "none", "--state", n.state, "a"); o.status != 0 {
					t.Errorf("doctor after %s: %+v", when, o)
				}
				f.do(fmt.Sprintf("firewall-cmd %s", map[bool]string{true: "--complete-reload", false: "--reload"}[when == "a reload"]))
			}
			if err := w.status(); err != nil {
				t.Error(err)
			}
		})
	}
}

// A policy of firewalld stops pods whose bridge is in the zone trusted. tombolod does nothing about it; check, doctor
// and STATUS name it, and the command that they advise has it let these pods pass.
func TestAPolicyOfFirewalldStopsPodsUntilTheAdvisedCommand(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.outside()
	w := n.portnet(nil)
	f := n.firewalld(t)
	m := n.mindOn(t, f.bus, nil)
	m.until(t, "firewalld is attended to", n.attendsFirewalld)
	a := n.pod("a")
	w.add(a, publish(t, "8080:80/tcp"))
	a.serve(t, "tcp", 80)
	wantPing(t, a.NS, outside4, outside6)
	// A zone with two bridges lets packets pass from one to the other.
	second := n.network("second", conf{"bridge": "cbr2", "ipam": conf{"type": "host-local", "subnet": "10.24.0.0/16"}})
	c := n.pod("c")
	second.add(c)
	policies := filepath.Join(f.dir, "etc", "policies")
	if err := os.MkdirAll(policies, 0o755); err != nil {
		t.Fatal(err)
	}
	shut := func(policy string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(policies, "shut.xml"), []byte(policy), 0o644); err != nil {
			t.Fatal(err)
		}
		f.do("firewall-cmd --reload")
		f.inTrusted(t, "cbr0")
		f.inTrusted(t, "cbr2")
	}
	const what = "by the policy shut, which is left to its owner, what pods send"
	// One for one way out is its owner's affair, and pods may have another. Only doctor names it, since
	// the pod does not reach the router.
	shut(`<policy priority="-1" target="DROP"><ingress-zone name="trusted"/><egress-zone name="public"/></policy>`)
	f.do("firewall-cmd --zone=public --change-interface=eth0")
	wantNoPing(t, a.NS, outside4, outside6)
	if err := w.status(); err != nil {
		t.Errorf("with a policy for one way out: %v", err)
	}
	o := n.operate("doctor", "--dns", "none", "--state", n.state, "a")
	if _, remedy, ok := strings.Cut(o.stdout, what); o.status != 4 || !ok || !strings.Contains(remedy, "firewall-cmd --permanent --policy=shut --add-rich-rule=") {
		t.Errorf("doctor: %+v", o)
	} else {
		_, command, _ := strings.Cut(remedy, "this helps: ")
		command, _, _ = strings.Cut(command, "\n")
		f.do(command)
		f.do("firewall-cmd --zone=public --change-interface=eth0")
		wantPing(t, a.NS, outside4)
	}

	for _, policy := range []string{ // as firewall-cmd writes them
		`<policy priority="-1" target="DROP"><ingress-zone name="trusted"/><egress-zone name="ANY"/></policy>`,
		`<policy priority="-1" target="CONTINUE"><ingress-zone name="trusted"/><egress-zone name="ANY"/><rule priority="-7"><drop/></rule></policy>`,
		`<policy priority="10" target="DROP"><ingress-zone name="trusted"/><egress-zone name="ANY"/></policy>`,
		`<policy priority="10" target="REJECT"><ingress-zone name="ANY"/><egress-zone name="ANY"/></policy>`,
	} {
		shut(policy)
		wantNoPing(t, a.NS, outside4, outside6)

		const helps = "this helps: firewall-cmd --permanent --policy=shut --add-rich-rule="
		for _, command := range [][]string{{"check"}, {"doctor", "--dns", "none", "a"}} {
			if o := n.operate(append(command, "--state", n.state)...); o.status != 4 || !strings.Contains(o.stdout, what) || !strings.Contains(o.stdout, helps) {
				t.Errorf("%s with %s: %+v", command, policy, o)
			}
		}
		wantError(t, w.status(), 50, what+"; "+helps)
		f.do(w.advised(t))
		f.inTrusted(t, "cbr2")
		f.do(second.advised(t))
		f.inTrusted(t, "cbr0")
		f.inTrusted(t, "cbr2")
		wantPing(t, a.NS, outside4, outside6)
		wantPing(t, c.NS, outside4)
		if _, err := nstest.AskWithin(t, out, "tcp", netip.AddrPortFrom(nstest.Addr(uplink4), 8080), 10*time.Second); err != nil {
			t.Errorf("with %s, the published port: %v", policy, err)
		}
		if err := w.status(); err != nil {
			t.Errorf("with %s: %v", policy, err)
		}
		for _, command := range [][]string{{"check"}, {"doctor", "--dns", "none", "a"}} {
			if o := n.operate(append(command, "--state", n.state)...); o.status != 0 {
				t.Errorf("%s with %s, after the advised command: %+v", command, policy, o)
			}
		}
	}

	// The policy counts for other networks still, and the ADD that builds one says so. (One for a zone firewalld takes
	// out for a moment while a link joins that, in which an ADD may look.)
	other := n.network("other", conf{"bridge": "cbr1", "ipam": conf{"type": "host-local", "subnet": "10.23.0.0/16"}})
	_, err := other.tryAdd(n.pod("b"))
	wantError(t, err, 117, "source address=10.23.0.0/16 accept")
}

// A zone that has the pods' addresses comes before trusted, which the bridge has joined, and that zone may have got
// another target. STATUS, check and doctor say so, ADD fails, and the command that they advise helps.
func TestAZoneOfFirewalldStopsPodsWhateverZoneTheBridgeIsIn(t *testing.T) {
	t.Parallel()
	for zone, line := range map[string]string{
		"drop":     "firewall-cmd --permanent --zone=drop --add-source=10.0.0.0/8",
		"internal": "firewall-cmd --permanent --new-ipset=ours --type=hash:net && firewall-cmd --permanent --ipset=ours --add-entry=10.0.0.0/8 && firewall-cmd --permanent --zone=internal --add-source=ipset:ours",
		"trusted":  "firewall-cmd --permanent --zone=trusted --set-target=DROP",
	} {
		t.Run(zone, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.outside()
			w := n.podnet(nil)
			f := n.firewalld(t)
			n.mindOn(t, f.bus, nil).until(t, "firewalld is attended to", n.attendsFirewalld)
			a := n.pod("a")
			w.add(a)
			f.inTrusted(t, "cbr0")
			wantPing(t, a.NS, outside4, outside6)
			f.do(line + " && firewall-cmd --reload")
			f.inTrusted(t, "cbr0")
			wantNoPing(t, a.NS, outside4)

			want := "by the zone " + zone
			for _, command := range [][]string{{"check"}, {"doctor", "--dns", "none", "a"}} {
				if o := n.operate(append(command, "--state", n.state)...); o.status != 4 || !strings.Contains(o.stdout, want) || !strings.Contains(o.stdout, "--add-ingress-zone="+zone+" && ") {
					t.Errorf("%s: %+v", command, o)
				}
			}
			wantError(t, w.status(), 50, want)
			other := n.network("other", conf{"bridge": "cbr1", "ipam": conf{"type": "host-local", "subnet": "10.23.0.0/16"}})
			_, err := other.tryAdd(n.pod("b"))
			wantError(t, err, 117, want)

			f.do(w.advised(t))
			f.inTrusted(t, "cbr0")
			wantPing(t, a.NS, outside4, outside6)
			// The other network's bridge may be about to join again, for which firewalld takes policies out.
			f.until(t, "STATUS succeeds after the advised command, and check finds nothing", func() bool {
				return w.status() == nil && n.operate("check", "--state", n.state).status == 0
			})
			for _, command := range [][]string{{"check"}, {"doctor", "--dns", "none", "a"}} {
				if o := n.operate(append(command, "--state", n.state)...); o.status != 0 {
					t.Errorf("%s, after the advised command: %+v", command, o)
				}
			}
		})
	}
}

// From version 1 on a zone forwards between its links: then pods pass, and nobody says otherwise.
func TestFirewalldWhoseZoneForwardsIsInNobodysWay(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.outside()
	w := n.podnet(nil)
	f := n.firewalld(t)
	f.do("firewall-cmd --permanent --zone=public --add-interface=eth0 && firewall-cmd --permanent --zone=public --query-forward && firewall-cmd --reload")
	a := n.pod("a")
	w.add(a)
	wantPing(t, a.NS, outside4, outside6)
	for _, command := range [][]string{{"check"}, {"doctor", "--dns", "none"}} {
		if o := n.operate(append(command, "--state", n.state)...); o.status != 0 {
			t.Errorf("%s: %+v", command, o)
		}
	}
	if err := w.status(); err != nil {
		t.Error(err)
	}
}
