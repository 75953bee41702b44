package cni

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/fault"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

const attackedBridge = `{"type":"bridge","isGateway":true,"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24","routes":[{"dst":"0.0.0.0/0"}]}}`

// mapped calls portmap for a pod of a chain's with mappings, after the chain's result or another one.
func (s *side) mapped(what, id, prev, more string, mappings ...string) outcome {
	s.Helper()
	return s.call(verb{plugin: "portmap", verb: what, id: id, conf: `{"cniVersion":"1.0.0","name":"net","stateDir":"STATE","prevResult":` + prev + "," +
		strings.TrimPrefix(portmapping(more, mappings...), "{")})
}

func (s *side) wantUnmapped(when string) {
	s.Helper()
	for _, set := range []string{"map inet tombolo hostports4", "map inet tombolo hostaddrs4", "set inet tombolo published4", "set inet tombolo selves4", "set inet tombolo snatall4", "set inet tombolo snatnone4", "set inet tombolo hostclaims"} {
		text, err := nstest.Try(s.ns, "nft", append([]string{"list"}, strings.Fields(set)...)...)
		expect.That(s, err != nil || strings.Count(text, "comment") <= 1, "%s: more than the sentinel is left:\n%s", when, text)
	}
}

// A DEL succeeds with mappings that an ADD refuses: the pod may be one of before.
func TestPortmapByNameDeletesWithMappingsThatItRefuses(t *testing.T) {
	t.Parallel()
	s := newSide(t, referenceDir(t), byName())
	prev := s.chain("ADD", "a", []string{attackedBridge})
	const good = `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`
	for _, mappings := range [][]string{
		{good, `{"hostPort":8080,"containerPort":81,"protocol":"tcp"}`},
		{`{"hostPort":8080,"containerPort":80,"protocol":"tcp","hostIP":"::1"}`},
		{`{"hostPort":70000,"containerPort":80,"protocol":"tcp"}`},
		{`{"hostPort":8080,"containerPort":80,"protocol":"dccp"}`},
		{`{"hostPort":8080,"containerPort":80,"protocol":"tcp","hostIP":"192.0.2.1%x"}`},
	} {
		e := failure(s.mapped("ADD", "a", prev, "", mappings...).stdout)
		expect.That(t, e != nil && e.Code == 7, "ADD with %q: %v, want error 7", mappings, e)
		must.Succeed(t, s.mapped("ADD", "a", prev, "", good).err())
		expect.Success(t, s.mapped("DEL", "a", prev, "", mappings...).err(), "DEL with %q", mappings)
		s.wantUnmapped(fmt.Sprintf("after DEL with %q", mappings))
	}
}

// Mappings on addresses of a family that the pod has none of lead nowhere, and are no error.
func TestPortmapByNamePassesOverTheOtherFamily(t *testing.T) {
	t.Parallel()
	theirs, ours := sides(t)
	for _, mappings := range [][]string{
		{`{"hostPort":8080,"containerPort":80,"protocol":"tcp","hostIP":"::"}`},
		{`{"hostPort":8080,"containerPort":80,"protocol":"tcp","hostIP":"0.0.0.0"}`, `{"hostPort":8080,"containerPort":80,"protocol":"tcp","hostIP":"2001:db8::1"}`},
		{`{"hostPort":8080,"containerPort":80,"protocol":"udp","hostIP":"2001:db8::1"}`, `{"hostPort":8080,"containerPort":81,"protocol":"udp","hostIP":"192.0.2.1"}`},
	} {
		for _, s := range []*side{theirs, ours} {
			s.results["a"] = ""
			prev := s.chain("ADD", "a", []string{attackedBridge})
			s.results["prev"] = prev
		}
		for _, what := range []string{"ADD", "CHECK", "DEL"} {
			if what == "CHECK" && len(mappings) == 1 {
				continue // the reference fails to find the chain that it had no rules for
			}
			agree(t, fmt.Sprintf("%s with %q", what, mappings), theirs.mapped(what, "a", theirs.results["prev"], "", mappings...), ours.mapped(what, "a", ours.results["prev"], "", mappings...))
		}
		for _, s := range []*side{theirs, ours} {
			s.chain("DEL", "a", []string{attackedBridge})
		}
		ours.wantUnmapped("after DEL")
	}
}

// A result of before that means nothing is an error, and leaves nothing.
func TestPortmapByNameTakesNoSenselessResult(t *testing.T) {
	t.Parallel()
	s := newSide(t, referenceDir(t), byName())
	s.outside()
	s.chain("ADD", "a", []string{attackedBridge})
	for _, prev := range []string{`{"ips":[{"address":"10.5.0.2/24","interface":7}],"interfaces":[]}`, `{"ips":[null]}`, `{"ips":[{"address":"10.5.0.2/24","interface":-1}]}`, `[]`, `{"ips":[{"address":"10.5.0.2"}]}`} {
		o := s.mapped("ADD", "a", prev, "", `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`)
		expect.That(t, failure(o.stdout) != nil, "ADD after %s: %s %s", prev, o.stdout, o.stderr)
		s.wantUnmapped(prev)
	}
}

// With some of the sets emptied, what ports had is found, mended and deleted.
func TestHostPortsByNameSurviveWhatOperatorsDelete(t *testing.T) {
	t.Parallel()
	s := newSide(t, referenceDir(t), byName())
	for _, f := range []string{"", "6"} {
		nstest.Sysctl(t, s.ns, "net/bridge/bridge-nf-call-ip"+f+"tables", "0")
	}
	nstest.Sysctl(t, s.ns, "net/ipv4/ip_forward", "1")
	out := s.outside()
	const mapping = `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`
	prev := s.chain("ADD", "a", []string{attackedBridge})
	s.chain("ADD", "b", []string{attackedBridge})
	s.of("a").serve(t, "tcp", 80)
	must.Succeed(t, s.mapped("ADD", "a", prev, `,"masqAll":true`, mapping).err())
	answers := func(when string) {
		t.Helper()
		for name, from := range map[string]*pod{"another pod": s.of("b"), "itself": s.of("a")} {
			expect.Success(t, expect.Err(nstest.AskWithin(t, from.NS, "tcp", netip.MustParseAddrPort(uplink4+":8080"), 5*time.Second)), "%s, %s", when, name)
		}
		expect.Success(t, expect.Err(nstest.AskWithin(t, out, "tcp", netip.MustParseAddrPort(uplink4+":8080"), 5*time.Second)), "%s, from outside", when)
	}
	answers("at first")
	for _, flush := range []string{"flush set inet tombolo snatall4", "delete chain inet tombolo hostports-snat", "flush chain inet tombolo hostports-snat", "flush map inet tombolo hostports4"} {
		s.run("nft", flush)
		o := s.operate("check", "--state", s.state)
		expect.That(t, o.status == 4, "check after %s ends with %d: %s%s", flush, o.status, o.stdout, o.stderr)
		o = s.operate("repair", "--state", s.state)
		expect.That(t, o.status == 0, "repair after %s: %s%s", flush, o.stdout, o.stderr)
		answers("after " + flush + " and a repair")
	}
	expect.Success(t, s.mapped("DEL", "a", prev, "", mapping).err())
	s.wantUnmapped("at the end")
}

// Whatever call of a verb fails, or is its last, the next DEL leaves nothing; and an ADD that fails undoes itself.
func TestPortmapByNameMayMeetAFaultAtAnyCall(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"ADD", "DEL"} {
		nstest.RunParallel(t, what, func(t *testing.T) {
			side := newSide(t, referenceDir(t), byName())
			nstest.Sysctl(t, side.ns, "net/ipv6/conf/default/accept_dad", "0")
			side.outside()
			prev := side.chain("ADD", "a", []string{attackedBridge})
			const mapping = `{"hostPort":8080,"containerPort":80,"protocol":"udp"}`
			c := call{verb: what, id: "a", netns: side.of("a").path, ifName: "eth0", program: filepath.Join(side.programs, "portmap")}
			c.stdin = []byte(strings.NewReplacer("STATE", side.state, "POD", c.netns).Replace(`{"cniVersion":"1.0.0","name":"net","stateDir":"STATE","prevResult":` + prev + "," +
				strings.TrimPrefix(portmapping("", mapping), "{")))
			other := func(verb string) outcome { return side.mapped(verb, "a", prev, "", mapping) }
			s := &sweeper{node: side.node}
			s.verb = func(string) call {
				side.run("nft", "add table ip churn; delete table ip churn") // so that each call has to look
				if what == "DEL" {
					expect.Success(t, other("ADD").err(), "ADD before it")
				}
				return c
			}
			rounds := 0
			s.after = func(f *faulty, _ string, before nstest.Snapshot) {
				if what == "ADD" && f.Kind == fault.Error && f.status > 0 && !f.unprinted() {
					side.wantSnapshot(f.String()+", undone", before.Plus(side.leavings()...))
				}
				if rounds++; what == "ADD" && rounds%2 == 0 {
					expect.Success(t, other("ADD").err(), "%s: an ADD after it", f)
				}
				expect.Success(t, other("DEL").err(), "%s: a DEL after it", f)
				side.wantUnmapped(f.String())
				o := side.call(verb{plugin: "portmap", verb: "GC", id: "a", conf: `{"cniVersion":"1.1.0","name":"net","stateDir":"STATE","cni.dev/valid-attachments":[]}`})
				expect.That(t, o.status == 0, "%s: GC: %s", f, o.stdout)
				// What a kill left half written the next call that writes the record writes over.
				for _, verb := range []string{"ADD", "DEL"} {
					expect.Success(t, other(verb).err(), "%s: %s at the end", f, verb)
				}
			}
			s.sweep(t)
		})
	}
}

// Of an ADD that comes again with other ports, or without masqAll, nothing is left either, wherever it is killed
// from the writing of its record on.
func TestPortmapByNameLeavesNothingOfWhatAnADDWasToReplace(t *testing.T) {
	t.Parallel()
	const first, masqAll = `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`, `,"masqAll":true`
	for name, tt := range map[string]struct {
		more, second string
	}{
		"the pod loses masqAll":     {"", first},
		"the pod gets another port": {masqAll, `{"hostPort":8081,"containerPort":80,"protocol":"tcp"}`},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			s := newSide(t, referenceDir(t), byName())
			prev := s.chain("ADD", "a", []string{attackedBridge})
			again := call{verb: "ADD", id: "a", netns: s.of("a").path, ifName: "eth0", program: filepath.Join(s.programs, "portmap")}
			again.stdin = []byte(strings.NewReplacer("STATE", s.state, "POD", again.netns).Replace(`{"cniVersion":"1.0.0","name":"net","stateDir":"STATE","prevResult":` + prev + "," +
				strings.TrimPrefix(portmapping(tt.more, tt.second), "{")))
			replaced := func(f fault.Fault) *faulty {
				must.Succeed(t, s.mapped("ADD", "a", prev, masqAll, first).err())
				return s.callFaulty(again, f)
			}
			var calls []string
			if f := replaced(fault.Fault{Before: func(call string) { calls = append(calls, call) }}); f.status != 0 {
				t.Fatal(f)
			}
			written := slices.IndexFunc(calls, func(call string) bool { return strings.HasPrefix(call, "rename") })
			must.That(t, written >= 0, "no record is written by %q", calls)
			for i, call := range calls {
				if i <= written || !strings.HasPrefix(call, "send") && !strings.HasPrefix(call, "rename") {
					continue // nothing changes by it
				}
				for _, what := range []string{"DEL", "ADD"} {
					f := replaced(fault.Fault{At: i + 1, Kind: fault.Kill})
					expect.Success(t, s.mapped(what, "a", prev, tt.more, tt.second).err(), "%s: %s after it", f, what)
					expect.Success(t, s.mapped("DEL", "a", prev, tt.more, tt.second).err(), "%s: DEL after it", f)
					s.wantUnmapped(fmt.Sprintf("%s, then %s", f, what))
					if t.Failed() {
						return
					}
				}
			}
		})
	}
}

// A link has as many alternative names as fit into 64 KiB, and every request for the link is answered with all of them. A
// pod gives them to each of its links; no verb by any name fails for it.
func TestManyNamesOfAPodsLinksStopNoVerb(t *testing.T) {
	t.Parallel()
	const tune = `{"type":"tuning","dataDir":"DATA/t","mtu":1400}`
	const limit = `{"type":"bandwidth","ingressRate":8000000,"ingressBurst":800000,"egressRate":8000000,"egressBurst":800000}`
	publish := portmapping("", `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`)
	plugins := []string{attackedBridge, tune, publish, `{"type":"firewall","backend":"iptables"}`, limit}
	s := newSide(t, referenceDir(t), append(byName(), "loopback"))
	s.results["a"] = s.chain("ADD", "a", plugins)
	var commands strings.Builder
	for _, link := range []string{"eth0", "lo"} {
		for i := range 496 { // the kernel takes no more of this length
			fmt.Fprintf(&commands, "link property add dev %s altname %s%0123d\n", link, link, i)
		}
	}
	dir := t.TempDir()
	nstest.PutFile(t, dir, "names", commands.String())
	nstest.Run(t, s.of("a").NS, "ip", "-batch", filepath.Join(dir, "names"))

	for i := range plugins {
		s.chain("CHECK", "a", plugins[i:i+1])
	}
	o := s.operate("check", "--state", s.state)
	expect.That(t, o.status == 0, "check: %s%s", o.stdout, o.stderr)
	for _, plugin := range plugins[1:] {
		again := `{"cniVersion":"1.0.0","name":"net","stateDir":"STATE","prevResult":` + s.results["a"] + "," + strings.TrimPrefix(plugin, "{")
		name := regexp.MustCompile(`"type":"([a-z]+)"`).FindStringSubmatch(plugin)[1]
		expect.Success(t, s.call(verb{plugin: name, verb: "ADD", id: "a", conf: again}).err(), "ADD of %s again", name)
	}
	lo := verb{plugin: "loopback", id: "a", ifName: "lo", conf: `{"cniVersion":"1.0.0","name":"lo"}`}
	for _, lo.verb = range []string{"ADD", "CHECK", "DEL"} {
		expect.Success(t, s.call(lo).err(), "%s of lo", lo.verb)
	}
	s.chain("DEL", "a", plugins)
	s.wantUnmapped("after DEL")
	expect.Equal(t, s.run("ip", "-br", "link", "show", "type", "veth")+s.run("ip", "-br", "link", "show", "type", "ifb")+s.files(), "", "DEL leaves")
}

// A pod may have any number of routes. What looks for those that it should have keeps none of them in memory: a repair of all
// pods would end for want of it.
func TestManyRoutesOfAPodTakeNoMemory(t *testing.T) {
	t.Parallel()
	const most = 64 << 10 // KiB
	s := newSide(t, referenceDir(t), byName())
	s.chain("ADD", "a", []string{attackedBridge})
	var commands strings.Builder
	for i := range 100_000 {
		fmt.Fprintf(&commands, "route add 20.%d.%d.%d dev eth0\n", i>>16, i>>8&0xff, i&0xff)
	}
	dir := t.TempDir()
	nstest.PutFile(t, dir, "routes", commands.String())
	pod := s.of("a").NS
	nstest.Run(t, pod, "ip", "-batch", filepath.Join(dir, "routes"))
	nstest.Run(t, pod, "ip", "route", "del", "default")
	for _, verb := range []string{"repair", "check"} {
		cmd := exec.Command(command(), verb, "--state", s.state)
		var out strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &out
		must.Succeed(t, s.ns.Do(cmd.Start))
		used := peakOf(cmd.Process.Pid)
		err := cmd.Wait()
		expect.That(t, err == nil, "%s: %v: %s", verb, err, &out)
		expect.That(t, used != 0 && used <= most, "%s took %d KiB", verb, used)
	}
	expect.Equal(t, nstest.Run(t, pod, "ip", "route", "show", "default"), "", "the default route, which is the pod's own matter, after repair")
}

// peakOf is how much memory a process took that has begun its program, in KiB, once it has ended. What wait4(2) tells
// is not less than what the test itself took when it began the process.
func peakOf(pid int) (peak int) {
	for ; ; time.Sleep(time.Millisecond) {
		status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		_, line, found := strings.Cut(string(status), "\nVmHWM:")
		if !found {
			return peak
		}
		if _, err := fmt.Sscan(line, &peak); err != nil {
			return 0
		}
	}
}
