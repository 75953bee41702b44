package cni

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// blind is a command in a mount namespace without propagation, where no pod's path leads
// anywhere.
func (n *node) blind(pods []*pod, command ...string) []string {
	n.Helper()
	unshare := must.Of(exec.LookPath("unshare")).Get(n)
	var umount strings.Builder
	for _, p := range pods {
		umount.WriteString("umount " + p.path + "; ")
	}
	return append([]string{unshare, "--mount", "--propagation", "private", "sh", "-ec", umount.String() + `exec "$@"`, "sh"}, command...)
}

// kills takes a pod away without a DEL, and waits until its port is gone.
func (w *network) kills(t *testing.T, p *pod) {
	t.Helper()
	gone := watchLinks(t, w.ns)
	vanish(t, p.path)
	p.NS.Close()
	gone.wait(w.port(p))
}

// gcCommand runs tombolo gc, and gives the containers that it names.
func (n *node) gcCommand(pods []*pod, args ...string) (ids []string, status int) {
	n.Helper()
	line := append([]string{command(), "gc", "--json", "--state", n.state}, args...)
	if pods != nil {
		line = n.blind(pods, line...)
	}
	o := must.Of(n.exec(context.Background(), line[0], nil, os.Environ(), line[1:]...)).Get(n)
	var list []struct{ ContainerID string }
	must.That(n, json.Unmarshal([]byte(o.stdout), &list) == nil,
		"tombolo gc: status %d, %q, %s", o.status, o.stdout, o.stderr)
	for _, one := range list {
		ids = append(ids, one.ContainerID)
	}
	slices.Sort(ids)
	return ids, o.status
}

func TestTomboloGCReclaimsDeadPodsAndNoOthers(t *testing.T) {
	n := parallelNode(t)
	w := n.portnet(conf{"ipam": small("4")})
	dead, alive, hidden := n.pod("dead"), n.pod("alive"), n.pod("hidden")
	w.add(dead, publish(t, "8080:80/tcp"))
	w.add(alive)
	w.add(hidden)
	before := n.traces()
	// Nothing is to be seen of any namespace, and all live.
	ids, status := n.gcCommand([]*pod{dead, alive, hidden})
	expect.That(t, len(ids) == 0 && status == 0, "gc where no path leads anywhere: %v, status %d", ids, status)
	n.wantTraces(before)
	w.kills(t, dead)
	o := n.remove("podnet")
	expect.That(t, o.status == 3 && strings.Contains(o.stderr, "tombolo gc reclaims 1 attachment"), "remove: status %d, %s", o.status, o.stderr)
	if o := n.operate("gc", "--dry-run", "--state", n.state, "podnet"); o.status != 0 || !strings.Contains(o.stdout, "dead") || !strings.Contains(o.stdout, "to be reclaimed") {
		t.Errorf("dry run: status %d, %s%s", o.status, o.stdout, o.stderr)
	}
	if ids, _ := n.gcCommand([]*pod{alive, hidden}); !slices.Equal(ids, []string{"dead"}) {
		t.Errorf("gc names %v", ids)
	}
	left := strings.Join(n.traces(), "\n")
	expect.That(t, !strings.Contains(left, strings.TrimPrefix(w.port(dead), "veth")), "left of the dead pod:\n%s", left)
	next := w.addPod("next", publish(t, "8080:80/tcp"))
	for _, p := range []*pod{alive, hidden} {
		expect.Success(t, w.check(p))
	}
	// A runtime may have named another pod's namespace as that one's was.
	w.kills(t, next)
	must.Succeed(t, os.WriteFile(next.path, nil, 0o600))
	must.Succeed(t, unix.Mount(alive.path, next.path, "", unix.MS_BIND, ""))
	if ids, _ := n.gcCommand(nil); !slices.Equal(ids, []string{"next"}) {
		t.Errorf("the path of a dead pod leads to another's namespace, and gc names %v", ids)
	}
	o = n.operate("gc", "--state", n.state, "nosuch")
	expect.That(t, o.status == 1 && strings.Contains(o.stderr, `"nosuch"`), "an unknown network: status %d, %s", o.status, o.stderr)
}

// The kernel takes some 50 ms to delete the links of a namespace to which nothing refers. The pod is dead from
// the beginning of that, and one whose path leads nowhere while its namespace is in use lives.
func TestTomboloGCReclaimsAPodWhosePortIsStillThere(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	hidden := w.addPod("hidden")
	vanish(t, hidden.path)
	if o := n.operate("gc", "--state", n.state); o.status != 0 || o.stdout != "nothing is left of dead pods\n" || !strings.Contains(o.stderr, "the pod's port "+w.port(hidden)+" exists") {
		t.Errorf("gc says nothing of a pod whose port is there: %+v", o)
	}
	for begin := time.Now(); time.Since(begin) < patience; {
		dead := w.addPod("dead")
		vanish(t, dead.path)
		dead.NS.Close()
		const nothing = "nothing is left of dead pods\n"
		said := nothing
		for end := time.Now().Add(patience); said == nothing && time.Now().Before(end); { // a socket of the ADD's may still be closing
			said = n.operate("gc", "--state", n.state).stdout
		}
		must.That(t, strings.Count(said, "\n") == 1 && strings.HasPrefix(said, "container dead, eth0 ") && strings.HasSuffix(said, "; reclaimed\n"),
			"gc says %q", said)
		wantPing(t, hidden.NS, gateway4)
		links := n.run("ip", "-o", "link")
		expect.That(t, !strings.Contains(links, w.port(dead)), "the port is left:\n%s", links)
		if strings.Contains(said, "its port "+w.port(dead)+" is about to go") {
			return
		}
	}
	t.Error("the port was gone each time: the test shows nothing")
}

func TestADDReclaimsDeadPodsWhereThePoolIsFull(t *testing.T) {
	t.Parallel()
	for _, dir := range []string{"", t.TempDir()} {
		nstest.RunParallel(t, fmt.Sprintf("a dataDir of the operator's %t", dir != ""), func(t *testing.T) {
			n := newNode(t)
			ipam := small("2")
			if dir != "" {
				ipam["dataDir"] = dir
			}
			w := n.podnet(conf{"ipam": ipam})
			dead := n.pod("dead")
			had := w.add(dead)
			_, err := w.tryAdd(n.pod("early"))
			wantError(t, err, 100, "is full")
			wantError(t, w.status(), 50, "is full")
			w.kills(t, dead)
			// A runtime asks STATUS before it sends an ADD.
			expect.Success(t, w.status())
			if r, err := w.tryAdd(n.pod("next")); err != nil {
				t.Errorf("the address of a dead pod is not free for another: %v", err)
			} else if ip4(r) != ip4(had) {
				t.Errorf("%s was given, want the dead pod's %s", ip4(r), ip4(had))
			}
		})
	}
}

func TestADDReclaimsTheDeadPodThatHasTheAddressItAsksFor(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(conf{"capabilities": conf{"ips": true}})
	dead := n.pod("dead")
	own := capability("ips", []string{"10.77.0.42"})
	w.add(dead, own)
	w.kills(t, dead)
	_, err := w.tryAdd(n.pod("next"), own)
	expect.That(t, err == nil, "the address that an ADD asks for is a dead pod's, and is not free: %v", err)
}

func TestWhoTakesADeadPodsHostPortHasTheRestOfItReclaimed(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.portnet(nil)
	dead := w.addPod("dead", publish(t, "8080:80/tcp"))
	w.kills(t, dead)
	w.add(n.pod("next"), publish(t, "8080:80/tcp"))
	expect.That(t, w.recordOf(dead) == "", "the dead pod's host port was taken over, and its record and address are left")
}

// A plugin says in its own words that its pool is full, and is told by DEL whose address is free.
func TestADDReclaimsDeadPodsOfAPluginThatFails(t *testing.T) {
	n := parallelNode(t)
	ipam, calls := fake(t, fakeConf{})
	w := n.podnet(conf{"ipam": ipam})
	dead := w.addPod("dead")
	full := ipam
	full.Fail = map[string]json.RawMessage{"ADD": json.RawMessage(`{"code":11,"msg":"full"}`)}
	w.kills(t, dead)
	before := len(calls())
	wantError(t, expect.Err(w.with(conf{"ipam": full}).tryAdd(n.pod("next"))), 11, "full")
	// No address is free still, since the plugin says so.
	diff := strings.Join(calls()[before:], ", ")
	expect.That(t, diff == "ADD next eth0, DEL next eth0, DEL dead eth0, ADD next eth0, DEL next eth0", "the plugin was called: %s", diff)
	left := n.records()
	expect.That(t, len(left) == 0, "left: %v", left)
}

// records are the files of attachments.
func (n *node) records() []string {
	return must.Of(filepath.Glob(n.state + "/attachments/*/*")).Get(n)
}

func TestTomboloGCLeavesAnADDAloneThatWaits(t *testing.T) {
	n := parallelNode(t)
	for _, s := range slowNetworks(t, n) {
		p := n.pod("waits-" + s.w.name)
		add := n.waits(s, p)
		ids, status := n.gcCommand([]*pod{p})
		expect.That(t, len(ids) == 0 && status == 0, "%s: gc names %v, status %d", s.name, ids, status)
		add.wantRunning()
		add.kill()
		// Now nobody has its record's lock. The one has a port, and is alive; of the other,
		// only its plugin can give the address back.
		ids, status = n.gcCommand([]*pod{p})
		want := !hasPort(n, s.w, p)
		expect.That(t, (len(ids) == 1) == want && (status == 4) == want, "%s: gc after a kill names %v, status %d", s.name, ids, status)
		s.w.gc()
	}
	n.wantNothing()
}

func TestTombolodReclaimsDeadPodsFromAnotherMountNamespace(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	dead, alive := n.pod("dead"), n.pod("alive")
	w.add(dead)
	w.add(alive)
	w.kills(t, dead)
	m := n.mind(t, alive)
	must.Until(t, "it looks for dead pods", func() bool { return m.metric("dead_looks_total") > 0 })
	expect.Equal(t, m.metric("dead_reclaimed_total"), 1, "were reclaimed")
	left := n.records()
	expect.That(t, len(left) == 1 && strings.Contains(left[0], strings.TrimPrefix(w.port(alive), "veth")), "on record: %v", left)
	expect.Success(t, w.check(alive))
}

// An operator, or udev, has renamed the host's end of its link, and its path leads nowhere any more.
func TestAPodWhosePortHasAnotherNameLives(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.portnet(nil)
	p := w.addPod("a", publish(t, "8080:80/tcp"))
	p.serve(t, "tcp", 80)
	before := n.records()
	port := w.port(p)
	n.ip("link set " + port + " down")
	n.ip("link set " + port + " name renamed0")
	n.ip("link set renamed0 up")
	vanish(t, p.path)
	_, err := w.tryAdd(n.pod("next"), publish(t, "8080:80/tcp"))
	wantError(t, err, 112, "8080/tcp is already published by container a")
	ids, status := n.gcCommand(nil)
	expect.That(t, len(ids) == 0 && status == 0 && slices.Equal(n.records(), before), "gc took down a pod that lives: %q, status %d", ids, status)
	expect.Success(t, expect.Err(askPort(t, n.ns, "tcp", uplink4, 8080)), "the pod has lost its host port")
	wantPing(t, p.NS, outside4, outside6)
}

func TestTomboloGCInAContainerTakesNoPodForDead(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	p := w.addPod("a")
	vanish(t, p.path)
	before := n.traces()
	container := newNode(t)
	o := container.operate("gc", "--state", n.state)
	expect.That(t, o.status != 0 && strings.Contains(o.stderr, "run this in the host's"),
		"gc in another network namespace than the pods' is not refused: %+v", o)
	n.wantTraces(before)
}
