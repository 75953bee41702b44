package lan

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// owner is a program by which the host's owner closes the host to others on the LAN.
type owner struct {
	*network
	t   *testing.T
	env []string
	dir string
}

// do runs a line of shell on the host.
func (o *owner) do(line string) string {
	o.t.Helper()
	return nstest.Run(o.t, o.host.ns, "env", append(o.env, "sh", "-ec", line)...)
}

// firewalld runs the real one with eth0 in the zone public, a bus and a configuration of its own. If bridged packets pass
// it, the bridge is in the zone trusted, and the host's port 81 is open.
func (n *network) firewalld(t *testing.T, bridged bool) *owner {
	t.Helper()
	for _, program := range []string{"firewalld", "firewall-cmd", "dbus-daemon"} {
		nstest.Need(t, program)
	}
	dir := must.Of(os.MkdirTemp("", "fw")).Get(t) // short: a socket's address has room for 107 bytes
	t.Cleanup(func() { os.RemoveAll(dir) })
	bus := "unix:path=" + dir + "/bus"
	write := func(name, text string) {
		must.Succeed(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
		must.Succeed(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	write("bus.conf", `<busconfig><type>session</type><listen>`+bus+`</listen><auth>EXTERNAL</auth><policy context="default">
		<allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/><allow own="*"/></policy></busconfig>`)
	write("etc/firewalld.conf", "FirewallBackend=nftables\nIPv6_rpfilter=yes\n")
	write("etc/zones/public.xml", `<zone><interface name="eth0"/><service name="ssh"/></zone>`)
	if bridged {
		write("etc/zones/public.xml", `<zone><interface name="eth0"/><port port="81" protocol="tcp"/></zone>`)
		write("etc/zones/trusted.xml", `<zone target="ACCEPT"><interface name="br0"/><forward/></zone>`)
	}
	o := &owner{n, t, []string{"DBUS_SYSTEM_BUS_ADDRESS=" + bus}, dir}
	begin := func(args ...string) {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Env = append(os.Environ(), o.env...)
		must.Succeed(t, n.host.ns.Do(cmd.Start))
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	}
	begin("dbus-daemon", "--config-file="+dir+"/bus.conf", "--nofork", "--nopidfile")
	must.Until(t, "the bus", func() bool { _, err := os.Stat(dir + "/bus"); return err == nil })
	begin("firewalld", "--nofork", "--nopid", "--system-config", dir+"/etc", "--log-target", "file", "--log-file", dir+"/log")
	must.Until(t, "firewalld", func() bool {
		_, err := nstest.Try(n.host.ns, "env", append(o.env, "firewall-cmd", "--state")...)
		return err == nil
	})
	return o
}

// ufw runs the real one with a configuration of its own, and turns it on.
func (n *network) ufw(t *testing.T) *owner {
	t.Helper()
	nstest.Need(t, "ufw")
	dir := t.TempDir()
	nstest.Run(t, nil, "cp", "-a", "/etc/ufw", dir+"/etc")
	nstest.Run(t, nil, "cp", "-a", "/etc/default", dir+"/default")
	wrapper := "#!/bin/sh\nexec unshare --mount sh -ec 'cd " + dir + "; mount --bind etc /etc/ufw; " +
		"mount --bind default /etc/default; mount -t tmpfs none /run; exec /usr/sbin/ufw \"$@\"' ufw \"$@\"\n"
	must.Succeed(t, os.WriteFile(dir+"/ufw", []byte(wrapper), 0o755))
	o := &owner{n, t, []string{"PATH=" + dir + ":" + os.Getenv("PATH")}, dir}
	o.do("ufw --force enable")
	return o
}

// servers begins those that wantLAN asks.
func (o *owner) servers(pods ...*pod) {
	o.t.Helper()
	for _, p := range []place{o.other, o.internet, pods[0].place, pods[1].place} {
		o.serve(p, servicePort, both()...)
	}
	o.serve(o.host, servicePort+1, both()...)
}

// wantLAN has everybody talk, over the families, but to ports of the host that are closed to pods as to others.
func (o *owner) wantLAN(when string, a, b place, families []int, open bool) {
	o.t.Helper()
	for _, family := range families {
		for _, pair := range [][2]place{{a, b}, {a, o.other}, {o.other, a}, {o.host, a}, {a, o.internet}, {o.internet, a}} {
			_, err := o.tryAsk(pair[0], "tcp", pair[1].at(family), servicePort, aMoment)
			expect.Success(o.t, err, "%s: %s to %s over IPv%d", when, pair[0].name, pair[1].name, family)
		}
		for _, from := range []place{a, o.other} {
			_, err := o.tryAsk(from, "tcp", o.host.at(family), servicePort+1, time.Second)
			expect.That(o.t, (err == nil) == open, "%s: %s to the host's port over IPv%d: %v, want open %t",
				when, from.name, family, err, open)
		}
	}
}

// The host's own firewall holds for pods as for other machines of the LAN, and is not in the way of what is not its own.
func TestFirewallsTakePodsForMachinesOfTheLAN(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		begin       func(n *network, t *testing.T) *owner
		open, again string
	}{
		"firewalld": {
			func(n *network, t *testing.T) *owner { return n.firewalld(t, false) },
			"firewall-cmd -q --permanent --add-port=81/tcp && firewall-cmd -q --reload",
			"firewall-cmd -q --complete-reload",
		},
		"ufw": {(*network).ufw, "ufw allow 81/tcp", "ufw reload"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newHost(t)
			l.callIPTables("0")
			n := l.network(plain(t, nil))
			o := tt.begin(n, t)
			a, b := n.add(l.newPod("a")), n.add(l.newPod("b"))
			o.servers(a, b)
			o.wantLAN("closed", a.place, b.place, both(), false)
			o.do(tt.open)
			o.wantLAN("open", a.place, b.place, both(), true)
			o.do(tt.again)
			o.wantLAN("reloaded", a.place, b.place, both(), true)
			n.check(a)
		})
	}
}

// Rules that drop what comes in by another link than the way back drop bridged frames of pods. They are named, and what
// is said to help does.
func TestReversePathRulesAreNamedWithARemedyThatHelps(t *testing.T) {
	const nixOS = `table inet nixos-fw { chain rpfilter { type filter hook prerouting priority -140; policy drop;
		meta nfproto ipv4 udp sport . udp dport { 67 . 68, 68 . 67 } accept;
		icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert, nd-router-advert } accept;
		fib saddr . mark . iif oif exists accept; }; }`
	const before = `add() { $IPTABLES -t mangle -A nixos-fw-rpfilter "$@"; }
		$IPTABLES -t mangle -N nixos-fw-rpfilter
		add -m rpfilter --validmark -j RETURN
		add -p $ICMP -j RETURN
		add -j DROP
		$IPTABLES -t mangle -A PREROUTING -j nixos-fw-rpfilter`
	for name, tt := range map[string]struct {
		begin    func(n *network, t *testing.T) *owner
		families []int // that are dropped
		rule     string
	}{
		"firewalld": {func(n *network, t *testing.T) *owner {
			return n.firewalld(t, true)
		}, []int{6}, "table inet firewalld"},
		"NixOS by nftables": {func(n *network, t *testing.T) *owner {
			l := n.lan
			l.nft(nixOS)
			return &owner{n, t, nil, ""}
		}, both(), "chain rpfilter of table inet nixos-fw"},
		"NixOS by iptables": {func(n *network, t *testing.T) *owner {
			o := &owner{n, t, nil, ""}
			o.do("IPTABLES=iptables ICMP=icmp\n" + before)
			o.do("IPTABLES=ip6tables ICMP=icmpv6\n" + before)
			return o
		}, both(), "chain nixos-fw-rpfilter of table ip"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newHost(t)
			l.callIPTables("1")
			log := filepath.Join(t.TempDir(), "log")
			n := l.network(plain(t, object{"logFile": log}))
			o := tt.begin(n, t)
			said := n.status()
			expect.Says(t, said, tt.rule, "STATUS before the first ADD")
			a, b := l.newPod("a"), l.newPod("b")
			n.add(a)
			expect.Contains(t, nstest.ReadIf(t, log), tt.rule, "the warning of the first ADD")
			n.add(b)
			o.servers(a, b)
			for _, family := range tt.families {
				_, err := l.tryAsk(l.other, "tcp", a.at(family), servicePort, time.Second)
				expect.That(t, isNoAnswer(err), "before: the LAN reaches a pod over IPv%d: %v", family, err)
			}
			_, err := n.exec("tombolo", nil, nil, "check", "--state", n.state)
			expect.Says(t, err, tt.rule, "check")
			remedies := 0
			for _, text := range strings.Split(strings.ReplaceAll(said.Error(), `\"`, `"`), "this helps: ")[1:] {
				remedy, _, _ := strings.Cut(strings.TrimSuffix(strings.TrimSpace(text), `"}`), "; chain")
				if o.dir != "" {
					remedy = strings.ReplaceAll(remedy, "/etc/firewalld", o.dir+"/etc")
				}
				o.do(strings.ReplaceAll(remedy, `\u0026`, "&"))
				remedies++
			}
			expect.That(t, remedies > 0, "no remedy in %v", said)
			o.wantLAN("after the remedy", a.place, b.place, both(), true)
			expect.Success(t, n.status(), "STATUS after the remedy")
			_, err = n.exec("tombolo", nil, nil, "check", "--state", n.state)
			expect.That(t, !strings.Contains(fmt.Sprint(err), tt.rule), "check after the remedy: %v", err)
		})
	}
}

// status is the plugin's STATUS.
func (n *network) status() error {
	n.Helper()
	_, err := n.verb("STATUS", &pod{})
	return err
}
