package cni

import (
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// A node changes from the reference's programs to this one while pods run, and each pod is deleted
// by whichever is there when its time comes. What the other one made is gone then as well.
func TestPodsAreDeletedByTheProgramsOfTheOtherSide(t *testing.T) {
	t.Parallel()
	plugins := []string{"bridge", "portmap", "firewall", "bandwidth"}
	confs := map[string]string{
		"bridge": `{"cniVersion":"1.0.0","name":"net","type":"bridge","bridge":"cni0","isGateway":true,"ipMasq":true,"stateDir":"STATE",
			"ipam":{"type":"host-local","dataDir":"DATA/n","ranges":[[{"subnet":"10.5.0.0/24"}],[{"subnet":"fd05::/64"}]],"routes":[{"dst":"0.0.0.0/0"}]}}`,
		"portmap":   `{"cniVersion":"1.0.0","name":"net","type":"portmap","stateDir":"STATE","runtimeConfig":{"portMappings":[{"hostPort":PORT,"containerPort":80,"protocol":"tcp"}]},"prevResult":PREV}`,
		"firewall":  `{"cniVersion":"1.0.0","name":"net","type":"firewall","stateDir":"STATE","prevResult":PREV}`,
		"bandwidth": `{"cniVersion":"1.0.0","name":"net","type":"bandwidth","stateDir":"STATE","ingressRate":100000000,"ingressBurst":1000000,"egressRate":100000000,"egressBurst":1000000,"prevResult":PREV}`,
	}
	type program func(verb) outcome
	ports := map[string]string{"a": "8080", "b": "8081", "c": "8082"}
	call := func(t *testing.T, run program, name, verbName, id, prev string) outcome {
		t.Helper()
		o := run(verb{plugin: name, verb: verbName, id: id, conf: strings.NewReplacer("PORT", ports[id], "PREV", prev).Replace(confs[name])})
		must.That(t, o.status == 0, "%s by %s: %s%s", verbName, name, o.stdout, o.stderr)
		return o
	}
	add := func(t *testing.T, run program, id string) (result string) {
		t.Helper()
		for _, name := range plugins {
			result = call(t, run, name, "ADD", id, result).stdout
		}
		return result
	}
	del := func(t *testing.T, run program, id, result string) {
		t.Helper()
		for i := range plugins {
			call(t, run, plugins[len(plugins)-1-i], "DEL", id, result)
		}
	}
	for _, tt := range []struct {
		name          string
		first, second func(*side) program
	}{
		{"over", func(s *side) program { return s.reference }, func(s *side) program { return s.call }},
		{"back", func(s *side) program { return s.call }, func(s *side) program { return s.reference }},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			_, s := sides(t)
			first, second := tt.first(s), tt.second(s)
			stays := add(t, first, "b")
			talk := nstest.NewTalk(t, "tcp", s.of("b").NS, netip.MustParseAddrPort("10.5.0.2:80"), s.ns, netip.MustParseAddrPort("127.0.0.1:8081"))
			before := s.holds()
			goes := add(t, first, "a")
			must.That(t, s.holds() != before, "a pod makes no difference to the node, so nothing is shown")
			del(t, second, "a", goes)
			s.end("a")
			expect.Equal(t, cmp.Diff(before, s.holds()), "", "a pod left behind (+)")
			// The pod that stays is none the worse, and its address is not given away.
			talk.Check(t)
			next := add(t, second, "c")
			expect.That(t, !strings.Contains(next, "10.5.0.2/24"), "the pod that stays has lost its address")
			talk.Check(t)
			del(t, second, "c", next)
			del(t, second, "b", stays)
			s.end("b")
			expect.Equal(t, s.files(), "", "reservations are left")
		})
	}
}

// ruleset is that of the node, the tables in an order of their own: the reference makes those of
// the families in no fixed one.
func (s *side) ruleset() string {
	s.Helper()
	tables := strings.SplitAfter(s.run("nft", "-s", "list", "ruleset"), "\n}\n")
	slices.Sort(tables)
	return strings.Join(tables, "")
}

// holds is what the node has: rules, links up to the names of pods' ports, and reservations.
func (s *side) holds() string {
	s.Helper()
	var links []string
	for line := range strings.Lines(s.run("ip", "-br", "link")) {
		name, _, _ := strings.Cut(strings.Fields(line)[0], "@")
		links = append(links, regexp.MustCompile(`^veth.*`).ReplaceAllString(name, "veth"))
	}
	slices.Sort(links)
	// The reference's portmap makes tables when it looks for what is its own there.
	rules := regexp.MustCompile(`table ip6? nat \{\n\}\n`).ReplaceAllString(s.ruleset(), "")
	return rules + strings.Join(links, "\n") + "\n" + s.files()
}

// end is a pod's end after its DEL: its namespace goes, and the operator's command reclaims what
// a program did not know of.
func (s *side) end(id string) {
	s.Helper()
	vanish(s, s.of(id).path)
	o := s.operate("gc", "--state", s.state)
	expect.That(s, o.status == 0, "gc: %s%s", o.stdout, o.stderr)
}

// reference calls the reference's own plugin, also on the side where the name is ours.
func (s *side) reference(v verb) outcome {
	s.Helper()
	named := s.programs
	defer func() { s.programs = named }()
	s.programs = os.Getenv(peersVar)
	return s.call(v)
}

// After going back, the last of Tombolo's pods with a host port takes the way from 127.0.0.1 with it. What
// docs/drop-in.md says then gives it back to the reference's pods.
func TestTheWayFrom127GoesWithTheLastPodAfterGoingBack(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"iptables", "nftables"} {
		nstest.RunParallel(t, backend, func(t *testing.T) {
			s := newSide(t, referenceDir(t), nil)
			main := `{"type":"bridge","isGateway":true,"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24","routes":[{"dst":"0.0.0.0/0"}]}}`
			list := func(port string) []string {
				return []string{main, portmapping(`,"backend":"`+backend+`"`, `{"hostPort":`+port+`,"containerPort":80,"protocol":"tcp"}`)}
			}
			answers := func(port uint16) error {
				_, err := nstest.AskWithin(t, s.ns, "tcp", netip.AddrPortFrom(nstest.Addr("127.0.0.1"), port), 5*time.Second)
				return err
			}
			must.Succeed(t, s.operate("install", "--names", "all", s.programs).err(), "install")
			s.chain("ADD", "a", list("8081"))
			s.of("a").serve(t, "tcp", 80)
			must.Succeed(t, answers(8081))
			must.Succeed(t, s.operate("install", "--undo", s.programs).err(), "undo")
			_, err := os.Stat(filepath.Join(s.programs, "bridge.reference"))
			must.That(t, err != nil, "the reference's plugins have not got their names back")
			s.chain("ADD", "b", list("8082"))
			s.of("b").serve(t, "tcp", 80)
			must.Succeed(t, answers(8082))
			s.chain("DEL", "a", list("8081"))
			vanish(t, s.of("a").path)
			must.Succeed(t, s.operate("gc", "--state", s.state).err(), "gc")
			must.Succeed(t, s.remove("net").err(), "remove")
			expect.Equal(t, nstest.Sysctl(t, s.ns, "net/ipv4/conf/cni0/route_localnet"), "0", "with the last port, route_localnet is")
			nstest.Sysctl(t, s.ns, "net/ipv4/conf/cni0/route_localnet", "1")
			expect.Success(t, answers(8082), "as the document says")

			s.chain("DEL", "b", list("8082"))
			must.Succeed(t, s.operate("install", "--names", "all", s.programs).err(), "install")
			nstest.Sysctl(t, s.ns, "net/ipv4/conf/cni0/route_localnet", "0")
			s.chain("ADD", "c", list("8083"))
			got := nstest.Sysctl(t, s.ns, "net/ipv4/conf/cni0/route_localnet")
			must.That(t, got == "1", "with a port, route_localnet is %s", got)
			s.chain("DEL", "c", list("8083"))
			expect.Equal(t, nstest.Sysctl(t, s.ns, "net/ipv4/conf/cni0/route_localnet"), "0", "after the last DEL route_localnet is")
		})
	}
}
