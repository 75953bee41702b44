package cni

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestSameAttachmentTwiceAtOnceIsMadeOnce(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	w.add(n.pod("other"))
	before := n.traces()
	for i := range 8 {
		p := n.pod(fmt.Sprintf("pod-%d", i))
		errs := make(chan error, 3)
		atOnce([]*pod{p, p, p}, func(p *pod) {
			_, err := w.tryAdd(p)
			errs <- err
		})
		close(errs)
		made := 0
		for err := range errs {
			if err == nil {
				made++
			} else {
				wantError(t, err, 111, "DEL it first")
			}
		}
		expect.Equal(t, made, 1, "of three ADDs of one attachment succeeded")
		expect.Success(t, w.check(p))
		w.del(p)
		n.wantTraces(before)
	}
}

func TestDELAfterADDAndDELAtOnceLeavesNothing(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	w.add(n.pod("other"))
	before := n.traces()
	for i := range 12 {
		p := n.pod(fmt.Sprintf("pod-%d", i))
		var both sync.WaitGroup
		// Runtimes do not do this, so either may fail: but not leave what a DEL after
		// both does not find.
		both.Go(func() { _, _ = w.tryAdd(p) })
		both.Go(func() { _ = w.tryDel(p) })
		both.Wait()
		w.del(p)
		n.wantTraces(before)
	}
}

// TestGCBesideEverything has collections that claim some pods run beside ADDs and
// DELs of others, which a runtime should not do. Each has a pod to collect.
func TestGCBesideEverything(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.podnet(nil)
	stays := n.pods(3)
	for _, p := range stays {
		w.add(p)
	}
	before := n.traces()
	var churn []*pod
	for i := range 24 {
		churn = append(churn, n.pod(fmt.Sprintf("churn-%d", i)))
	}
	var garbage []*pod
	for i := range 12 {
		garbage = append(garbage, n.pod(fmt.Sprintf("garbage-%d", i)))
	}
	var all sync.WaitGroup
	all.Go(func() {
		for _, p := range garbage {
			expect.Success(t, expect.Err(w.tryAdd(p)), "ADD of %s", p.id)
			w.gc(stays...)
		}
	})
	all.Go(func() {
		atOnce(churn, func(p *pod) {
			if _, err := w.tryAdd(p); err != nil {
				wantError(t, err, 11, "collected as garbage")
			}
			expect.Success(t, w.tryDel(p), "DEL of %s", p.id)
		})
	})
	all.Wait()
	n.wantTraces(before)
	for _, p := range stays {
		wantPing(t, p.NS, outside4, outside6)
		expect.Success(t, w.check(p))
	}
}

func TestManyNetworksAtOnce(t *testing.T) {
	n := parallelNode(t)
	const count = 8
	var pods []*pod
	networks := map[string]*network{}
	for i := range count {
		w := n.network(fmt.Sprintf("net%d", i), conf{
			"bridge": fmt.Sprintf("br-%d", i/2), // each is shared by two
			"ipam":   hostLocal(fmt.Sprintf("10.80.%d.0/24", i), fmt.Sprintf("fd80:%d::/64", i)),
		})
		for j := range 3 {
			p := n.pod(fmt.Sprintf("pod-%d-%d", i, j))
			networks[p.id] = w
			pods = append(pods, p)
		}
	}
	atOnce(pods, func(p *pod) { expect.Success(t, expect.Err(networks[p.id].tryAdd(p)), "ADD of %s", p.id) })
	for _, p := range pods {
		expect.Success(t, networks[p.id].check(p))
	}
	atOnce(pods, func(p *pod) { expect.Success(t, networks[p.id].tryDel(p), "DEL of %s", p.id) })
	n.wantNothing()
	removed := map[string]bool{}
	for _, w := range networks {
		o := n.remove(w.name)
		again := removed[w.name]
		expect.That(t, (o.status != 0) == again, "remove %s: exit status %d, again %t: %s", w.name, o.status, again, o.stderr)
		removed[w.name] = true
	}
	expect.Equal(t, n.ruleset(), "", "left")
}

// TestNamesMayBeLong has names that fit into no alias, comment or set's name.
func TestNamesMayBeLong(t *testing.T) {
	t.Parallel()
	long := func(length int, last string) string { return strings.Repeat("n", length-len(last)) + last }
	for _, tt := range []struct{ name, network, other, container string }{
		{"64 bytes", long(64, "a"), long(64, "b"), long(64, "")},
		{"65 bytes", long(65, "a"), long(65, "b"), long(65, "")},
		{"100 bytes", long(100, "a"), long(100, "b"), long(100, "")},
		// The longest for which libcni can name a file of its cache.
		{"180 bytes", long(180, "a"), long(180, "b"), long(64, "")},
		{"one is the other's beginning", "net", "net.1", "c"},
		{"one looks like a hash", "0123456789a", "0123456789b", "0123456789a"},
		{"odd characters", "N_e.t-1", "N_e.t-2", "C_o.n-1"},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			n.outside()
			w := n.network(tt.network, nil)
			other := n.network(tt.other, conf{"bridge": "cbr1", "ipam": hostLocal("10.78.0.0/24", "fd78::/64")})
			a, b, stranger := n.pod(tt.container), n.pod(tt.container+"b"), n.pod(tt.container)
			ra := w.add(a)
			w.add(b)
			other.add(stranger)
			for _, p := range []*pod{a, b, stranger} {
				wantPing(t, p.NS, outside4, outside6)
			}
			expect.Success(t, w.check(a))
			// What of it the kernel keeps is enough to find everything by.
			must.Succeed(t, os.RemoveAll(n.state))
			if next := w.add(n.pod("next")); ip4(next) == ip4(ra) || ip6(next) == ip6(ra) {
				t.Errorf("an address was given twice: %v", ips(next))
			}
			w.callOK(call{verb: "DEL", id: a.id, ifName: "eth0", stdin: w.stdin(nil)})
			w.gc()
			left := links(t, n.ns)
			expect.That(t, len(left) == 5, "links %v, want lo, eth0, two bridges and the port of the pod of the other network", left)
			wantPing(t, stranger.NS, outside4, outside6)
			other.gc()
			n.wantNothing()
		})
	}
}

// TestWarmADDListsNothing is about what costs more with every pod: of an ADD that
// finds its network as it should be, strace shows no directory read and no dump of
// the kernel's objects.
func TestWarmADDListsNothing(t *testing.T) {
	t.Parallel()
	nstest.Need(t, "strace")
	n := newNode(t)
	w := n.podnet(nil)
	listing := func(p *pod) []string {
		var found []string
		c := call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(nil)}
		for _, line := range n.traced(c, "getdents64,sendmsg,sendto,write") {
			if strings.Contains(line, "getdents64(") || strings.Contains(line, "NLM_F_DUMP") {
				found = append(found, line)
			}
		}
		return found
	}
	must.That(t, len(listing(n.pod("cold"))) > 0,
		"strace shows no listing of the first ADD, which has to do some: nothing is tested")
	for _, p := range n.pods(5) {
		w.add(p)
	}
	expect.Equal(t, cmp.Diff([]string(nil), listing(n.pod("warm"))), "", "a warm ADD lists")
}
