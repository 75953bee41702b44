package cni

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/internal/nstest/fault"
)

const attackedBridge = `{"type":"bridge","isGateway":true,"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24","routes":[{"dst":"0.0.0.0/0"}]}}`

// mapped calls portmap for a pod of a chain's with mappings, after the chain's result or another one.
func (s *side) mapped(what, id, prev, more string, mappings ...string) outcome {
	s.Helper()
	return s.call(verb{plugin: "portmap", verb: what, id: id, conf: `{"cniVersion":"1.0.0","name":"net","stateDir":"STATE","prevResult":` + prev + "," +
		strings.TrimPrefix(portmapping(more, mappings...), "{")})
}

// wantUnmapped looks for anything that ports have left.
func (s *side) wantUnmapped(when string) {
	s.Helper()
	if left, _ := filepath.Glob(s.state + "/others/net/*.json"); len(left) > 0 {
		s.Errorf("%s: records are left: %q", when, left)
	}
	for _, set := range []string{"map inet tombolo hostports4", "map inet tombolo hostaddrs4", "set inet tombolo published4", "set inet tombolo selves4", "set inet tombolo snatlink4", "set inet tombolo snatall4", "set inet tombolo snatnone4", "set inet tombolo hostclaims"} {
		if text, err := nstest.Try(s.ns, "nft", append([]string{"list"}, strings.Fields(set)...)...); err == nil && strings.Count(text, "comment") > 1 {
			s.Errorf("%s: more than the sentinel is left:\n%s", when, text)
		}
	}
}

// A DEL succeeds with mappings that an ADD refuses: the pod may be one of before.
func TestPortmapByNameDeletesWithMappingsThatItRefuses(t *testing.T) {
	t.Parallel()
	s := newSide(t, referenceDir(t), []string{"portmap"})
	prev := s.chain("ADD", "a", []string{attackedBridge})
	const good = `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`
	for _, mappings := range [][]string{
		{good, `{"hostPort":8080,"containerPort":81,"protocol":"tcp"}`},
		{`{"hostPort":8080,"containerPort":80,"protocol":"tcp","hostIP":"::1"}`},
		{`{"hostPort":70000,"containerPort":80,"protocol":"tcp"}`},
		{`{"hostPort":8080,"containerPort":80,"protocol":"dccp"}`},
		{`{"hostPort":8080,"containerPort":80,"protocol":"tcp","hostIP":"192.0.2.1%x"}`},
	} {
		if e := failure(s.mapped("ADD", "a", prev, "", mappings...).stdout); e == nil || e.Code != 7 {
			t.Errorf("ADD with %q: %v, want error 7", mappings, e)
		}
		if o := s.mapped("ADD", "a", prev, "", good); o.status != 0 {
			t.Fatal(o.stdout)
		}
		if o := s.mapped("DEL", "a", prev, "", mappings...); o.status != 0 {
			t.Errorf("DEL with %q: %s", mappings, o.stdout)
		}
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

// A result of before that names no address by which a port could lead to a pod is an error, and leaves nothing.
func TestPortmapByNameTakesNoAddressesOfTheHosts(t *testing.T) {
	t.Parallel()
	s := newSide(t, referenceDir(t), []string{"portmap"})
	s.outside()
	s.chain("ADD", "a", []string{attackedBridge})
	for _, address := range []string{
		"127.0.0.1/8", uplink4 + "/24", "10.5.0.1/24", "0.0.0.0/0", "224.0.0.1/4", "255.255.255.255/32", "10.5.0.255/24", "::1/128", uplink6 + "/64", "ff02::1/8", "::ffff:127.0.0.1/128", "203.0.113.9/32",
	} {
		prev := `{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"POD"}],"ips":[{"address":"` + address + `","interface":0}]}`
		o := s.mapped("ADD", "a", prev, "", `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`)
		if e := failure(o.stdout); address != "203.0.113.9/32" && (e == nil || o.stderr != "" && strings.Contains(o.stderr, "goroutine")) {
			t.Errorf("ADD with %s: %s %s", address, o.stdout, o.stderr)
		}
		if o := s.mapped("DEL", "a", prev, "", `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`); o.status != 0 {
			t.Errorf("DEL with %s: %s", address, o.stdout)
		}
		s.wantUnmapped(address)
	}
	for _, prev := range []string{`{}`, `{"ips":[{"address":"10.5.0.2/24","interface":7}],"interfaces":[]}`, `{"ips":[null]}`, `{"ips":[{"address":"10.5.0.2/24","interface":-1}]}`, `[]`, `{"ips":[{"address":"10.5.0.2"}]}`} {
		o := s.mapped("ADD", "a", prev, "", `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`)
		if e := failure(o.stdout); e == nil {
			t.Errorf("ADD after %s: %s %s", prev, o.stdout, o.stderr)
		}
		s.wantUnmapped(prev)
	}
}

// Without the records, or with some of the sets emptied, what ports had is found, mended and deleted.
func TestHostPortsByNameSurviveWhatOperatorsDelete(t *testing.T) {
	t.Parallel()
	s := newSide(t, referenceDir(t), []string{"portmap"})
	for _, f := range []string{"", "6"} {
		nstest.Sysctl(t, s.ns, "net/bridge/bridge-nf-call-ip"+f+"tables", "0")
	}
	nstest.Sysctl(t, s.ns, "net/ipv4/ip_forward", "1")
	out := s.outside()
	const mapping = `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`
	prev := s.chain("ADD", "a", []string{attackedBridge})
	other := s.chain("ADD", "b", []string{attackedBridge})
	s.of("a").serve(t, "tcp", 80)
	if o := s.mapped("ADD", "a", prev, "", mapping); o.status != 0 {
		t.Fatal(o.stdout)
	}
	answers := func(when string) {
		t.Helper()
		for name, from := range map[string]*pod{"another pod": s.of("b"), "itself": s.of("a")} {
			if _, err := nstest.AskWithin(t, from.NS, "tcp", netip.MustParseAddrPort(uplink4+":8080"), 5*time.Second); err != nil {
				t.Errorf("%s, %s: %v", when, name, err)
			}
		}
		if _, err := nstest.AskWithin(t, out, "tcp", netip.MustParseAddrPort(uplink4+":8080"), 5*time.Second); err != nil {
			t.Errorf("%s, from outside: %v", when, err)
		}
	}
	answers("at first")
	for _, flush := range []string{"flush set inet tombolo snatlink4", "delete chain inet tombolo hostports-snat", "flush chain inet tombolo hostports-snat", "flush map inet tombolo hostports4"} {
		s.run("nft", flush)
		if o := s.operate("check", "--state", s.state); o.status != 4 {
			t.Errorf("check after %s ends with %d: %s%s", flush, o.status, o.stdout, o.stderr)
		}
		if o := s.operate("repair", "--state", s.state); o.status != 0 {
			t.Errorf("repair after %s: %s%s", flush, o.stdout, o.stderr)
		}
		answers("after " + flush + " and a repair")
	}
	// The records are lost: the port is nobody's any more once its pod is gone, and gc finds it.
	if err := os.RemoveAll(s.state + "/others"); err != nil {
		t.Fatal(err)
	}
	if o := s.mapped("DEL", "a", prev, "", mapping); o.status != 0 {
		t.Error(o.stdout)
	}
	s.chain("DEL", "a", []string{attackedBridge})
	if o := s.mapped("ADD", "b", other, "", mapping); o.status != 0 {
		t.Errorf("ADD of the same port: %s", o.stdout)
	}
	if o := s.operate("gc", "--state", s.state); o.status != 0 {
		t.Errorf("gc: %s%s", o.stdout, o.stderr)
	}
	if o := s.mapped("DEL", "b", other, "", mapping); o.status != 0 {
		t.Error(o.stdout)
	}
	s.wantUnmapped("at the end")
}

// Whatever call of a verb fails, or is its last, the next DEL leaves nothing; and an ADD that fails undoes itself.
func TestPortmapByNameMayMeetAFaultAtAnyCall(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"ADD", "DEL"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			side := newSide(t, referenceDir(t), []string{"portmap"})
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
					if o := other("ADD"); o.status != 0 {
						t.Errorf("ADD before it: %s", o.stdout)
					}
				}
				return c
			}
			rounds := 0
			s.after = func(f *faulty, _ string, before nstest.Snapshot) {
				if what == "ADD" && f.Kind == fault.Error && f.status > 0 && !f.unprinted() {
					side.wantSnapshot(f.String()+", undone", before.Plus(side.leavings()...))
				}
				if rounds++; what == "ADD" && rounds%2 == 0 {
					if o := other("ADD"); o.status != 0 {
						t.Errorf("%s: an ADD after it: %s", f, o.stdout)
					}
				}
				if o := other("DEL"); o.status != 0 {
					t.Errorf("%s: a DEL after it: %s", f, o.stdout)
				}
				side.wantUnmapped(f.String())
				if o := side.call(verb{plugin: "portmap", verb: "GC", id: "a", conf: `{"cniVersion":"1.1.0","name":"net","stateDir":"STATE","cni.dev/valid-attachments":[]}`}); o.status != 0 {
					t.Errorf("%s: GC: %s", f, o.stdout)
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
		ours         []string
		more, second string
	}{
		"our pod loses masqAll":           {byName(), "", first},
		"our pod gets another port":       {byName(), masqAll, `{"hostPort":8081,"containerPort":80,"protocol":"tcp"}`},
		"another's pod gets another port": {[]string{"portmap"}, "", `{"hostPort":8080,"containerPort":81,"protocol":"tcp"}`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSide(t, referenceDir(t), tt.ours)
			prev := s.chain("ADD", "a", []string{attackedBridge})
			again := call{verb: "ADD", id: "a", netns: s.of("a").path, ifName: "eth0", program: filepath.Join(s.programs, "portmap")}
			again.stdin = []byte(strings.NewReplacer("STATE", s.state, "POD", again.netns).Replace(`{"cniVersion":"1.0.0","name":"net","stateDir":"STATE","prevResult":` + prev + "," +
				strings.TrimPrefix(portmapping(tt.more, tt.second), "{")))
			replaced := func(f fault.Fault) *faulty {
				if o := s.mapped("ADD", "a", prev, masqAll, first); o.status != 0 {
					t.Fatal(o.stdout)
				}
				return s.callFaulty(again, f)
			}
			var calls []string
			if f := replaced(fault.Fault{Before: func(call string) { calls = append(calls, call) }}); f.status != 0 {
				t.Fatal(f)
			}
			written := slices.IndexFunc(calls, func(call string) bool { return strings.HasPrefix(call, "rename") })
			if written < 0 {
				t.Fatalf("no record is written by %q", calls)
			}
			for i, call := range calls {
				if i <= written || !strings.HasPrefix(call, "send") && !strings.HasPrefix(call, "rename") {
					continue // nothing changes by it
				}
				for _, what := range []string{"DEL", "ADD"} {
					f := replaced(fault.Fault{At: i + 1, Kind: fault.Kill})
					if o := s.mapped(what, "a", prev, tt.more, tt.second); o.status != 0 {
						t.Errorf("%s: %s after it: %s", f, what, o.stdout)
					}
					if o := s.mapped("DEL", "a", prev, tt.more, tt.second); o.status != 0 {
						t.Errorf("%s: DEL after it: %s", f, o.stdout)
					}
					s.wantUnmapped(fmt.Sprintf("%s, then %s", f, what))
					if t.Failed() {
						return
					}
				}
			}
		})
	}
}

// Another program's IPAM gives a pod what addresses it likes, and so does a DHCP server that it asks. Neither
// the host's own nor those of another pod are let through, or get ports of the host, in its name; and what that pod
// has in the firewall stays when it goes.
func TestAddressesOfTheHostsOrAnotherPodsAreNotAdmittedInAPodsName(t *testing.T) {
	t.Parallel()
	_, s := sides(t)
	s.chain("ADD", "a", []string{`{"type":"bridge","bridge":"cni0","isGateway":true,"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24"}}`})
	thief := s.of("b")
	s.ip("link add vb type veth peer name eth0 netns " + thief.path)
	s.ip("link set vb up")
	s.ip("address add 10.6.0.1/24 dev vb")
	firewall := func() string { return nstest.Run(t, s.ns, "nft", "list", "set", "inet", "tombolo", "pods4") }
	before := firewall()
	for _, tt := range []struct{ address, want string }{
		{"10.5.0.2", "has an address of another pod's"},
		{"10.5.0.1", "or it is its own"},
		{"10.6.0.1", "or it is its own"},
		{"127.0.0.1", "or it is its own"},
		{"10.6.0.2", ""},
	} {
		for _, plugin := range []string{`"type":"firewall","backend":"iptables"`, strings.Trim(portmapping("", `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`), "{}") + "}"} {
			name := strings.Split(plugin, `"`)[3]
			conf := fmt.Sprintf(`{"cniVersion":"1.0.0","name":"other","stateDir":"STATE",%s,"prevResult":{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"POD"}],"ips":[{"address":"%s/24","interface":0}]}}`, plugin, tt.address)
			o := s.call(verb{plugin: name, verb: "ADD", id: "b", conf: conf})
			want := tt.want
			if name == "firewall" && strings.Contains(want, "its own") {
				want = "" // it is let pass, and nothing with it
			}
			if got := o.stdout; (o.status == 0) != (want == "") || !strings.Contains(got, want) {
				t.Errorf("%s of %s: status %d, %s", name, tt.address, o.status, got)
			}
			if during := firewall(); tt.want != "" && during != before {
				t.Errorf("%s of %s makes\n%s\nof\n%s", name, tt.address, during, before)
			}
			if o := s.call(verb{plugin: name, verb: "DEL", id: "b", conf: conf}); o.status != 0 {
				t.Errorf("DEL of %s of %s: %s", name, tt.address, o.stdout)
			}
			if after := firewall(); after != before {
				t.Errorf("%s of %s left\n%s\nwhere there was\n%s", name, tt.address, after, before)
			}
		}
	}
}

// A record of another program's pod that is damaged stops neither its DEL nor another ADD: what it had in the
// firewall goes by its name.
func TestDamagedRecordsOfOtherProgramsPodsStopNothing(t *testing.T) {
	t.Parallel()
	_, s := sides(t)
	p := s.of("b")
	s.ip("link add vb type veth peer name eth0 netns " + p.path)
	s.ip("link set vb up")
	s.ip("address add 10.6.0.1/24 dev vb")
	verbOf := func(what, plugin, fields string) outcome {
		return s.call(verb{plugin: plugin, verb: what, id: "b", conf: fmt.Sprintf(`{"cniVersion":"1.1.0","name":"other","stateDir":"STATE","type":%q%s,"prevResult":{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","sandbox":"POD"}],"ips":[{"address":"10.6.0.2/24","interface":0}]}}`, plugin, fields)})
	}
	const ports, iptables = `,"runtimeConfig":{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]}`, `,"backend":"iptables"`
	const none = `,"cni.dev/valid-attachments":[]`
	damages := map[string]func(path string) error{
		"a directory":       func(path string) error { return os.Mkdir(path, 0o700) },
		"a full directory":  func(path string) error { return os.MkdirAll(path+"/of/others", 0o700) },
		"a symbolic link":   func(path string) error { return os.Symlink("/etc/passwd", path) },
		"a link to nowhere": func(path string) error { return os.Symlink("nowhere", path) },
		"a pipe":            func(path string) error { return unix.Mkfifo(path, 0o600) },
	}
	for what, text := range map[string]string{"nothing": "", "half a record": "{", "far too much": strings.Repeat(" ", 1<<20)} {
		damages[what] = func(path string) error { return os.WriteFile(path, []byte(text), 0o600) }
	}
	for _, next := range []struct{ what, plugin, fields string }{
		{"DEL", "portmap", ports}, {"DEL", "firewall", iptables}, {"ADD", "portmap", ports}, {"ADD", "firewall", iptables},
		{"GC", "portmap", none},
	} {
		for damage, spoil := range damages {
			if o := verbOf("ADD", "portmap", ports); o.status != 0 {
				t.Fatal(o.stdout)
			}
			records, err := filepath.Glob(s.state + "/others/other/*.json")
			if err != nil || len(records) != 1 {
				t.Fatalf("records %q, %v", records, err)
			}
			if err := errors.Join(os.Remove(records[0]), spoil(records[0])); err != nil {
				t.Fatal(err)
			}
			if o := verbOf("CHECK", "portmap", ports); o.status == 0 {
				t.Errorf("CHECK by a record that is %s: %s", damage, o.stdout)
			}
			if o := s.operate("gc", "--state", s.state); o.status != 0 || !strings.Contains(o.stderr, records[0]) {
				t.Errorf("gc by a record that is %s: %+v", damage, o)
			}
			if o := verbOf("GC", "portmap", `,"cni.dev/valid-attachments":[{"containerID":"b","ifname":"eth0"}]`); o.status != 0 {
				t.Errorf("GC that keeps a pod by a record that is %s: %s", damage, o.stdout)
			}
			if _, err := os.Lstat(records[0]); err != nil {
				t.Errorf("GC that keeps a pod by a record that is %s: %v", damage, err)
			}
			if o := verbOf(next.what, next.plugin, next.fields); o.status != 0 {
				t.Errorf("%s of %s by a record that is %s: %s", next.what, next.plugin, damage, o.stdout)
			}
			if next.what != "ADD" || next.plugin == "firewall" {
				if rules := nstest.Run(t, s.ns, "nft", "list", "map", "inet", "tombolo", "hostports4"); strings.Contains(rules, "10.6.0.2") {
					t.Errorf("%s of %s left a port: %s", next.what, next.plugin, rules)
				}
			}
			if left, _ := filepath.Glob(s.state + "/others/other/*"); next.what != "ADD" && len(left) > 0 {
				t.Errorf("%s of %s by a record that is %s left %q", next.what, next.plugin, damage, left)
			}
			verbOf("DEL", "portmap", ports)
			verbOf("DEL", "firewall", iptables)
			if left, _ := filepath.Glob(s.state + "/others/other/*"); len(left) > 0 {
				t.Errorf("left %q", left)
			}
		}
	}
}
