package cni

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// These tests do what docs/kubenet.md says, with its own configurations, and the scripts of
// deploy/kubenet that it names.

const kubenetDoc = "../../docs/kubenet.md"

// codeBlocks gives the blocks of a language in the document.
func codeBlocks(t testing.TB, language string) []string {
	t.Helper()
	text := must.Of(os.ReadFile(kubenetDoc)).Get(t)
	var list []string
	for _, m := range regexp.MustCompile("(?ms)^```"+language+"\n(.*?)^```$").FindAllStringSubmatch(string(text), -1) {
		list = append(list, m[1])
	}
	return list
}

// move is a node that goes from the reference plugins to Tombolo, or back.
type move struct {
	*node
	dataDir      string // of both
	ours, theirs *network
	has          taken
	results      map[string]*current.Result // by the pods' IDs
}

// newMove makes a node with the document's two configurations, the reference's by one
// of its back ends. Its FORWARD policy is DROP.
func newMove(t testing.TB, backend string) *move {
	t.Helper()
	for _, program := range []string{"iptables", "ip6tables", "nft", "awk"} {
		nstest.Need(t, program)
	}
	m := &move{node: newNode(t), dataDir: t.TempDir(), has: taken{}, results: map[string]*current.Result{}}
	m.searchAlso(referenceDir(t))
	m.run("iptables", "-P", "FORWARD", "DROP")
	m.run("ip6tables", "-P", "FORWARD", "DROP")
	for _, block := range codeBlocks(t, "json") {
		var list struct {
			CNIVersion, Name string
			Plugins          []conf
		}
		unmarshal(t, block, &list)
		w := m.network(list.Name, list.Plugins[0])
		w.version, w.after = list.CNIVersion, list.Plugins[1:]
		w.plugin["ipam"].(map[string]any)["dataDir"] = m.dataDir
		if w.plugin["type"] == "tombolo" {
			m.ours = w
			continue
		}
		delete(w.plugin, "stateDir")
		w.plugin["ipMasqBackend"] = backend
		for _, p := range w.after {
			switch p["type"] {
			case "portmap":
				p["backend"] = backend
			case "firewall":
				p["backend"] = "iptables" // all it has, but for firewalld
			}
		}
		m.theirs = w
	}
	must.That(t, m.ours != nil && m.theirs != nil, "%s lacks a configuration", kubenetDoc)
	return m
}

// referenceDir is where bridge, and with it the other plugins of the reference are.
func referenceDir(t testing.TB) string {
	t.Helper()
	bridge := must.Of(filepath.EvalSymlinks(filepath.Join(cniPath, "bridge"))).Get(t)
	dir := filepath.Dir(bridge)
	for _, name := range []string{"portmap", "firewall", "bandwidth"} {
		_, err := os.Stat(filepath.Join(dir, name))
		must.That(t, err == nil, "%v: bench/build.sh builds it, and %s names the directory", err, peersVar)
	}
	return dir
}

// elsewhere is another network of the reference's, with a bridge of its own.
func (m *move) elsewhere() *network {
	ipam := hostLocal("10.78.0.0/24")
	ipam["dataDir"] = m.dataDir
	w := m.theirs.with(conf{"bridge": "cni0", "ipam": ipam, "stateDir": nil})
	w.name = "elsewhere"
	return w
}

// script runs one of the document's scripts on the node, with the node's directories.
func (m *move) script(name string, args ...string) {
	m.Helper()
	text := must.Of(os.ReadFile("../../deploy/kubenet/" + name)).Get(m)
	script := strings.NewReplacer(
		"/var/lib/cni/networks", m.dataDir, "/run/tombolo", m.state, "/opt/cni/bin/tombolo", plugin(),
	).Replace(string(text))
	o, err := m.exec(context.Background(), "/bin/sh", nil, os.Environ(), append([]string{"-c", script, name}, args...)...)
	must.Succeed(m, err)
	must.That(m, o.status == 0 && o.stderr == "", "%s: exit status %d\n%s%s", name, o.status, o.stdout, o.stderr)
}

// start adds a pod with a host port and limits.
func (m *move) start(w *network, id string, hostPort int) *pod {
	m.Helper()
	p := m.pod(id)
	r := w.add(p, m.wishes(hostPort)...)
	m.has.give(m, p, r)
	m.results[id] = r
	return p
}

func (m *move) wishes(hostPort int) []option {
	m.Helper()
	return []option{publish(m, fmt.Sprintf("%d:80/tcp", hostPort)), limited(1e9, 1e9)}
}

// wantFree fails the test if a pod's addresses are reserved. They may be given again.
func (m *move) wantFree(p *pod) {
	m.Helper()
	for _, owner := range m.reservations(filepath.Join(m.dataDir, "kubenet")) {
		expect.That(m, !strings.HasPrefix(owner, p.id+"\r\n"), "an address of %s is still reserved", p.id)
	}
	for _, a := range ips(m.results[p.id]) {
		delete(m.has, a)
	}
}

// wantReach fails the test unless pods reach the gateway, the outside through the
// policy of DROP, and each other.
func (m *move) wantReach(pods ...*pod) {
	m.Helper()
	for _, p := range pods {
		wantPing(m, p.NS, gateway4, gateway6, outside4, outside6)
		for _, other := range pods {
			if other == p {
				continue // the reference leaves loopback to a plugin of its own
			}
			wantPing(m, p.NS, ip4(m.results[other.id]).String(), ip6(m.results[other.id]).String())
		}
	}
}

// wantHostPort fails the test unless a host port leads to its pod, which serves. It
// is called by the node: through a policy of DROP the reference's lets nobody else in.
func (m *move) wantHostPort(port int) {
	m.Helper()
	for _, at := range []string{uplink4, uplink6} {
		expect.Success(m, expect.Err(askPort(m, m.ns, "tcp", at, port)), "host port %d at %s", port, at)
	}
}

// wantNoHostPort fails the test if a host port leads to a program that answers.
func (m *move) wantNoHostPort(port int) {
	m.Helper()
	for _, at := range []string{uplink4, uplink6} {
		to := netip.AddrPortFrom(nstest.Addr(at), uint16(port)).String()
		must.Succeed(m, m.ns.Do(func() error {
			conn, err := net.DialTimeout("tcp", to, 150*time.Millisecond)
			if err != nil {
				return nil // as it should be
			}
			m.Errorf("host port %d at %s answers", port, at)
			return conn.Close()
		}))
	}
}

// foreign are the lines that iptables and nft show of the reference's for a pod: by
// its ID, and by its addresses in the firewall plugin's chain.
func (m *move) foreign(p *pod) []string {
	m.Helper()
	var found []string
	for _, command := range [][]string{
		{"iptables-save"}, {"ip6tables-save"},
		{"nft", "list", "tables"},
	} {
		out := m.run(command[0], command[1:]...)
		for line := range strings.Lines(out) {
			family, ok := strings.CutPrefix(strings.TrimSpace(line), "table ")
			if ok && strings.Contains(family, " cni_") {
				out += m.run("nft", append([]string{"list", "table"}, strings.Fields(family)...)...)
			}
		}
		for line := range strings.Lines(out) {
			byAddress := slices.ContainsFunc(ips(m.results[p.id]), func(a netip.Addr) bool {
				return strings.HasPrefix(line, "-A CNI-FORWARD ") && strings.Contains(line, " "+a.String()+"/")
			})
			if byAddress || strings.Contains(line, p.id) {
				found = append(found, strings.TrimSpace(line))
			}
		}
	}
	return found
}

// wantNothingForeign fails the test if anything of the reference's is left.
func (m *move) wantNothingForeign() {
	m.Helper()
	all := m.run("iptables-save") + m.run("ip6tables-save") + m.run("nft", "list", "tables") + m.run("ip", "link", "show")
	for _, mark := range []string{"CNI-", "cni_", "bwp"} {
		expect.That(m, !strings.Contains(all, mark), "%s is left in:\n%s", mark, all)
	}
}

// end takes a pod's namespace away, as a runtime does after the DEL, and waits for a
// link to go with it. Nothing may serve in the pod.
func (m *move) end(p *pod, link string) {
	m.Helper()
	_, ok := links(m, m.ns)[link]
	must.That(m, ok, "%s is gone before its namespace", link)
	gone := watchLinks(m, m.ns)
	vanish(m, p.path)
	p.NS.Close()
	gone.wait(link)
}

func TestNodeMovesFromTheReferenceWithPodsRunning(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"iptables", "nftables"} {
		nstest.RunParallel(t, backend, func(t *testing.T) {
			m := newMove(t, backend)
			out := m.outside()
			first, second := m.start(m.theirs, "old-first", 8080), m.start(m.theirs, "old-second", 8081)
			other := m.start(m.elsewhere(), "other", 8090) // of a network that stays theirs
			fresh := m.start(m.ours, "new", 8082)
			m.wantReach(first, second, fresh)
			second.serve(t, "tcp", 80)
			fresh.serve(t, "tcp", 80)
			m.wantHostPort(8081)
			m.wantHostPort(8082)

			// We DEL a pod of theirs.
			veth := m.results[first.id].Interfaces[1].Name
			m.ours.del(first, m.wishes(8080)...)
			m.wantFree(first)
			m.end(first, veth)
			expect.That(t, len(m.foreign(first)) > 0, "the document says that rules of theirs stay, and there are none")
			again := m.haunted(out, first)
			for _, p := range []*pod{second, fresh} { // they knew another MAC there
				nstest.Run(t, p.NS, "ip", "neigh", "flush", "all")
			}
			kept := append(m.foreign(second), m.foreign(other)...)
			m.script("forget-gone-pods.sh")
			left := m.foreign(first)
			expect.That(t, len(left) == 0, "left of the pod that is gone: %q", left)
			diff := cmp.Diff(kept, append(m.foreign(second), m.foreign(other)...))
			expect.That(t, len(kept) != 0 && diff == "", "what the pods that run have of theirs (-before +after):\n%s", diff)
			got := seenAs(t, again.NS, out, outside4)
			expect.That(t, got == ip4(m.results[again.id]).String(), "the outside sees %s, and the pod's address is not to be masqueraded", got)
			m.wantNoHostPort(8080)
			for port := 8081; port <= 8083; port++ {
				m.wantHostPort(port)
			}
			m.wantReach(second, fresh, again)
			// A second run finds nothing to do.
			before := m.run("nft", "list", "ruleset")
			m.script("forget-gone-pods.sh", m.dataDir)
			expect.NoDiff(t, cmp.Diff(uncounted(before), uncounted(m.run("nft", "list", "ruleset"))), "the second run")

			m.ours.del(second, m.wishes(8081)...)
			m.wantFree(second)
			m.script("forget-reference.sh")
			m.wantNothingForeign()
			m.wantReach(fresh, again)
			for _, at := range []string{uplink4, uplink6} {
				for _, port := range []int{8082, 8083} {
					expect.Success(t, expect.Err(askPort(t, out, "tcp", at, port)), "from outside, %d at %s", port, at)
				}
			}
			for _, p := range []*pod{fresh, again} {
				expect.Success(t, m.ours.check(p))
				m.ours.del(p)
				m.wantFree(p)
			}
			if left := m.owners(); len(left) > 1 { // the network's own
				t.Errorf("elements are left: %q", left)
			}
		})
	}
}

// haunted adds a pod that has the addresses of one that is gone, and shows what the
// document says of the rules that the reference left: they lead the old host port, 8080,
// to it, and masquerade what it sends. A host port that the pod has itself is its own.
func (m *move) haunted(out *netns.NS, gone *pod) *pod {
	m.Helper()
	nstest.Run(m, out, "ip", "route", "add", subnet4, "via", uplink4)
	old := m.results[gone.id]
	w := m.ours.with(conf{
		"nonMasqueradeCIDRs": []string{"10.0.0.0/8", "192.0.2.0/24"},
		"ipam":               only(m.dataDir, ip4(old), ip6(old)),
	})
	p := m.start(w, "again", 8083)
	p.serve(m, "tcp", 80)
	diff := cmp.Diff(ips(old), ips(m.results[p.id]), cmpopts.EquateComparable(netip.Addr{}))
	must.That(m, diff == "", "the new pod's addresses (-want +got):\n%s", diff)
	m.wantHostPort(8080)
	m.wantHostPort(8083)
	expect.Equal(m, seenAs(m, p.NS, out, outside4), uplink4, "the outside sees")
	return p
}

var counters = regexp.MustCompile(`packets \d+ bytes \d+`)

func uncounted(rules string) string { return counters.ReplaceAllString(rules, "") }

func TestNodeGoesBackToTheReferenceWithPodsRunning(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"iptables", "nftables"} {
		nstest.RunParallel(t, backend, func(t *testing.T) {
			m := newMove(t, backend)
			m.outside()
			first, second := m.start(m.ours, "old-first", 8080), m.start(m.ours, "old-second", 8081)
			fresh := m.start(m.theirs, "new", 8082)
			m.wantReach(first, second, fresh)
			second.serve(t, "tcp", 80)
			fresh.serve(t, "tcp", 80)
			m.wantHostPort(8081)
			m.wantHostPort(8082)

			// They DEL a pod of ours.
			m.theirs.del(first, m.wishes(8080)...)
			m.wantFree(first)
			_, ok := links(t, m.ns)[m.ours.port(first)]
			expect.That(t, !ok, "the pod's port is there after the DEL")
			hash := strings.TrimPrefix(m.ours.port(first), "veth")
			if left := m.of(hash); len(left) == 0 || !slices.Contains(left, "link ifb"+hash) {
				t.Errorf("the document says that elements, a record and the link ifb%s stay: %q", hash, left)
			}
			kept := m.of(strings.TrimPrefix(m.ours.port(second), "veth"))
			m.script("forget-tombolo-pods.sh")
			left := m.of(hash)
			expect.That(t, len(left) == 0, "left of the pod that is gone: %q", left)
			diff := cmp.Diff(kept, m.of(strings.TrimPrefix(m.ours.port(second), "veth")))
			expect.That(t, len(kept) > 0 && diff == "", "what the pod that runs has (-before +after):\n%s", diff)
			again := m.start(m.theirs, "again", 8080)
			again.serve(t, "tcp", 80)
			for port := 8080; port <= 8082; port++ {
				m.wantHostPort(port)
			}
			m.wantReach(second, fresh, again)

			m.theirs.del(second, m.wishes(8081)...)
			m.wantFree(second)
			m.script("forget-tombolo-pods.sh")
			m.script("forget-tombolo.sh")
			all := m.run("nft", "list", "ruleset")
			expect.That(t, !strings.Contains(all, "tombolo"), "tombolo is left in:\n%s", all)
			for name := range links(t, m.ns) {
				expect.That(t, !strings.HasPrefix(name, "ifb"), "%s is left", name)
			}
			_, err := os.Stat(m.state)
			expect.That(t, os.IsNotExist(err), "%s is left: %v", m.state, err)
			m.wantReach(fresh, again)
			m.wantHostPort(8080)
			m.wantHostPort(8082)
		})
	}
}

// of are the traces of an attachment, of which links have their names only.
func (m *move) of(hash string) []string {
	m.Helper()
	var list []string
	for _, trace := range m.traces() {
		if strings.Contains(trace, hash) {
			name, _, _ := strings.Cut(trace, " tombolo:")
			list = append(list, name)
		}
	}
	return list
}

// TestNextADDTakesOverFromAPodThatTheReferenceDeleted needs no script: the dead pod's
// host port and addresses are wanted again.
func TestNextADDTakesOverFromAPodThatTheReferenceDeleted(t *testing.T) {
	t.Parallel()
	for name, same := range map[string]struct{ port, address bool }{
		"its host port": {port: true}, "its addresses": {address: true}, "both": {true, true},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			m := newMove(t, "nftables")
			m.outside()
			if same.address {
				m.ours.plugin["ipam"] = only(m.dataDir, nstest.Addr("10.77.0.99"), nstest.Addr("fd77::99"))
			}
			dead := m.start(m.ours, "dead", 8080)
			stays := m.start(m.theirs, "stays", 8081)
			m.theirs.del(dead, m.wishes(8080)...)
			m.wantFree(dead)
			port := 8082
			if same.port {
				port = 8080
			}
			next := m.start(m.ours, "next", port)
			next.serve(t, "tcp", 80)
			m.wantHostPort(port)
			m.wantReach(next, stays)
			// Nor does it come back, when all pods' elements are made again.
			m.nft("delete table inet tombolo")
			// What is left is what the dead pod holds still.
			if o := m.operate("repair", "--state", m.state); o.status != 4 || strings.Count(o.stdout, "left:") != 1 || !strings.Contains(o.stdout, "left: container dead, eth0") {
				t.Errorf("repair: exit status %d: %s%s", o.status, o.stdout, o.stderr)
			}
			m.wantHostPort(port)
			m.wantReach(next, stays)
			m.ours.del(next)
			hash := strings.TrimPrefix(m.ours.port(dead), "veth")
			for _, owner := range m.owners() {
				expect.That(t, !strings.Contains(owner, hash), "%s is left", owner)
			}
		})
	}
}

// only is an ipam section with one address of each family.
func only(dataDir string, ip4, ip6 netip.Addr) conf {
	set := func(subnet string, address netip.Addr) []any {
		return []any{conf{"subnet": subnet, "rangeStart": address.String(), "rangeEnd": address.String()}}
	}
	return conf{"type": "host-local", "dataDir": dataDir, "ranges": []any{set(subnet4, ip4), set(subnet6, ip6)}}
}

// TestNeitherGivesWhatTheOtherGave fills a small pool by turns, again and again, each
// DELeting what the other added.
func TestNeitherGivesWhatTheOtherGave(t *testing.T) {
	t.Parallel()
	const size = 6
	n := newNode(t)
	theirs := n.reference(t.TempDir())
	ipam := small(fmt.Sprint(1 + size))
	ipam["dataDir"] = theirs.plugin["ipam"].(conf)["dataDir"]
	theirs.plugin["ipam"] = ipam
	ours := n.podnet(conf{"ipam": ipam})
	ours.version = theirs.version
	by := []*network{theirs, ours}
	has := taken{}
	pods := n.pods(3 * size)
	running := []*pod{}
	for i, p := range pods {
		if len(running) == size {
			for _, w := range by {
				if r, err := w.tryAdd(n.pod("too-many")); err == nil {
					t.Fatalf("the pool is full, and %v was given", ips(r))
				}
			}
			// The oldest, whose other plugin's turn it is: 6 before this one.
			gone := running[0]
			running = running[1:]
			by[(i+1)%2].del(gone)
			for a, owner := range has {
				if owner == gone.id {
					delete(has, a)
				}
			}
		}
		has.give(t, p, by[i%2].add(p))
		running = append(running, p)
	}
	for i, p := range running {
		by[i%2].del(p)
	}
	left := n.reservations(filepath.Join(fmt.Sprint(ipam["dataDir"]), "podnet"))
	expect.That(t, len(left) == 0, "left: %v", left)
}

// TestRemoveLeavesTheGatewaysToOthersPods has the last pod of Tombolo's go first.
func TestRemoveLeavesTheGatewaysToOthersPods(t *testing.T) {
	t.Parallel()
	m := newMove(t, "nftables")
	mine, stays := m.start(m.ours, "mine", 8080), m.start(m.theirs, "stays", 8081)
	m.ours.del(mine)
	o := m.operate("remove", "--state", m.state, "kubenet")
	must.That(t, o.status == 0, "exit status %d: %s", o.status, o.stderr)
	wantPing(t, stays.NS, gateway4, gateway6)
	m.theirs.del(stays, m.wishes(8081)...)
	again := m.start(m.ours, "again", 8080)
	m.ours.del(again)
	o = m.operate("remove", "--state", m.state, "kubenet")
	must.That(t, o.status == 0, "exit status %d: %s", o.status, o.stderr)
	_, there := links(t, m.ns)["cbr0"]
	expect.That(t, !there, "without others' pods the bridge is left")
}

// TestGCFreesTheReferencesPodsThatAreNotOnItsList is another warning.
func TestGCFreesTheReferencesPodsThatAreNotOnItsList(t *testing.T) {
	t.Parallel()
	m := newMove(t, "nftables")
	mine, theirs := m.start(m.ours, "mine", 8080), m.start(m.theirs, "theirs", 8081)
	m.ours.version = "1.1.0"
	owners := func() string { return fmt.Sprint(m.reservations(filepath.Join(m.dataDir, "kubenet"))) }
	m.ours.gc(mine, theirs)
	if got := owners(); strings.Count(got, "mine") != 2 || strings.Count(got, "theirs") != 2 {
		t.Errorf("with both on the list: %s", got)
	}
	m.ours.gc(mine)
	got := owners()
	expect.That(t, strings.Count(got, "mine") == 2 && !strings.Contains(got, "theirs"), "with Tombolo's alone: %s", got)
}
