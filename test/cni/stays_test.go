package cni

import (
	"net/netip"
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

// operatorsDrop is what an operator does to a node with two pods, a and b.
type operatorsDrop struct {
	name    string
	before  string // the node's layout; POD is a's address in each
	do      string
	undo    string
	all     bool // b is cut off, too
	refused bool // an ADD says so
}

// What an operator drops stays dropped, whichever program looks at the firewall next; and pods pass again once the
// drop is gone.
func TestWhatAnOperatorDropsStaysDropped(t *testing.T) {
	t.Parallel()
	const policy = "iptables -P FORWARD DROP; "
	for _, d := range []operatorsDrop{
		{name: "behind our rule", before: policy, do: "iptables -A FORWARD -s POD -j DROP", undo: "iptables -D FORWARD -s POD -j DROP"},
		{name: "before our rule", before: policy, do: "iptables -I FORWARD -j DROP", undo: "iptables -D FORWARD 1", all: true, refused: true},
		{name: "in DOCKER-USER", before: policy + "iptables -N DOCKER-USER; iptables -A DOCKER-USER -j RETURN; iptables -I FORWARD -j DOCKER-USER",
			do: "iptables -I DOCKER-USER -s POD -j DROP", undo: "iptables -D DOCKER-USER 1"},
		{name: "in DOCKER-USER without a return, behind our rule", before: policy + "iptables -N DOCKER-USER; iptables -A FORWARD -j DOCKER-USER",
			do: "iptables -A DOCKER-USER -s POD -j DROP", undo: "iptables -F DOCKER-USER"},
		{name: "in CNI-ADMIN", before: policy + "iptables -N CNI-FORWARD; iptables -N CNI-ADMIN; iptables -A CNI-FORWARD -j CNI-ADMIN; iptables -A FORWARD -j CNI-FORWARD",
			do: "iptables -A CNI-ADMIN -s POD -j DROP", undo: "iptables -F CNI-ADMIN"},
		{name: "before a closing reject", before: "iptables -A FORWARD -j REJECT", do: "iptables -I FORWARD 2 -s POD -j DROP", undo: "iptables -D FORWARD -s POD -j DROP"},
		{name: "by ufw, which denies", before: "ufw", do: "ufw route deny from POD", undo: "ufw route delete deny from POD"},
		{name: "by ufw, which rejects", before: "ufw; ufw default reject routed", do: "ufw route reject from POD", undo: "ufw route delete reject from POD"},
	} {
		nstest.RunParallel(t, d.name, func(t *testing.T) {
			for _, by := range []string{"ADD", "repair", "keeper"} {
				t.Run(by, func(t *testing.T) { t.Parallel(); d.staysDropped(t, by) })
			}
		})
	}
}

func (d operatorsDrop) staysDropped(t *testing.T, by string) {
	n := newNode(t)
	out := n.outside()
	nstest.Serve(t, out, "tcp4", netip.MustParseAddrPort("0.0.0.0:80"))
	reaches := func(p *pod, want bool) { // ufw lets all pings pass
		t.Helper()
		within := map[bool]time.Duration{false: noAnswer, true: patience}[want]
		_, err := nstest.AskWithin(t, p.NS, "tcp", netip.AddrPortFrom(nstest.Addr(outside4), 80), within)
		expect.That(t, (err == nil) == want, "%s reaches the outside: %v, want %v: %v", p.id, err == nil, want, err)
	}
	run := func(line string) { t.Helper(); n.run("sh", "-ec", line) }
	if before, ok := strings.CutPrefix(d.before, "ufw"); ok {
		do := n.ufw(t)
		run = func(line string) { t.Helper(); do(line) }
		d.before = strings.TrimPrefix(before, "; ")
	}
	if d.before != "" {
		run(d.before)
	}
	w := n.podnet(nil)
	a, b := n.pod("a"), n.pod("b")
	pod := w.add(a).IPs[0].Address.IP.String()
	w.add(b)
	reaches(a, true)
	reaches(b, true)
	more := 0
	look := map[string]func(){
		"ADD": func() {
			more++
			_, err := w.tryAdd(n.pod(strings.Repeat("m", more)))
			must.That(t, err == nil || d.refused, "%v", err)
		},
		"repair": func() {
			o := n.operate("repair", "--state", n.state)
			must.That(t, o.status == 0 || d.refused, "repair: %+v", o)
		},
	}[by]
	if by == "keeper" {
		m := n.mind(t)
		look = func() { m.looksAgain(t) }
	}
	for range 2 {
		run(strings.ReplaceAll(d.do, "POD", pod))
		if rules := n.run("iptables", "-S"); strings.Contains(d.do, "POD") {
			must.That(t, strings.Contains(rules, pod), "%s made no rule: %s", d.do, rules)
		}
		look()
		reaches(a, false)
		if !d.all {
			reaches(b, true)
		}
		run(strings.ReplaceAll(d.undo, "POD", pod))
		reaches(a, true)
		look()
		reaches(a, true)
	}
}

// A chain of nf_tables that drops all is named, and an ADD refuses; one with an accept of the operator's lets pods
// pass, or may drop them, which only a packet can tell.
func TestAChainOfNftablesWithAndWithoutTheOperatorsAccept(t *testing.T) {
	t.Parallel()
	const chain = "add table inet filter; add chain inet filter forward { type filter hook forward priority filter; policy drop; }; add rule inet filter forward ct state established,related accept; "
	const may = "chain forward of table inet filter may drop what pods send; this finds out: tombolo doctor POD --to ADDR:PORT\n"
	for name, tc := range map[string]struct {
		rules  string
		passes bool
		says   string // what check does, with status 0
	}{
		"without":             {rules: chain},
		"for the bridge":      {rules: chain + "add rule inet filter forward iifname cbr0 accept", passes: true},
		"for the pods":        {rules: chain + "add rule inet filter forward ip saddr 10.77.0.0/16 accept", passes: true, says: may},
		"for another program": {rules: chain + "add rule inet filter forward tcp dport 4444 accept", says: may},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			n.outside()
			w := n.podnet(nil)
			a := w.addPod("a")
			wantPing(t, a.NS, outside4)
			n.nft(tc.rules)
			const drops = "chain forward of table inet filter drops, by its policy, what pods send; this helps: nft add rule inet filter forward 'meta mark"
			m := n.mind(t)
			n.nft("flush table inet tombolo")
			must.Until(t, "it is put right", func() bool { return m.metric("firewall_mends_total") > 0 })
			n.nft("flush table inet tombolo") // so that the ADD has to build
			_, err := w.tryAdd(n.pod("b"))
			o := n.operate("repair", "--state", n.state)
			if certain := !tc.passes && tc.says == ""; certain {
				if err != nil { // unless tombolod was faster
					wantError(t, err, 117, drops)
				}
				wantError(t, w.status(), 50, drops)
				expect.That(t, o.status == 4 && strings.Contains(o.stdout, drops), "repair: %+v", o)
				o := n.operate("check", "--state", n.state)
				expect.That(t, o.status == 4 && strings.Contains(o.stdout, drops), "check: %+v", o)
				must.Until(t, "tombolod counts it", func() bool { return m.metric("firewall_obstacles") == 1 })
			} else {
				if err != nil || o.status != 0 || w.status() != nil {
					t.Errorf("ADD: %v, repair: %+v, STATUS: %v", err, o, w.status())
				}
				if o := n.operate("check", "--state", n.state); o.status != 0 || strings.Count(o.stdout, "\n") != 1+strings.Count(tc.says, "\n") || !strings.Contains(o.stdout, tc.says) {
					t.Errorf("check: %+v", o)
				}
			}
			if tc.passes {
				wantPing(t, a.NS, outside4)
			} else {
				wantNoPing(t, a.NS, outside4)
			}
		})
	}
}

// One network's removal leaves the rule of all in place, and the gateway that another has too. The last one's takes them.
func TestRemovalOfANetworkLeavesWhatOthersShare(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	n.run("iptables", "-P", "FORWARD", "DROP")
	w := n.podnet(nil)
	a, b := n.pod("a"), n.pod("b")
	w.add(a)
	for _, fields := range []conf{
		{"bridge": "cbr1", "ipam": hostLocal("10.23.0.0/16")},
		{"bridge": "cbr0", "ipam": fixed(conf{"address": "10.77.0.9/24", "gateway": gateway4})},
	} {
		second := n.network("second", fields)
		second.add(b)
		second.del(b)
		must.Succeed(t, n.remove("second").err(), "remove")
		wantPing(t, a.NS, outside4, gateway4)
	}
	w.del(a)
	must.Succeed(t, n.remove("podnet").err(), "remove")
	rules := n.run("iptables", "-S", "FORWARD")
	expect.That(t, !strings.Contains(rules, "tombolo"), "left: %s", rules)
}

// An operator's chain for the plugin firewall counts although nothing had made FORWARD yet when the pod came, and
// one that comes later is called by check's and repair's doing.
func TestAnOperatorsChainCountsBeforeThereIsFORWARD(t *testing.T) {
	t.Parallel()
	for name, line := range map[string]string{
		"at boot":         "nft 'add table ip filter; add chain ip filter CNI-ADMIN; add rule ip filter CNI-ADMIN ip saddr 10.5.1.0/24 counter drop'",
		"later":           "",
		"by its own name": "iptables -N CNI-ADMIN; iptables -A CNI-ADMIN -s 10.5.1.0/24 -j DROP",
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			s := newSide(t, referenceDir(t), byName())
			s.outside()
			nstest.Sysctl(t, s.ns, "net/bridge/bridge-nf-call-iptables", "0")
			if line != "" {
				s.run("sh", "-ec", line)
			}
			list := []string{`{"type":"bridge","bridge":"cni0","isGateway":true,"ipMasq":true,"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.1.0/24","routes":[{"dst":"0.0.0.0/0"}]}}`, `{"type":"firewall"}`}
			s.chain("ADD", "a", list)
			a := s.of("a").NS
			reaches := func() bool { return nstest.PingWith(t, a, nstest.Addr(outside4), nstest.Echo{Wait: noAnswer}) == nil }
			if name == "later" {
				must.That(t, reaches(), "the pod is cut off before the operator says so")
				s.run("sh", "-ec", "nft 'add table ip filter; add chain ip filter CNI-ADMIN; add rule ip filter CNI-ADMIN ip saddr 10.5.1.0/24 counter drop'")
				o := s.operate("check", "--state", s.state)
				expect.That(t, o.status == 4 && strings.Contains(o.stdout, "which calls CNI-ADMIN, is missing [repair]"), "check: %+v", o)
				expect.Success(t, s.operate("repair", "--state", s.state).err(), "repair")
			}
			if reaches() {
				t.Errorf("what the operator drops passes:\n%s", s.run("nft", "list", "table", "ip", "filter"))
			}
			expect.Success(t, s.operate("check", "--state", s.state).err(), "check")
			s.run("iptables", "-S") // it can print what is there
			s.run("iptables", "-D", "CNI-ADMIN", "1")
			expect.That(t, reaches(), "the pod is cut off without a drop")
			s.run("iptables", "-P", "FORWARD", "DROP")
			s.chain("ADD", "b", list)
			expect.That(t, reaches(), "the pod is cut off by the policy")
			s.run("iptables", "-A", "CNI-ADMIN", "-s", "10.5.1.0/24", "-j", "DROP")
			expect.That(t, !reaches(), "what the operator drops passes, under a policy of DROP")
		})
	}
}

// A doctor that is killed leaves nothing: its table goes with its socket.
func TestAKilledDoctorLeavesNothing(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.podnet(nil)
	w.add(n.pod("a"))
	before := n.run("nft", "list", "tables")
	monitor := exec.Command("nft", "monitor")
	heard := &strings.Builder{}
	monitor.Stdout = heard
	must.Succeed(t, n.ns.Do(monitor.Start))
	waited := make(chan error)
	go func() { waited <- monitor.Wait() }()
	cmd := exec.Command(command(), "doctor", "--dns", "none", "--to", outside4+":80", "--state", n.state, "a")
	cmd.Env = append(os.Environ(), "CNI_COMMAND=")
	must.Succeed(t, n.ns.Do(cmd.Start))
	must.Until(t, "it makes a table", func() bool { return strings.Contains(n.run("nft", "list", "tables"), "tombolo-doctor") })
	cmd.Process.Kill()
	cmd.Wait()
	expect.Equal(t, n.run("nft", "list", "tables"), before, "left")
	monitor.Process.Kill()
	<-waited
	// By that name the keeper knows that the change is none to look at.
	expect.Contains(t, heard.String(), "(tombolo-doctor)", "the kernel names it otherwise: %s", heard)
}

// An operator may drop all that is forwarded in the chain that comes first: no later ADD and no repair goes ahead of it.
func TestAnOperatorsChainMayDropAll(t *testing.T) {
	t.Parallel()
	s := newSide(t, referenceDir(t), byName())
	s.outside()
	list := func(bridge, subnet string) []string {
		return []string{`{"type":"bridge","isGateway":true,"ipMasq":true,"bridge":"` + bridge + `","ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"` + subnet + `","routes":[{"dst":"0.0.0.0/0"}]}}`, `{"type":"firewall"}`}
	}
	s.chain("ADD", "a", list("cni0", "10.5.1.0/24"))
	s.run("sh", "-ec", "iptables -N CNI-ADMIN || true; iptables -A CNI-ADMIN -j DROP")
	cut := func(when string) {
		t.Helper()
		if err := nstest.PingWith(t, s.of("a").NS, nstest.Addr(outside4), nstest.Echo{Wait: noAnswer}); err == nil {
			t.Errorf("%s: what the operator drops passes:\n%s", when, s.run("iptables", "-S"))
		}
	}
	s.operate("repair", "--state", s.state)
	cut("after a repair")
	s.run("iptables", "-A", "FORWARD", "-j", "ACCEPT")
	s.operate("repair", "--state", s.state)
	cut("after another one")
	s.call(verb{plugin: "bridge", verb: "ADD", id: "b", conf: `{"cniVersion":"1.0.0","name":"other","stateDir":"STATE",` + list("cni1", "10.5.2.0/24")[0][1:]})
	cut("after an ADD of another network")
	s.run("iptables", "-F", "CNI-ADMIN")
	s.operate("repair", "--state", s.state)
	wantPing(t, s.of("a").NS, outside4)
}

// ufwWrapper runs the real ufw with a configuration of its own.
const ufwWrapper = `#!/bin/sh
exec unshare --mount sh -ec 'cd "$0"; mount --bind etc /etc/ufw; mount --bind default /etc/default; mount -t tmpfs none /run; exec /usr/sbin/ufw "$@"' DIR "$@"
`

// ufw gives a way to run lines of shell on the node, in which ufw is one that is on.
func (n *node) ufw(t *testing.T) (do func(line string) string) {
	t.Helper()
	nstest.Need(t, "ufw")
	dir := t.TempDir()
	n.run("cp", "-a", "/etc/ufw", filepath.Join(dir, "etc"))
	n.run("cp", "-a", "/etc/default", filepath.Join(dir, "default"))
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "ufw"), []byte(strings.ReplaceAll(ufwWrapper, "DIR", dir)), 0o755))
	do = func(line string) string { return n.run("sh", "-ec", "PATH="+dir+":$PATH; "+line) }
	do("ufw --force enable")
	return do
}

// What ufw's user denies stops pods, and stays. doctor names the rule, and ufw has to forget it.
func TestUfwStopsPodsUntilItsUserDeletesTheRule(t *testing.T) {
	n := parallelNode(t)
	out := n.outside()
	nstest.Serve(t, out, "tcp4", netip.MustParseAddrPort("0.0.0.0:80"))
	nstest.Serve(t, out, "tcp6", netip.MustParseAddrPort("[::]:80"))
	w := n.portnet(nil)
	a := w.addPod("a")
	ufw := n.ufw(t)
	reaches := func(when, at string, want bool) {
		t.Helper()
		within := 300 * time.Millisecond
		if want {
			within = 10 * time.Second
		}
		_, err := nstest.AskWithin(t, a.NS, "tcp", netip.AddrPortFrom(nstest.Addr(at), 80), within)
		expect.That(t, (err == nil) == want, "%s: %s: %v", when, at, err)
	}
	n.operate("repair", "--state", n.state) // ufw's policy is DROP
	for rule, alone := range map[string]string{
		"deny from any": "", "reject in on cbr0 log-all comment mine": "", "deny in on cbr0 from fd00::/8": outside6,
	} {
		ufw("ufw route " + rule)
		for _, at := range []string{outside4, outside6} {
			reaches(rule, at, alone != "" && at != alone)
			o := n.operate("doctor", "--dns", "none", "--to", netip.AddrPortFrom(nstest.Addr(at), 80).String(), "--state", n.state, "a")
			if stopped := alone == "" || at == alone; stopped != (o.status == 4) ||
				stopped && (!strings.Contains(o.stdout, "-user-forward of table ip") || !strings.Contains(o.stdout, "see what it is made from: ufw status numbered, and ufw delete NUMBER")) {
				t.Errorf("%s: doctor about %s: %+v", rule, at, o)
			}
		}
		// There a rule is deleted by its words.
		ufw("ufw route delete " + strings.TrimSuffix(strings.Replace(rule, "log-all", "log-all from any", 1), " comment mine") + "; ufw reload")
		n.operate("repair", "--state", n.state) // tombolod's part
		for _, at := range []string{outside4, outside6} {
			reaches("after "+rule+" is deleted", at, true)
		}
		expect.Success(t, w.status(), "after %s", rule)
	}
}
