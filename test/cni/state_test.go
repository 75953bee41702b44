package cni

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// taken remembers which pod has which address.
type taken map[netip.Addr]string

// give notes the addresses of a result, and fails the test if one has an owner.
func (g taken) give(t testing.TB, p *pod, r *current.Result) {
	t.Helper()
	for _, a := range ips(r) {
		owner, ok := g[a]
		expect.That(t, !ok, "%s was given to %s while %s has it", a, p.id, owner)
		g[a] = p.id
	}
}

func TestStateDeletedWhilePodsRunGivesNoAddressTwice(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, lose string }{
		{"all of it", "."},
		{"the reservations", "ipam"},
		{"the epoch", "epoch"},
		{"the records", "attachments"},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			n.outside()
			w := n.podnet(nil)
			has := taken{}
			old := n.pods(4)
			for _, p := range old {
				has.give(t, p, w.add(p))
			}
			must.Succeed(t, os.RemoveAll(filepath.Join(n.state, tt.lose)))
			for i := range 4 {
				p := n.pod(fmt.Sprintf("new-%d", i))
				has.give(t, p, w.add(p))
			}
			for _, p := range old {
				wantPing(t, p.NS, outside4, outside6)
				w.callOK(call{verb: "DEL", id: p.id, ifName: "eth0", stdin: w.stdin(nil)})
			}
			for i := range 4 {
				w.del(&pod{id: fmt.Sprintf("new-%d", i)})
			}
			n.wantNothing()
		})
	}
}

func TestStateDeletedAgainAndAgainUnderChurn(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(conf{"ipam": small("12")})
	has := taken{}
	var running []*pod
	for i := range 24 {
		if len(running) == 8 {
			gone := running[0]
			running = running[1:]
			w.callOK(call{verb: "DEL", id: gone.id, ifName: "eth0", stdin: w.stdin(nil)})
			for a, owner := range has {
				if owner == gone.id {
					delete(has, a)
				}
			}
		}
		if i%3 == 2 {
			must.Succeed(t, os.RemoveAll(n.state))
		}
		p := n.pod(fmt.Sprintf("pod-%d", i))
		has.give(t, p, w.add(p))
		running = append(running, p)
	}
	w.gc()
	n.wantNothing()
}

func TestStateDeletedDuringParallelADDs(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	has := taken{}
	for i := range 4 {
		p := n.pod(fmt.Sprintf("old-%d", i))
		has.give(t, p, w.add(p))
	}
	must.Succeed(t, os.RemoveAll(n.state))
	pods := n.pods(12)
	results := make(chan *current.Result, len(pods))
	atOnce(pods, func(p *pod) {
		r, err := w.tryAdd(p)
		if err != nil {
			t.Errorf("ADD of %s: %v", p.id, err)
			return
		}
		results <- r
	})
	close(results)
	for r := range results {
		has.give(t, pods[0], r)
	}
	w.gc()
	n.wantNothing()
}

// stale forges the reservation of a pod of an earlier epoch.
func stale(t *testing.T, dir, address string, age time.Duration) {
	t.Helper()
	path := filepath.Join(dir, address)
	must.Succeed(t, os.WriteFile(path, []byte("before-the-reboot\r\neth0"), 0o600))
	then := time.Now().Add(-age)
	must.Succeed(t, os.Chtimes(path, then, then))
}

// longAgo is before any machine that runs this test was started.
const longAgo = 10 * 365 * 24 * time.Hour

func TestReservationsOfAnEarlierEpochAreDropped(t *testing.T) {
	n := parallelNode(t)
	dataDir := t.TempDir()
	dir := filepath.Join(dataDir, "podnet")
	must.Succeed(t, os.Mkdir(dir, 0o755))
	ipam := small("4") // three addresses
	ipam["dataDir"] = dataDir
	w := n.podnet(conf{"ipam": ipam})
	for _, address := range []string{"10.77.0.2", "10.77.0.3", "10.77.0.4", "fd77::2"} {
		stale(t, dir, address, longAgo)
	}
	must.Succeed(t, os.WriteFile(filepath.Join(dir, ".tombolo-epoch"), []byte(`{"version":1,"epoch":"another boot/another life"}`), 0o600))
	// A pool that was full at the power cut is ready again.
	expect.Success(t, w.status())
	has := taken{}
	for _, p := range n.pods(3) {
		has.give(t, p, w.add(p))
	}
	for address, owner := range n.reservations(dir) {
		expect.That(t, owner != "before-the-reboot\r\neth0",
			"%s is still reserved for a pod of an earlier epoch", address)
	}
	wantError(t, w.status(), 50, "is full")
}

// A pod may be older than pid 1, where the plugin is called from a container that has one of its own.
func TestAReservationOfAnEarlierEpochWhosePodLivesKeepsItsOwner(t *testing.T) {
	n := parallelNode(t)
	ipam := small("4")
	ipam["dataDir"] = t.TempDir()
	w := n.podnet(conf{"ipam": ipam})
	p := n.pod("lives")
	address := ip4(w.add(p)).String()
	dir := fmt.Sprint(ipam["dataDir"], "/podnet")
	must.Succeed(t, os.RemoveAll(n.state))
	nstest.PutFile(t, dir, address, readFile(t, dir+"/"+address), time.Now().Add(-longAgo))
	nstest.PutFile(t, dir, ".tombolo-epoch", "another boot/another life")
	w.add(n.pod("next"))
	expect.Equal(t, n.reservations(dir)[address], "lives\r\neth0", "the pod with %s lives, and its reservation is", address)
}

// reborn is the node, a container itself, after its restart: with a new pid 1 and in a new network namespace.
func (n *node) reborn() *node {
	n.Helper()
	next := newNode(n.TB)
	next.state, next.by = n.state, []string{"unshare", "--pid", "--fork", "--mount-proc"}
	return next
}

func TestANodeThatIsAContainerForgetsItsPodsWhenItRestarts(t *testing.T) {
	t.Parallel()
	fields := conf{"ipam": small("2")} // one address
	n := newNode(t)
	n.portnet(fields).add(n.pod("before"), publish(t, "8080:80/tcp"))
	n = n.reborn()
	expect.Success(t, n.portnet(fields).status(), "the pool was full before the restart")
	o := n.operate("repair", "--state", n.state)
	expect.That(t, o.status == 0, "repair after the restart: %+v", o)
	_, made := links(t, n.ns)["cbr0"]
	expect.That(t, !made, "after the restart, repair has made the bridge of a network that nobody uses")
	expect.Success(t, expect.Err(n.portnet(fields).tryAdd(n.pod("next"), publish(t, "8080:80/tcp"))),
		"a pod of before the restart has its address, or its host port, still")
	left := n.records()
	expect.That(t, len(left) == 1, "after the restart and one ADD there are the records %q", left)
}

func TestReservationsOfAnUnknownEpochAreKept(t *testing.T) {
	n := parallelNode(t)
	dataDir := t.TempDir()
	dir := filepath.Join(dataDir, "podnet")
	must.Succeed(t, os.Mkdir(dir, 0o755))
	// No marker: they may be the reference's, whose pods run.
	stale(t, dir, "10.77.0.2", longAgo)
	ipam := small("4")
	ipam["dataDir"] = dataDir
	r := n.podnet(conf{"ipam": ipam}).add(n.pod("a"))
	expect.That(t, ip4(r) == nstest.Addr("10.77.0.3"), "%s was given, want the first that is free", ip4(r))
}

func TestDataDirOnDiskOutlivesTheStateDirectory(t *testing.T) {
	n := parallelNode(t)
	ipam := dualStack()
	ipam["dataDir"] = t.TempDir()
	w := n.podnet(conf{"ipam": ipam})
	has := taken{}
	a, b := n.pod("a"), n.pod("b")
	has.give(t, a, w.add(a))
	must.Succeed(t, os.RemoveAll(n.state))
	has.give(t, b, w.add(b))
	for _, p := range []*pod{a, b} {
		w.callOK(call{verb: "DEL", id: p.id, ifName: "eth0", stdin: w.stdin(nil)})
	}
	n.wantNothing()
	left := n.reservations(fmt.Sprint(ipam["dataDir"], "/podnet"))
	expect.That(t, len(left) == 0, "left: %v", left)
}

func TestRubbishInTheStateDirectoryIsNotFatal(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	a := w.addPod("a")
	for path, content := range map[string]string{
		"attachments/podnet/0123456789a.json": "rubbish", "attachments/podnet/README": "hello",
		"networks/podnet.json": "{", "networks/other.json": "rubbish", "networks/.hidden": "",
		"ipam/podnet/10.77.0.3": "", "ipam/podnet/fd77::3": "\x00\xff\r\n\r\n", "ipam/podnet/README": "hello",
		"ipam/podnet/last_reserved_ip.0": "rubbish", "ipam/podnet/last_reserved_ip.1": "",
		".tmp-rubbish": "rubbish", "README": "hello",
	} {
		must.Succeed(t, os.WriteFile(filepath.Join(n.state, path), []byte(content), 0o600))
	}
	b := n.pod("b")
	r := w.add(b)
	got := ip4(r)
	expect.That(t, got != nstest.Addr("10.77.0.2"), "%s was given twice", got)
	for _, p := range []*pod{a, b} {
		wantPing(t, p.NS, gateway4, gateway6)
		expect.Success(t, w.check(p))
	}
	expect.Success(t, w.status())
	w.gc(b)
	w.del(b)
	ports := links(t, n.ns) // lo, cbr0
	expect.That(t, len(ports) == 2, "left: %v", ports)
}

// reference is the same network as the reference's bridge plugin and host-local have
// it: what nodes come from, or go back to.
func (n *node) reference(dataDir string) *network {
	w := n.network("podnet", conf{"type": "bridge", "bridge": "cbr0", "isDefaultGateway": true, "hairpinMode": true, "stateDir": nil, "deadline": nil})
	w.version = "1.0.0"
	ipam := dualStack()
	ipam["dataDir"] = dataDir
	w.plugin["ipam"] = ipam
	return w
}

func TestNodesSwitchFromTheReferenceAndBackWithPodsRunning(t *testing.T) {
	n := parallelNode(t)
	dataDir := t.TempDir()
	dir := filepath.Join(dataDir, "podnet")
	theirs := n.reference(dataDir)
	ours := n.podnet(conf{"ipam": theirs.plugin["ipam"]})
	ours.version = "1.0.0"
	has := taken{}

	before := n.pods(2)
	for _, p := range before {
		has.give(t, p, theirs.add(p))
	}
	// Over to us: everybody reaches everybody.
	mine := []*pod{n.pod("mine-0"), n.pod("mine-1"), n.pod("mine-2")}
	var last *current.Result
	for _, p := range mine {
		last = ours.add(p)
		has.give(t, p, last)
	}
	for _, p := range append(before, mine[0]) {
		wantPing(t, p.NS, ip4(last).String(), ip6(last).String(), gateway4, gateway6)
	}
	// We release what they gave, and they what we gave.
	ours.del(before[0])
	theirs.del(mine[0])
	for address, owner := range n.reservations(dir) {
		expect.That(t, owner != before[0].id+"\r\neth0" && owner != mine[0].id+"\r\neth0",
			"%s is still reserved for %q", address, owner)
	}
	// And back.
	after := n.pod("after")
	has.give(t, after, theirs.add(after))
	wantPing(t, after.NS, ip4(last).String(), ip6(last).String(), gateway4, gateway6)
	for _, p := range []*pod{before[1], mine[1], mine[2], after} {
		theirs.del(p)
	}
	expect.NoDiff(t, cmp.Diff(map[string]string{}, n.reservations(dir)), "reservations")
	// What of ours they do not know of, GC takes.
	ours.version = "1.1.0"
	ours.gc()
	left := n.owners()
	expect.That(t, len(left) == 0, "elements are left: %v", left)
}

func TestReferenceSeesOurReservationsUnderLoad(t *testing.T) {
	n := parallelNode(t)
	theirs := n.reference(t.TempDir())
	ours := n.podnet(conf{"ipam": theirs.plugin["ipam"]})
	theirs.add(n.pod("first")) // two bridge plugins at once do not both make the bridge
	pods := n.pods(16)
	type given struct {
		p *pod
		r *current.Result
	}
	results := make(chan given, len(pods))
	side := map[string]*network{}
	for i, p := range pods {
		side[p.id] = []*network{ours, theirs}[i%2]
	}
	atOnce(pods, func(p *pod) {
		r, err := side[p.id].tryAdd(p)
		if err != nil {
			t.Errorf("ADD of %s: %v", p.id, err)
			return
		}
		results <- given{p, r}
	})
	close(results)
	has := taken{}
	for g := range results {
		has.give(t, g.p, g.r)
	}
}

// snapshot is the node, with the files of its state directory.
func (n *node) snapshot() nstest.Snapshot {
	n.Helper()
	all := nstest.Snap(n, n.ns, n.state, func(name string) bool {
		// A note for the next, a place to go on from, and which pod a gateway is there for: these
		// differ, and nothing is wrong.
		base := filepath.Base(name)
		return base == "lock" || strings.HasPrefix(base, "last_reserved_ip.") || strings.HasPrefix(name, "networks/")
	})
	// Each call that fails is counted.
	return slices.DeleteFunc(all, func(line string) bool { return strings.HasPrefix(line, "file failures/") })
}

// wantSnapshot fails the test unless the node is as it was.
func (n *node) wantSnapshot(when string, before nstest.Snapshot) {
	n.Helper()
	expect.Equal(n, before.Diff(n.snapshot()), "", "%s: the node (- before, + after)", when)
}

// A snapshot that shows nothing would be the same after anything.
func TestSnapshotShowsWhatChanges(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.podnet(conf{"guard": true})
	w.add(n.pod("a"))
	before := n.snapshot()
	n.wantSnapshot("nothing happened", before)
	for _, change := range []string{
		"ip link set cbr0 mtu 1400", "ip address add 10.9.9.9/32 dev cbr0", "ip route add 10.9.0.0/16 dev cbr0", "ip rule add from 10.9.9.9 table 7",
		"ip neighbour add 10.77.0.77 lladdr 02:00:00:00:00:01 dev cbr0 nud permanent", "tc qdisc add dev cbr0 root tbf rate 1mbit burst 10k latency 1s",
		"bridge link set dev " + w.port(&pod{id: "a"}) + " isolated on", "bridge fdb add 02:00:00:00:00:02 dev cbr0 self permanent",
		"nft add element inet tombolo masq4-podnet { 10.77.0.77 }", "nft add rule bridge tombolo guard accept",
		"sysctl -qw net.ipv4.conf.cbr0.route_localnet=1", "sysctl -qw net.ipv6.conf.cbr0.hop_limit=33",
		"touch " + n.state + "/attachments/podnet/.tmp-1", "touch " + n.state + "/ipam/podnet/10.77.0.77",
	} {
		n.run("sh", "-c", change)
		now := n.snapshot()
		expect.That(t, before.Diff(now) != "", "%s: not in the snapshot", change)
		before = now
	}
}
