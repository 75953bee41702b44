package cni

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// A set is one of our sets or maps.
type set struct{ family, kind, name string }

func (s set) String() string { return s.kind + " " + s.family + " tombolo " + s.name }

// sets lists ours, with their elements but for those of some pods.
func (n *node) sets(but ...string) map[set][]string {
	n.Helper()
	all := map[set][]string{}
	var doc struct {
		Nftables []map[string]json.RawMessage
	}
	unmarshal(n, n.run("nft", "--json", "list", "ruleset"), &doc)
	for _, entry := range doc.Nftables {
		for _, kind := range []string{"set", "map"} {
			if entry[kind] == nil {
				continue
			}
			var s struct {
				Family, Table, Name string
				Elem                []json.RawMessage
			}
			unmarshal(n, string(entry[kind]), &s)
			if s.Table != "tombolo" {
				continue
			}
			list := []string{}
			for _, el := range s.Elem {
				if !slices.ContainsFunc(but, func(hash string) bool { return strings.Contains(string(el), hash) }) {
					list = append(list, string(el))
				}
			}
			slices.Sort(list)
			all[set{s.Family, kind, s.Name}] = list
		}
	}
	return all
}

// populated is a node with two guarded networks, whose pods have something in most sets.
type populated struct {
	*node
	w, other       *network
	p, q, stranger *pod
}

func newPopulated(t *testing.T) *populated {
	t.Helper()
	n := newNode(t)
	n.outside()
	s := &populated{
		node: n, w: n.portnet(conf{"guard": true, "bridgeNFCall": false}),
		other: n.network("othernet", conf{
			"bridge": "cbr1", "ipam": hostLocal("10.78.0.0/24", "fd78::/64"), "guard": true,
			"ingressPolicy": "same-bridge", "capabilities": conf{"portMappings": true},
		}),
		p: n.pod("p"), q: n.pod("q"), stranger: n.pod("stranger"),
	}
	s.w.add(s.p, publish(t, "8080:80/tcp", uplink4+":8081:80/tcp", uplink6+":8081:80/tcp"))
	s.w.add(s.q)
	s.other.add(s.stranger, publish(t, "9080:80/tcp", uplink4+":9081:80/tcp", uplink6+":9081:80/tcp"))
	for _, p := range []*pod{s.p, s.stranger} {
		p.serve(t, "tcp", 80)
	}
	return s
}

// wantWhole fails the test unless pods of both networks have all they had.
func (s *populated) wantWhole(t *testing.T, why string) {
	t.Helper()
	for _, p := range []*pod{s.p, s.q, s.stranger} {
		wantPing(t, p.NS, outside4, outside6)
	}
	for port := range map[int]bool{8080: true, 8081: true, 9080: true, 9081: true} {
		for _, at := range []string{uplink4, uplink6} {
			expect.Success(t, expect.Err(askPort(t, s.ns, "tcp", at, port)), "%s", why)
		}
	}
	for _, w := range []struct {
		*network
		pods []*pod
	}{{s.w, []*pod{s.p, s.q}}, {s.other, []*pod{s.stranger}}} {
		for _, p := range w.pods {
			expect.Success(t, w.check(p), "%s: CHECK", why)
		}
	}
	if t.Failed() {
		t.FailNow()
	}
}

// isOf says that a set is one network's alone.
func (s set) isOf(network string) bool { return strings.HasSuffix(s.name, "-"+network) }

// TestNextADDHealsAnEmptiedSet empties each set and map in turn, and has an ADD mend it:
// one of another network, where the set is not one network's alone.
func TestNextADDHealsAnEmptiedSet(t *testing.T) {
	t.Parallel()
	s := newPopulated(t)
	s.wantWhole(t, "before")
	count := 0
	for at, elements := range s.sets() {
		expect.That(t, len(elements) > 0, "%s is empty: nobody sees it if somebody empties it", at)
		s.emptied(t, at, func(next *pod) {
			w := s.other
			if at.isOf("podnet") {
				w = s.w
			}
			w.add(next)
			w.del(next)
		})
		count++
	}
	expect.That(t, count >= 30, "%d sets and maps: that cannot be all", count)
	for _, p := range []*pod{s.p, s.q} {
		s.w.del(p)
	}
	s.other.del(s.stranger)
	s.wantNothing()
}

// emptied empties a set, has it mended, and wants all that there was.
func (s *populated) emptied(t *testing.T, at set, mend func(next *pod)) {
	t.Helper()
	before := s.sets()
	s.nft("flush " + at.String())
	left := s.sets()[at]
	must.That(t, len(left) == 0, "flush %s leaves %v", at, left)
	o := s.operate("ls", "--state", s.state)
	expect.That(t, strings.Contains(o.stdout+o.stderr, at.name), "flush %s: tombolo ls finds nothing: %s%s", at, o.stdout, o.stderr)
	mend(s.pod("next" + strings.ReplaceAll(at.name, "-", "")))
	diff := cmp.Diff(before, s.sets())
	must.That(t, diff == "", "flush %s, and the next ADD (-before +after):\n%s", at, diff)
}

// TestRepairHealsEmptiedSets empties all of them.
func TestRepairHealsEmptiedSets(t *testing.T) {
	t.Parallel()
	s := newPopulated(t)
	before := s.sets()
	for at := range before {
		s.nft("flush " + at.String())
	}
	wantNoPing(t, s.p.NS, outside4, outside6)
	expect.Failure(t, expect.Err(askPort(t, s.ns, "tcp", uplink4, 8080)), "the port is there without its entry")
	o := s.operate("repair", "--state", s.state)
	must.That(t, o.status == 0, "repair: %s%s", o.stdout, o.stderr)
	expect.NoDiff(t, cmp.Diff(before, s.sets()), "after repair")
	s.wantWhole(t, "after repair")
}

// TestAnOlderSaveIsMended loads a save from before one pod went and another came, in several ways.
func TestAnOlderSaveIsMended(t *testing.T) {
	t.Parallel()
	s := newPopulated(t)
	gone, late, next := s.pod("gone"), s.pod("late"), s.pod("next")
	s.w.add(gone, publish(t, "8090:80/tcp"))
	save, port := s.nft("list ruleset"), s.nft("list map inet tombolo hostports4")
	s.w.del(gone)
	s.w.add(late, publish(t, "8091:80/tcp"))
	late.serve(t, "tcp", 80)
	before := s.sets()
	byADD := func(*testing.T) { s.other.add(next); s.other.del(next) }
	byRepair := func(t *testing.T) {
		o := s.operate("repair", "--state", s.state)
		must.That(t, o.status == 0, "repair: %s%s", o.stdout, o.stderr)
	}
	byTombolod := func(t *testing.T) {
		must.Until(t, "tombolod repairs", func() bool { return cmp.Equal(before, s.sets()) })
	}
	for name, loaded := range map[string]string{
		"flush ruleset":   "flush ruleset\n" + save,
		"deleted tables":  "delete table inet tombolo\ndelete table bridge tombolo\n" + save,
		"flushed sets":    "flush map inet tombolo hostports4\n" + port,
		"without a flush": save,
		"one map":         port,
		"another address": `add element inet tombolo pods4 { "cbr0" . 10.77.0.99 comment "tombolo:1:` + ident.Hash("podnet", "late", "eth0") + `:podnet" }`,
	} {
		for by, mend := range map[string]func(*testing.T){"tombolod": byTombolod, "the next ADD": byADD, "repair": byRepair} {
			if by == "the next ADD" && (name == "one map" || name == "another address") {
				continue // docs/security.md
			}
			t.Run(name+", "+by, func(t *testing.T) {
				if by == "tombolod" {
					defer s.mind(t).end(t)
				}
				path := filepath.Join(t.TempDir(), "save")
				must.Succeed(t, os.WriteFile(path, []byte(loaded), 0o600))
				s.run("nft", "-f", path)
				if by != "tombolod" {
					o := s.operate("check", "--state", s.state)
					must.That(t, o.status != 0 && strings.Contains(o.stdout, "[repair]"), "check: %s%s", o.stdout, o.stderr)
				}
				mend(t)
				expect.NoDiff(t, cmp.Diff(before, s.sets()))
				s.wantWhole(t, "afterwards")
				expect.Success(t, expect.Err(askPort(t, s.ns, "tcp", uplink4, 8091)), "the port of a pod that came since")
				expect.Failure(t, expect.Err(askPort(t, s.ns, "tcp", uplink4, 8090)), "the port of a pod that went since")
			})
		}
	}
}

// TestNextADDHealsWhatAnEmptiedSetCost shows what pods lose by it, and get back.
func TestNextADDHealsWhatAnEmptiedSetCost(t *testing.T) {
	t.Parallel()
	s := newPopulated(t)
	const foreign4 = "10.77.0.200"
	r := s.w.add(s.pod("r"))
	nstest.Run(t, s.p.NS, "ip", "address", "add", foreign4+"/32", "dev", "eth0")
	nstest.Run(t, s.p.NS, "ip", "route", "add", ip4(r).String(), "dev", "eth0", "src", foreign4)
	for _, tt := range []struct {
		at set
		// has asks for what the pods have by the set's elements, and wants the answer.
		has func(want bool)
	}{
		{set{"inet", "set", "masq4-podnet"}, s.ping(outside4)},
		{set{"inet", "set", "masq6-podnet"}, s.ping(outside6)},
		{set{"inet", "map", "hostports4"}, s.answer(uplink4, 9080)},
		{set{"inet", "map", "hostports6"}, s.answer(uplink6, 9080)},
		{set{"inet", "map", "hostaddrs4"}, s.answer(uplink4, 8081)},
		{set{"inet", "map", "hostaddrs6"}, s.answer(uplink6, 8081)},
		{set{"bridge", "set", "guarded"}, func(want bool) { s.ping(ip4(r).String())(!want) }},
	} {
		tt.has(true)
		s.nft("flush " + tt.at.String())
		tt.has(false)
		next := s.pod("next" + strings.ReplaceAll(tt.at.name, "-", ""))
		s.w.add(next)
		s.w.del(next)
		tt.has(true)
		must.That(t, !t.Failed(), "with %s emptied", tt.at)
	}
	expect.Says(t, expect.Err(s.w.tryAdd(s.pod("taker"), publish(t, "8081:80/tcp"))), "container p", "a port that is published is published again")
	s.wantWhole(t, "after all")
}

// TestADDsInARowLookAtOneNumber has others change nf_tables between two ADDs: the next
// asks for every chain and set, and those after it for the generation alone.
func TestADDsInARowLookAtOneNumber(t *testing.T) {
	t.Parallel()
	nstest.Need(t, "strace")
	n := newNode(t)
	w := n.podnet(nil)
	w.add(n.pod("first"))
	// The fewest of several: events of links may come in between, more or less of them.
	asked := func(name string, before func(round int)) int {
		fewest := math.MaxInt
		for round := range 3 {
			p := n.pod(fmt.Sprintf("%s%d", name, round))
			of := func(verb string) call {
				return call{verb: verb, id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(nil)}
			}
			before(round)
			fewest = min(fewest, len(n.traced(of("ADD"), "recvfrom")))
			n.callOK(of("DEL"))
		}
		return fewest
	}
	w.add(n.pod("second")) // which looks for itself, since the first one has built
	quiet := asked("quiet", func(int) {})
	disturbed := asked("disturbed", func(round int) { n.nft(fmt.Sprintf("add table ip others%d", round)) })
	const sets = 18
	expect.That(t, disturbed >= quiet+sets,
		"an ADD reads %d datagrams, and %d after others' change: it should look at %d sets then, and at none before", quiet, disturbed, sets)
}

// ping gives what wants that a pod reaches an address, or not.
func (s *populated) ping(address string) func(want bool) {
	return func(want bool) {
		if want {
			wantPing(s, s.p.NS, address)
		} else {
			wantNoPing(s, s.p.NS, address)
		}
	}
}

// answer gives what wants that a port leads to a pod, or not: it is refused then.
func (s *populated) answer(at string, port int) func(want bool) {
	return func(want bool) {
		_, err := askPort(s, s.ns, "tcp", at, port)
		expect.That(s, (err == nil) == want, "port %d of %s answers: %t, %v", port, at, err == nil, err)
	}
}
