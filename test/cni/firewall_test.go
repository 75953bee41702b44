package cni

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// minder is a tombolod that keeps no leases.
type minder struct {
	*node
	log, socket string
	process     *exec.Cmd
}

func (m *minder) end(t *testing.T) {
	t.Helper()
	must.Succeed(t, m.process.Process.Signal(unix.SIGTERM))
	expect.Success(t, m.process.Wait(), "tombolod")
}

// mind starts tombolod on the node, and waits until it has looked at the firewall once. It does
// not see the namespaces of hidden pods.
func (n *node) mind(t *testing.T, hidden ...*pod) *minder {
	t.Helper()
	return n.mindOn(t, "unix:path="+n.state+"/no-bus", nil, hidden...)
}

// mindOn is mind with a bus and flags.
func (n *node) mindOn(t *testing.T, bus string, flags []string, hidden ...*pod) *minder {
	t.Helper()
	// Short: a socket's address has room for 107 bytes.
	dir := must.Of(os.MkdirTemp("", "m")).Get(t)
	t.Cleanup(func() { os.RemoveAll(dir) })
	m := &minder{node: n, log: filepath.Join(dir, "log"), socket: filepath.Join(dir, "s")}
	line := []string{keeperPath(), "--leases", n.state + "-leases", "--state", n.state, "--metrics", "unix:" + m.socket}
	if len(hidden) > 0 {
		line = n.blind(hidden, line...)
	}
	cmd := exec.Command(line[0], slices.Concat(line[1:], flags)...)
	cmd.Env = append(os.Environ(), "DBUS_SYSTEM_BUS_ADDRESS="+bus)
	m.process = spawn(t, n.ns, m.log, cmd)
	must.Until(t, "it looks", func() bool { return m.metric("firewall_looks_total") > 0 })
	return m
}

// metric is 0 where it cannot be had.
func (m *minder) metric(name string) int {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", m.socket)
	}}}
	r, err := client.Get("http://tombolod/metrics")
	if err != nil {
		return 0
	}
	defer r.Body.Close()
	text, _ := io.ReadAll(r.Body)
	found := regexp.MustCompile(`(?m)^tombolo_` + regexp.QuoteMeta(name) + ` (\d+)$`).FindSubmatch(text)
	if found == nil {
		return 0
	}
	value, _ := strconv.Atoi(string(found[1]))
	return value
}

func TestTombolodPutsRightWhatOthersDoToTheFirewall(t *testing.T) {
	t.Parallel()
	const drop = "iptables -A FORWARD -d 203.0.113.1 -j DROP"
	for _, tc := range []struct {
		name, before, harm string
		cut                bool // pods are, until it is put right
	}{
		{"the ruleset is flushed, and drops", "", "nft flush ruleset; iptables -P FORWARD DROP", true},
		{"our table is flushed", "iptables -P FORWARD DROP", "nft flush table inet tombolo", true},
		{"our table is deleted", "iptables -P FORWARD DROP", "nft delete table inet tombolo", true},
		{"our table is put to sleep", "iptables -P FORWARD DROP", "nft 'add table inet tombolo { flags dormant; }'", true},
		{"a policy turns to DROP", "iptables -P FORWARD ACCEPT", "iptables -P FORWARD DROP", true},
		{"our rule is deleted", "iptables -P FORWARD DROP", "iptables -D FORWARD 1", true},
		{"a drop comes behind our rule", "iptables -P FORWARD DROP", drop, false},
		{"our rule comes ahead of a drop", "iptables -P FORWARD DROP; " + drop,
			`iptables -I FORWARD -m mark --mark 0x10/0x10 -m comment --comment "tombolo: admit what table inet tombolo marks from cbr0" -j ACCEPT`, false},
		{"a program of another name calls itself ours", "iptables -P FORWARD DROP",
			"cp $(command -v nft) ./tombolo; ./tombolo flush table inet tombolo; rm tombolo", true},
	} {
		nstest.RunParallel(t, tc.name, func(t *testing.T) {
			n := newNode(t)
			n.outside()
			if tc.before != "" {
				n.run("sh", "-ec", tc.before)
			}
			w := n.podnet(nil)
			p := w.addPod("a")
			wantPing(t, p.NS, outside4)
			inDir := "cd " + t.TempDir() + "; "
			n.run("sh", "-ec", inDir+tc.harm)
			if tc.cut {
				wantNoPing(t, p.NS, outside4)
			}
			wantError(t, w.check(p), 113, "")
			// What was done before it began, it finds as well; and again while it runs.
			m := n.mind(t)
			must.Until(t, "CHECK succeeds", func() bool { return w.check(p) == nil })
			wantPing(t, p.NS, outside4)
			if strings.Contains(tc.harm, "-P FORWARD DROP") {
				n.run("iptables", "-P", "FORWARD", "ACCEPT")
				must.Until(t, "CHECK succeeds", func() bool { return w.check(p) == nil })
			}
			mends := m.metric("firewall_mends_total")
			n.run("sh", "-ec", inDir+tc.harm)
			must.Until(t, "it is put right", func() bool { return m.metric("firewall_mends_total") > mends })
			must.Until(t, "CHECK succeeds", func() bool { return w.check(p) == nil })
			wantPing(t, p.NS, outside4)
			// And then it is done: its own changes are none to it.
			mends = m.metric("firewall_mends_total")
			w.add(n.pod("b"))
			looks := m.metric("firewall_looks_total")
			n.nft("add table ip another")
			must.Until(t, "it looks", func() bool { return m.metric("firewall_looks_total") > looks })
			got := m.metric("firewall_mends_total")
			expect.That(t, got == mends, "it put something right %d times for nothing", got-mends)
		})
	}
}

func TestTombolodYieldsToAProgramThatUndoesItAgainAndAgain(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	n.run("iptables", "-P", "FORWARD", "DROP")
	w := n.podnet(nil)
	p := w.addPod("a")
	m := n.mind(t)
	expect.Success(t, w.status(), "STATUS before")
	// What it finds when it begins, nobody has undone.
	must.Until(t, "it has looked", func() bool { return m.metric("firewall_looks_total") > 0 })
	for i := 1; i <= 3; i++ {
		n.run("iptables", "-F", "FORWARD")
		must.Until(t, "it is put right", func() bool { return m.metric("firewall_mends_total") == i })
		must.Until(t, "CHECK succeeds", func() bool { return w.check(p) == nil })
	}
	must.Until(t, "it is contested", func() bool { return m.metric("firewall_contested") == 1 })
	wantError(t, w.status(), 50, "undoes firewall rules that pods need")
	wantError(t, w.status(), 50, `"iptables"`)
	got := m.metric("firewall_contests_total")
	expect.That(t, got == 1, "counted %d times", got)
	// Now it is left alone.
	n.run("iptables", "-F", "FORWARD")
	time.Sleep(3 * time.Second)
	got = m.metric("firewall_mends_total")
	expect.That(t, got == 3, "put right %d times, want 3", got)
	wantError(t, w.check(p), 113, "FORWARD")
	// An ADD needs it, and so it mends it: a fight that is not tombolod's.
	w.add(n.pod("b"))
	wantPing(t, p.NS, outside4)
	if testing.Short() || os.Getenv("TOMBOLO_LONG") == "" {
		return
	}
	must.Until(t, "it is no more contested", func() bool { return m.metric("firewall_contested") == 0 })
	expect.Success(t, w.status(), "STATUS after")
}

func TestTombolodHearsThroughAStormOfRules(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	n.run("iptables", "-P", "FORWARD", "ACCEPT")
	w := n.podnet(nil)
	p := w.addPod("a")
	m := n.mind(t)
	file := filepath.Join(t.TempDir(), "rules")
	var rules strings.Builder
	rules.WriteString("table ip storm { chain c { }; }\n")
	for i := range 10_000 {
		fmt.Fprintf(&rules, "add rule ip storm c udp dport %d counter\n", i+1)
	}
	must.Succeed(t, os.WriteFile(file, []byte(rules.String()), 0o600))
	n.run("sh", "-ec", "nft -f "+file+"; for i in $(seq 100); do echo 'add rule ip storm c counter'; done | nft -i >/dev/null; nft flush chain ip storm c; iptables -P FORWARD DROP")
	must.Until(t, "CHECK succeeds", func() bool { return w.check(p) == nil })
	wantPing(t, p.NS, outside4)
	log := nstest.ReadIf(t, m.log)
	expect.That(t, !strings.Contains(log, "cannot hear"), "%v", log)
}

func TestTombolodNamesLegacyTablesThatStopPods(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.podnet(nil)
	w.add(n.pod("a"))
	n.run("iptables-legacy", "-P", "FORWARD", "DROP")
	m := n.mind(t)
	must.Until(t, "it is counted", func() bool { return m.metric("firewall_obstacles") == 1 })
	expect.Contains(t, nstest.ReadIf(t, m.log), "iptables-legacy -A FORWARD", "not named")
}

// A FORWARD that the reference plugin makes, which is chained behind us, is no difference.
func TestCHECKBeforeTheReferenceFirewall(t *testing.T) {
	t.Parallel()
	for _, policy := range []string{"", "same-bridge"} {
		nstest.RunParallel(t, "policy="+policy, func(t *testing.T) {
			n := newNode(t)
			n.outside()
			n.searchAlso(referenceDir(t))
			w := n.podnet(nil)
			after := conf{"type": "firewall", "backend": "iptables"}
			if policy != "" {
				after["ingressPolicy"] = policy
			}
			w.after = []conf{after}
			a := w.addPod("a")
			expect.Success(t, w.check(a), "CHECK right after ADD")
			if rules := n.run("iptables", "-S"); strings.Contains(rules, "tombolo") || !strings.Contains(rules, "CNI-FORWARD") {
				t.Errorf("where nothing is dropped, there is a rule of ours, or none of the reference's:\n%s", rules)
			}
			wantPing(t, a.NS, outside4)
			// The administrator's chain counts, under both policies.
			for _, target := range []string{"ACCEPT", "DROP"} {
				n.run("iptables", "-P", "FORWARD", target)
				w.add(n.pod("b" + target))
				wantPing(t, a.NS, outside4)
				n.run("iptables", "-A", "CNI-ADMIN", "-d", outside4, "-j", "DROP")
				wantNoPing(t, a.NS, outside4)
				n.run("iptables", "-F", "CNI-ADMIN")
			}
		})
	}
}

// looksAgain waits until tombolod has begun two looks: the second one is at all that was there
// before.
func (m *minder) looksAgain(t *testing.T) {
	t.Helper()
	before := m.metric("firewall_looks_total")
	must.Until(t, "it looks", func() bool {
		m.nft("add table ip another; delete table ip another")
		return m.metric("firewall_looks_total") > before+1
	})
}

// An operator who stops everything at once, ahead of our rule, has it stopped for as long as
// that stands, whichever program looks.
func TestTombolodLeavesADropAheadOfOurRule(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, stop string
		forPods    bool // our rule is never put ahead of it
	}{
		{"of everything", "-j DROP", false},
		{"of what the bridge sends", "-i cbr0 -j DROP", true},
	} {
		nstest.RunParallel(t, tc.name, func(t *testing.T) {
			n := newNode(t)
			n.outside()
			n.run("iptables", "-P", "FORWARD", "DROP")
			w := n.podnet(nil)
			p := w.addPod("a")
			wantPing(t, p.NS, outside4)
			m := n.mind(t)
			mends := m.metric("firewall_mends_total")
			n.run("sh", "-ec", "iptables -I FORWARD "+tc.stop)
			m.looksAgain(t)
			w.add(n.pod("b"))
			const remedy = "by its rule number 1, which is left to its owner, what pods send; this helps: iptables -D FORWARD 1"
			wantError(t, w.status(), 50, remedy)
			for _, verb := range []string{"check", "repair"} {
				if o := n.operate(verb, "--state", n.state); o.status == 0 || !strings.Contains(o.stdout+o.stderr, remedy) {
					t.Errorf("tombolo %s does not name it: %+v", verb, o)
				}
			}
			// An ADD that has to build refuses; and what is flushed comes back behind the drop.
			n.nft("flush table inet tombolo")
			_, err := w.tryAdd(n.pod("c"))
			if err != nil { // unless tombolod was faster
				wantError(t, err, 117, remedy)
			}
			must.Until(t, "CHECK succeeds", func() bool { return w.check(p) == nil })
			m.looksAgain(t)
			wantNoPing(t, p.NS, outside4)
			got := m.metric("firewall_mends_total")
			expect.That(t, got <= mends+1, "it put something right %d times", got-mends)

			// Without the drop, pods pass at once; without our rules, the next ones go ahead of
			// a drop of everything.
			n.run("sh", "-ec", "iptables -D FORWARD 1")
			wantPing(t, p.NS, outside4)
			expect.Success(t, w.status(), "STATUS")
			n.run("sh", "-ec", "iptables -I FORWARD "+tc.stop+"; iptables -D FORWARD 2; iptables -D FORWARD 2")
			wantNoPing(t, p.NS, outside4)
			o := n.operate("repair", "--state", n.state)
			expect.That(t, (o.status == 0) != tc.forPods, "tombolo repair: %+v", o)
			if tc.forPods {
				wantNoPing(t, p.NS, outside4)
			} else {
				wantPing(t, p.NS, outside4)
			}
		})
	}
}
