package cni

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// seedVar has a test make the choices of an earlier run, which says its seed.
const seedVar = "TOMBOLO_SEED"

// many are callers of verbs for attachments of two networks, eight at once. Each caller
// has attachments of its own, as a runtime sees to it; collections name all that are
// claimed, and take the others.
type many struct {
	*node
	seed     uint64
	programs []string // each call is by one of them
	kills    bool     // some calls are killed
	// refuses says that an error is right, of a call that nobody killed.
	refuses  func(verb string, a *attachment, e *types.Error) bool
	networks []*network
	always   map[*network]*pod // that collections name besides
	callers  [8][]*attachment

	mu     sync.Mutex
	usual  map[string]time.Duration // how long a verb takes
	made   map[string]int           // calls that came to an end
	killed map[string]int
	owners map[netip.Addr]*attachment // claimed ones, until their DEL begins
}

// attachment is one that is made and deleted again and again.
type attachment struct {
	*pod
	w       *network
	port    int
	claimed bool
	maybe   bool            // an ADD was begun after the last DEL
	result  json.RawMessage // of an ADD after which nothing was begun but CHECK
}

func newMany(t *testing.T, n *node, networks []*network, always map[*network]*pod) *many {
	m := &many{
		node: n, seed: rand.Uint64(), programs: []string{plugin()}, networks: networks, always: always,
		usual: map[string]time.Duration{}, made: map[string]int{}, killed: map[string]int{}, owners: map[netip.Addr]*attachment{},
	}
	if text := os.Getenv(seedVar); text != "" {
		var err error
		m.seed, err = strconv.ParseUint(text, 10, 64)
		must.That(t, err == nil, "%s: %v", seedVar, err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s=%d makes the same choices", seedVar, m.seed)
		}
	})
	for i := range m.callers {
		for j := range 3 {
			m.callers[i] = append(m.callers[i], &attachment{
				pod: n.pod(fmt.Sprintf("pod-%d-%d", i, j)), w: networks[j%len(networks)], port: freePort + 10*i + j, claimed: (i+j)%3 != 0,
			})
		}
	}
	return m
}

func (m *many) all() []*attachment {
	var list []*attachment
	for _, own := range m.callers {
		list = append(list, own...)
	}
	return list
}

// round has each caller make some calls, and looks at what there is then.
func (m *many) round(number int) {
	m.Helper()
	var callers sync.WaitGroup
	for i, own := range m.callers {
		random := rand.New(rand.NewPCG(m.seed, uint64(number*len(m.callers)+i)))
		callers.Go(func() {
			for range 5 {
				m.next(random, own[random.IntN(len(own))])
			}
		})
	}
	callers.Wait()
	m.wantNoAddressTwice()
	if len(m.programs) > 1 {
		// Each finds the rules of the other.
		expect.Success(m, m.operate("repair", "--state", m.state).err(), "round %d: repair", number)
	}
	m.each(func(a *attachment) {
		if a.claimed && a.result != nil {
			e, _ := m.run(call{verb: "CHECK"}, a, plugin(), -1)
			expect.That(m, e == nil, "round %d: CHECK of %s, after all: %v", number, a.id, e)
		}
	})
}

// each does something for all attachments, eight at once.
func (m *many) each(do func(a *attachment)) {
	var callers sync.WaitGroup
	for _, own := range m.callers {
		callers.Go(func() {
			for _, a := range own {
				do(a)
			}
		})
	}
	callers.Wait()
}

func (m *many) next(random *rand.Rand, a *attachment) {
	m.Helper()
	verb := "ADD"
	switch chance := random.IntN(100); {
	case chance < 15:
		verb = "GC"
	case a.maybe && chance < 40, chance < 20:
		verb = "CHECK"
	case a.maybe && chance < 90, chance < 25:
		verb = "DEL"
	}
	program := m.programs[random.IntN(len(m.programs))]
	part := -1.0
	if m.kills && random.IntN(2) == 0 {
		part = 1.2 * random.Float64()
	}
	before := *a
	switch verb {
	case "ADD":
		a.maybe, a.result = true, nil
	case "DEL":
		a.result = nil
		m.giveUp(a)
	}
	e, out := m.run(call{verb: verb}, &before, program, part)
	switch {
	case e != nil && e.Code == 0: // killed
	case e != nil && !m.refuses(verb, &before, e):
		m.Errorf("%s of %s by %s: %v", verb, a.id, program, e)
	case e != nil:
	case verb == "ADD":
		a.result = json.RawMessage(out)
		m.takes(a)
	case verb == "DEL":
		a.maybe = false
	}
}

// run makes a call for an attachment, and kills it after a part of the time that such a
// one takes; less than nothing: never. Of a call that was killed the error's code is 0.
func (m *many) run(c call, a *attachment, program string, part float64) (*types.Error, string) {
	m.Helper()
	c.id, c.netns, c.ifName, c.stdin = a.id, a.path, "eth0", rich(a.w, a.port)
	switch c.verb {
	case "CHECK":
		var fields conf
		unmarshal(m, string(c.stdin), &fields)
		fields["prevResult"] = a.result
		c.stdin = marshal(m, fields)
	case "GC":
		c = call{verb: "GC", stdin: a.w.stdin(conf{"cni.dev/valid-attachments": m.valid(a.w)})}
	}
	var out, errOut bytes.Buffer
	cmd := exec.Command(program)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = c.environ(), bytes.NewReader(c.stdin), &out, &errOut
	begun := time.Now()
	if err := m.ns.Do(cmd.Start); err != nil {
		m.Error(err)
		return nil, ""
	}
	if part >= 0 {
		m.mu.Lock()
		after := time.Duration(part * float64(m.usual[c.verb]))
		m.mu.Unlock()
		timer := time.AfterFunc(after, func() { _ = cmd.Process.Kill() })
		defer timer.Stop()
	}
	_ = cmd.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		if m.killed[c.verb]++; part < 0 || status.Signal() != syscall.SIGKILL {
			m.Errorf("%s: %v", c.verb, status.Signal())
		}
		return &types.Error{Msg: "killed"}, ""
	}
	m.made[c.verb]++
	m.usual[c.verb] += (time.Since(begun) - m.usual[c.verb]) / 4
	expect.That(m, errOut.Len() == 0, "%s by %s: stderr: %s", c.verb, program, &errOut)
	if cmd.ProcessState.ExitCode() == 0 {
		return nil, out.String()
	}
	e := failure(out.String())
	if e == nil {
		m.Errorf("%s by %s: exit status %d without an error object: %s", c.verb, program, cmd.ProcessState.ExitCode(), &out)
		return &types.Error{}, ""
	}
	return e, ""
}

// valid are those that a collection claims.
func (m *many) valid(w *network) []conf {
	list := []conf{}
	if p := m.always[w]; p != nil {
		list = append(list, conf{"containerID": p.id, "ifname": "eth0"})
	}
	for _, a := range m.all() {
		if a.claimed && a.w == w {
			list = append(list, conf{"containerID": a.id, "ifname": "eth0"})
		}
	}
	return list
}

// takes notes the addresses that an ADD gave, which nobody else has.
func (m *many) takes(a *attachment) {
	m.Helper()
	parsed, err := current.NewResult(a.result)
	if err != nil {
		m.Error(err)
		return
	}
	r, err := current.NewResultFromResult(parsed)
	if err != nil {
		m.Error(err)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, ip := range ips(r) {
		if other := m.owners[ip]; other != nil {
			m.Errorf("%s was given to %s, which %s has", ip, a.id, other.id)
		}
		if a.claimed {
			m.owners[ip] = a
		}
	}
}

func (m *many) giveUp(a *attachment) {
	m.mu.Lock()
	defer m.mu.Unlock()
	maps.DeleteFunc(m.owners, func(_ netip.Addr, owner *attachment) bool { return owner == a })
}

// wantNoAddressTwice looks at the pods themselves.
func (m *many) wantNoAddressTwice() {
	m.Helper()
	has := map[netip.Addr]string{}
	look := func(p *pod) {
		conn := must.Of(addr.Dial(p.NS)).Get(m)
		defer conn.Close()
		list := must.Of(conn.List(m.Context(), addr.Filter{})).Get(m)
		for _, a := range list {
			ip := a.Prefix.Addr()
			other, ok := has[ip]
			expect.That(m, !ok || ip.IsLoopback() || ip.IsLinkLocalUnicast(), "%s is %s's and %s's", ip, other, p.id)
			has[ip] = p.id
		}
	}
	for _, a := range m.all() {
		look(a.pod)
	}
	for _, p := range m.always {
		look(p)
	}
}

// end deletes what is owed a DEL, and collects the rest.
func (m *many) end(program string) {
	m.Helper()
	m.each(func(a *attachment) {
		e, _ := m.run(call{verb: "DEL"}, a, program, -1)
		expect.That(m, e == nil, "the last DEL of %s by %s: %v", a.id, program, e)
		a.maybe, a.result = false, nil
		m.giveUp(a)
	})
	for _, w := range m.networks {
		valid := []conf{}
		if p := m.always[w]; p != nil {
			valid = append(valid, conf{"containerID": p.id, "ifname": "eth0"})
		}
		c := call{verb: "GC", stdin: w.stdin(conf{"cni.dev/valid-attachments": valid})}
		o, err := m.exec(m.Context(), program, c.stdin, c.environ())
		expect.That(m, err == nil && o.status == 0, "the last GC of %s by %s: %v, %s", w.name, program, err, o.stdout)
	}
}

// length is how long the callers go on.
func (m *many) length() time.Duration {
	if os.Getenv("TOMBOLO_LONG") != "" {
		return 2 * time.Minute
	}
	return 3 * time.Second
}

// wantNoLock fails the test if anybody has a lock of the state directory, or of a file in
// it.
func (n *node) wantNoLock() {
	n.Helper()
	must.Succeed(n, filepath.WalkDir(n.state, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		expect.Success(n, unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB), "the lock of %s", path)
		return nil
	}))
	dir := must.Of(state.Open(n.state)).Get(n)
	lock := must.Of(dir.Lock(n.Context(), state.Exclusive)).Get(n)
	expect.Success(n, lock.Close())
}

// two are the networks of many: that of a pod that stays and talks, and one of which
// collections may claim nobody.
func two(t *testing.T) (n *node, networks []*network, stays map[*network]*pod, talks []*nstest.Talk) {
	t.Helper()
	n, w, p, talks := standing(t)
	other := n.network("other", w.plugin).with(conf{"bridge": "cbr1", "ipam": hostLocal("10.78.0.0/24", "fd78::/64")})
	return n, []*network{w, other}, map[*network]*pod{w: p}, talks
}

// TestEightAtOnceUnderRandomKills has calls for many attachments killed at any moment
// while others go on. What they leave is found by DEL and GC, and stands in nobody's way.
func TestEightAtOnceUnderRandomKills(t *testing.T) {
	t.Parallel()
	n, networks, stays, talks := two(t)
	m := newMany(t, n, networks, stays)
	m.refuses = func(verb string, a *attachment, e *types.Error) bool {
		switch verb {
		case "ADD":
			// It is there already; or a collection that did not claim it came meanwhile.
			return e.Code == 111 && a.maybe || e.Code == 11 && !a.claimed
		case "CHECK":
			return !a.claimed || a.result == nil
		}
		return false
	}
	for number := range 2 { // of verbs that build something, and of those that find it
		m.round(number)
		m.end(plugin())
	}
	before := n.snapshot()
	m.kills = true
	struck := func() bool {
		return m.killed["ADD"] > 0 && m.killed["DEL"] > 0 && m.killed["GC"] > 0 && m.killed["CHECK"] > 0
	}
	number, begun := 2, time.Now()
	for ; time.Since(begun) < m.length() || !struck() && time.Since(begun) < patience; number++ {
		m.round(number)
		if t.Failed() {
			return
		}
	}
	m.kills = false
	m.end(plugin())
	n.wantSnapshot("all were deleted", before)
	left := n.reservations(n.state + "/ipam/other")
	expect.That(t, len(left) == 0, "addresses that were not given back: %v", left)
	n.wantNoLock()
	for _, w := range networks {
		p := n.pod("next-" + w.name)
		w.add(p, publish(t, "7000:80/udp"))
		wantPing(t, p.NS, outside4, outside6)
		w.del(p)
	}
	for _, talk := range talks {
		talk.Check(t)
	}
	expect.That(t, struck(), "calls that were killed: %v", m.killed)
	t.Logf("%s=%d: %d rounds, came to their end %v, killed %v", seedVar, m.seed, number, m.made, m.killed)
}

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
