package network

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/nft"
)

// small is a network of three addresses, whose allocator takes them back.
func small(t *testing.T) *bed {
	t.Helper()
	b := newBed(t)
	dir := filepath.Join(t.TempDir(), "ipam")
	pool, err := ipam.NewHostLocal(&ipam.Config{Network: "pods", Dir: dir, Ranges: []ipam.RangeSet{{Ranges: []ipam.Range{{
		Subnet: netip.MustParsePrefix("10.61.0.0/24"), RangeStart: netip.MustParseAddr("10.61.0.2"), RangeEnd: netip.MustParseAddr("10.61.0.4"),
	}}}}})
	must.Succeed(t, err)
	b.nw.Allocator, b.nw.Origin = pool, Origin{Type: "host-local", Dir: dir}
	b.pod.Addresses = nil
	cfg := &Config{StateDir: b.node.cfg.Dir.Path(), Allocators: func(string, *Origin) (ipam.Allocator, error) { return pool, nil }}
	if b.node, err = Open(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *bed) another(t *testing.T, id string) *Pod {
	t.Helper()
	ns := nstest.New(t)
	return &Pod{ContainerID: id, IfName: "eth0", NetNS: ns, Path: nstest.Path(t, ns)}
}

func (b *bed) added(t *testing.T, p *Pod) *Attachment {
	t.Helper()
	var made *Attachment
	b.do(t, func() (err error) { made, err = b.node.Add(t.Context(), &b.nw, p); return err })
	return made
}

// dead gives the containers of dead pods that were, or would be, reclaimed.
func (b *bed) dead(t *testing.T, dryRun bool) (ids []string) {
	t.Helper()
	b.do(t, func() error {
		list, err := b.node.CollectDead(t.Context(), "", dryRun)
		for _, d := range list {
			if d.Kept != nil {
				t.Errorf("%s was kept: %v", d.ContainerID, d.Kept)
			}
			ids = append(ids, d.ContainerID)
		}
		return err
	})
	slices.Sort(ids)
	return ids
}

// vanish takes a pod's namespace away, as a kill of all that is in it does.
func (b *bed) vanish(t *testing.T, p *Pod, made *Attachment) {
	t.Helper()
	hide(t, p)
	must.Succeed(t, p.NetNS.Close())
	for gone := false; !gone; {
		b.inside(t, func(s *session) error {
			_, err := s.Links.Link(t.Context(), made.Port)
			gone = errors.Is(err, fs.ErrNotExist)
			return nil
		})
	}
}

// hide takes a namespace's name away: so it is to a process in another mount namespace.
func hide(t *testing.T, p *Pod) {
	t.Helper()
	must.Succeed(t, errors.Join(unix.Unmount(p.Path, unix.MNT_DETACH), os.Remove(p.Path)))
}

func (b *bed) mustHave(t *testing.T, ids ...string) {
	t.Helper()
	list, err := b.node.Attachments(t.Context(), "pods")
	var have []string
	for _, a := range list {
		have = append(have, a.ContainerID)
	}
	slices.Sort(have)
	if err != nil || !slices.Equal(have, ids) {
		t.Errorf("on record: %v, %v; want %v", have, err, ids)
	}
}

// Another Del, which passes a host port on to the attachment, writes its record meanwhile.
func TestADelPassesOnWhatItIsPassedMeanwhile(t *testing.T) {
	t.Parallel()
	b := small(t)
	var pods [3]*Pod
	var hashes [3]string
	p := b.another(t, "p")
	for i := range pods {
		one := *p
		pods[i], one.IfName = &one, fmt.Sprint("eth", i)
		one.Ports = []nft.Port{{Protocol: nft.TCP, HostPort: 8080, PodPort: 80}}
		hashes[i] = b.added(t, &one).hash()
	}
	var locks [3]*state.AttachmentLock
	for i, h := range hashes[1:] {
		lock, err := b.node.cfg.Dir.LockAttachment("pods", h)
		must.Succeed(t, err)
		locks[i+1] = lock
	}
	del := func(i int) { b.do(t, func() error { return b.node.Del(t.Context(), pods[i].key(&b.nw), nil) }) }
	del(0) // it passes nothing on
	locks[2].Close()
	go func() {
		defer locks[1].Close()
		time.Sleep(50 * time.Millisecond)
		rec, err := b.node.cfg.Dir.Load("pods", hashes[1])
		if err == nil {
			rec.Waiting = []state.Waiting{{Network: "pods", Hash: hashes[2]}}
			err = b.node.cfg.Dir.UpdateLocked(rec)
		}
		expect.Success(t, err)
	}()
	del(1)
	rec, err := b.node.cfg.Dir.Load("pods", hashes[2])
	if err != nil || rec.Published[0].Withheld {
		t.Errorf("the port is passed on to nobody: %+v, %v", rec, err)
	}
}

// A pod is dead only if both its port and its namespace are gone, as far as can be told.
func TestNoLivingPodIsTakenForDead(t *testing.T) {
	t.Parallel()
	b := small(t)
	p := b.another(t, "p")
	made := b.added(t, p)
	wantDead := func(when string, want ...string) {
		t.Helper()
		if got := b.dead(t, true); !slices.Equal(got, want) {
			t.Errorf("%s: dead: %v, want %v", when, got, want)
		}
	}
	wantDead("it lives")
	// Its port is deleted by hand; its namespace is where it was.
	nstest.Run(t, b.host, "ip", "link", "del", made.Port)
	wantDead("its port was deleted")
	must.Succeed(t, errors.Join(unix.Unmount(p.Path, unix.MNT_DETACH), unix.Mount("/proc/self/fd/"+fmt.Sprint(b.host.FD()), p.Path, "", unix.MS_BIND, "")))
	wantDead("its path is another's by now", "p")
	b.node.cfg.Dir.Remove("pods", made.hash())

	// A caller that does not see the mounts of the runtime.
	q := b.another(t, "q")
	made = b.added(t, q)
	hide(t, q)
	wantDead("its path cannot be opened, and its port is there")
	nstest.Run(t, b.host, "ip", "link", "set", made.Port, "down", "name", "renamed")
	wantDead("its port has another name")
	nstest.Run(t, b.host, "ip", "link", "del", "renamed")
	wantDead("its port is gone too", "q")

	// In another network namespace nothing is there.
	err := nstest.New(t).Do(func() error { _, err := b.node.CollectDead(t.Context(), "", false); return err })
	expect.Is(t, err, ErrState, "from another network namespace")
	b.mustHave(t, "q")
	if got := b.dead(t, false); !slices.Equal(got, []string{"q"}) {
		t.Errorf("reclaimed %v", got)
	}
	b.mustHave(t)
}

func TestAnADDUnderWayIsNotReclaimed(t *testing.T) {
	t.Parallel()
	b := small(t)
	p := b.another(t, "p")
	steps := 0
	// Seen from another mount namespace, its path leads nowhere all the while.
	seen := *p
	seen.Path += "-elsewhere"
	look := func(step string) error {
		steps++
		node, err := Open(t.Context(), &Config{StateDir: b.node.cfg.Dir.Path()})
		if err != nil {
			return err
		}
		dead, err := node.CollectDead(t.Context(), "", false)
		if len(dead) > 0 {
			t.Errorf("after the step %s it is taken for dead: %+v", step, dead[0])
		}
		return err
	}
	b.node.cfg.Step = func(step string) error {
		done := make(chan error)
		go func() { done <- b.host.Do(func() error { return look(step) }) }() // locks belong to goroutines
		return <-done
	}
	b.nw.Allocator = slowAllocator{b.nw.Allocator}
	b.added(t, &seen)
	if steps < 6 {
		t.Errorf("looked after %d steps", steps)
	}
	b.node.cfg.Step = nil
	// The record's lock is what held it off: one that an ADD left which was killed is reclaimed.
	b.inside(t, func(s *session) error {
		if err := s.enter(t.Context()); err != nil {
			return err
		}
		killed := b.another(t, "killed")
		killed.Path += "-elsewhere"
		rec := killed.record(&b.nw, killed.key(&b.nw).hash())
		pending, err := s.Dir.Create(rec)
		if err != nil {
			return err
		}
		return pending.Close()
	})
	if got := b.dead(t, false); !slices.Equal(got, []string{"killed"}) {
		t.Errorf("reclaimed %v", got)
	}
	b.mustHave(t, "p")
}

// slowAllocator asks another program, as far as anybody knows.
type slowAllocator struct{ ipam.Allocator }

func (slowAllocator) Slow() bool { return true }
func (s slowAllocator) Bind(node ipam.Node) ipam.Allocator {
	return slowAllocator{s.Allocator.Bind(node)}
}

func TestRecordsOfAnEarlierBootAreReclaimed(t *testing.T) {
	t.Parallel()
	b := small(t)
	p := b.another(t, "p")
	b.vanish(t, p, b.added(t, p))
	path := b.node.cfg.Dir.Path() + "/epoch"
	data, err := os.ReadFile(path)
	must.Succeed(t, err)
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	must.Succeed(t, err)
	earlier := strings.ReplaceAll(string(data), strings.TrimSpace(string(boot)), "an-earlier-boot")
	must.Succeed(t, os.WriteFile(path, []byte(earlier), 0o600))
	b.dead(t, true)
	b.mustHave(t, "p")
	b.dead(t, false)
	b.mustHave(t)
}

func TestWhatNobodyCouldTakeBackIsKept(t *testing.T) {
	t.Parallel()
	b := small(t)
	p := b.another(t, "p")
	b.vanish(t, p, b.added(t, p))
	b.node.cfg.Allocators = func(string, *Origin) (ipam.Allocator, error) { return nil, errors.New("no such plugin") }
	b.do(t, func() error {
		list, err := b.node.CollectDead(t.Context(), "pods", false)
		if err != nil || len(list) != 1 || list[0].Kept == nil {
			t.Errorf("%+v, %v; want one that is kept", list, err)
		}
		expect.Is(t, expect.Err(b.node.CollectDead(t.Context(), "nosuch", true)), ErrInvalid, "a network that is not there")
		return nil
	})
	b.mustHave(t, "p")
}

func TestWhereDeadPodsAreInTheWayWhatHelpsIsNamed(t *testing.T) {
	t.Parallel()
	b := small(t)
	p := b.another(t, "p")
	made := b.added(t, p)
	b.inside(t, func(s *session) error { // as if they were on a LAN
		if err := s.enterAlone(t.Context()); err != nil {
			return err
		}
		rec, err := s.Dir.LoadNetwork("pods")
		if err != nil {
			return err
		}
		rec.Uplink = "eth9"
		return s.Dir.SaveNetwork(rec)
	})
	refused := func() (err error) {
		t.Helper()
		b.do(t, func() error { err = b.node.Uplinks().Restore(t.Context(), "eth9", ""); return nil })
		expect.Is(t, err, ErrAttached, "restore")
		return err
	}
	if err := refused(); strings.Contains(err.Error(), "tombolo gc") {
		t.Errorf("of a pod that lives: %v", err)
	}
	b.vanish(t, p, made)
	if err := refused(); !strings.Contains(err.Error(), "tombolo gc reclaims 1 attachment whose pod is gone") {
		t.Errorf("of a dead pod: %v", err)
	}
}

// A path that cannot be followed says no more than one that leads nowhere, and is no reason for a
// garbage collection to fail.
func TestAPathThatIsALoopOfLinksIsNoError(t *testing.T) {
	t.Parallel()
	b := small(t)
	loop := filepath.Join(t.TempDir(), "loop")
	for _, id := range []string{"lives", "dead"} {
		p := b.another(t, id)
		made := b.added(t, p)
		b.inside(t, func(s *session) error {
			rec, err := s.Dir.Load("pods", made.hash())
			if err == nil {
				rec.NetNS = loop
				err = s.Dir.Update(rec)
			}
			return err
		})
		if id == "dead" {
			b.vanish(t, p, made)
		}
	}
	must.Succeed(t, os.Symlink(loop, loop))
	if _, err := os.ReadFile(loop); !errors.Is(err, unix.ELOOP) {
		t.Fatalf("no loop: %v", err)
	}
	if ids := b.dead(t, false); !slices.Equal(ids, []string{"dead"}) {
		t.Errorf("reclaimed %v", ids)
	}
}

// Collect lists first, and gives others their turn before it looks at each.
func TestCollectLeavesAloneWhatCameSinceItsList(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	made := b.add(t)
	hash := made.Port[len("veth"):]
	began := time.Now()
	collect := func(r *remains) {
		t.Helper()
		b.inside(t, func(s *session) error { return b.node.teardown(s, b.nw.Name, nil).collect(t.Context(), r, began) })
	}
	list := func() (found map[string]*remains) {
		t.Helper()
		b.inside(t, func(s *session) error {
			defer s.leave()
			in, err := s.inventory(t.Context(), b.nw.Name, nil)
			found = in.all
			return errors.Join(s.enter(t.Context()), err)
		})
		return found
	}
	listed := list()
	if listed[hash] == nil {
		t.Fatalf("listed %v", listed)
	}
	b.do(t, func() error { return b.node.Del(t.Context(), made.Key, nil) })
	b.add(t)
	collect(listed[hash])
	b.mustBeAsMade(t)
	// What had no record then has one now.
	collect(&remains{hash: hash})
	b.mustBeAsMade(t)
	// And what it listed as it is, goes.
	collect(list()[hash])
	b.inside(t, func(s *session) error {
		if _, err := s.Links.Link(t.Context(), made.Port); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("its port is left: %v", err)
		}
		return nil
	})
}

func TestReservationsAreGivenBackByTheRecordAlone(t *testing.T) {
	t.Parallel()
	dir, own := t.TempDir(), t.TempDir()
	node, err := Open(t.Context(), &Config{StateDir: dir})
	must.Succeed(t, err)
	for name, at := range map[string]struct{ set, dir string }{"the state's": {"", dir + "/ipam"}, "a directory of its own": {own, own}, "none": {"spoilt", dir + "/ipam"}} {
		ranges := []ipam.RangeSet{{Ranges: []ipam.Range{{Subnet: netip.MustParsePrefix("10.61.0.0/24")}}}}
		pool, err := ipam.NewHostLocal(&ipam.Config{Network: "pods", Dir: at.dir, Ranges: ranges})
		must.Succeed(t, err)
		owner := ipam.Owner{ContainerID: "c", IfName: "eth0"}
		given, err := pool.Add(t.Context(), owner)
		must.Succeed(t, err)
		reservation := filepath.Join(at.dir, "pods", given.Addresses[0].Prefix.Addr().String())
		must.Succeed(t, expect.Err(os.Stat(reservation)))
		back, err := node.allocator("pods", &Origin{Type: "host-local", Dir: at.set})
		must.Succeed(t, err)
		expect.Success(t, back.Del(t.Context(), owner, nil))
		if _, err := os.Stat(reservation); !os.IsNotExist(err) {
			t.Errorf("in %s: the reservation is left: %v", name, err)
		}
	}
}

func TestWhatHasNoReservationsAndWhatIsAnothersToGiveBack(t *testing.T) {
	t.Parallel()
	node, err := Open(t.Context(), &Config{StateDir: t.TempDir()})
	must.Succeed(t, err)
	for _, origin := range []*Origin{nil, {}, {Type: "static"}, {Type: "dhcp", Dir: "/leases"}} {
		if got, err := node.allocator("pods", origin); got != nil || err != nil {
			t.Errorf("%+v: %v, %v; want neither", origin, got, err)
		}
	}
	for kind, says := range map[string]string{"calico-ipam": `"calico-ipam"`, unnamed: "Config.Allocators"} {
		if _, err := node.allocator("pods", &Origin{Type: kind}); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), says) {
			t.Errorf("of %s: %v", kind, err)
		}
	}
}
