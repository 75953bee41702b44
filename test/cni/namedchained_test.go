package cni

import (
	"cmp"
	"encoding/json"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/fault"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// What a configuration of a chained plugin cannot mean is an error by name where it is one of the reference's, and what
// it passes over is passed over.
func TestChainedPluginsByNameTakeWhatTheReferencesDo(t *testing.T) {
	t.Parallel()
	theirs, ours := sides(t)
	for _, s := range []*side{theirs, ours} {
		s.chain("ADD", "a", []string{attackedBridge})
	}
	const prev = `"prevResult":{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"POD"}],"ips":[{"address":"10.5.0.2/24","interface":0}],"dns":{}}`
	mapped := func(mapping string) string {
		return `"runtimeConfig":{"portMappings":[{` + mapping + `}]},` + prev
	}
	for i, v := range []verb{
		{plugin: "portmap", verb: "ADD", conf: `"snat":true`}, {plugin: "portmap", verb: "ADD", conf: prev}, {plugin: "portmap", verb: "ADD", conf: `"runtimeConfig":{"portMappings":[]},` + prev},
		{plugin: "portmap", verb: "ADD", conf: mapped(`"hostPort":0,"containerPort":80,"protocol":"tcp"`)}, {plugin: "portmap", verb: "ADD", conf: mapped(`"hostPort":80,"containerPort":-1,"protocol":"tcp"`)},
		{plugin: "portmap", verb: "ADD", conf: `"markMasqBit":32,` + prev}, {plugin: "portmap", verb: "ADD", conf: `"markMasqBit":13,"snat":false,"unknown":1,` + prev},
		{plugin: "portmap", verb: "ADD", conf: `"markMasqBit":1,"externalSetMarkChain":"X",` + prev}, {plugin: "portmap", verb: "ADD", conf: `"backend":"ipfw",` + prev}, {plugin: "portmap", verb: "ADD", conf: `"snat":"yes",` + prev},
		{plugin: "portmap", verb: "CHECK", conf: `"snat":true`}, {plugin: "portmap", verb: "CHECK", conf: prev}, {plugin: "portmap", verb: "CHECK", conf: mapped(`"hostPort":8080,"containerPort":80,"protocol":"tcp"`)},
		{plugin: "portmap", verb: "DEL", conf: `"snat":true`}, {plugin: "portmap", verb: "DEL", conf: mapped(`"hostPort":8080,"containerPort":80,"protocol":"tcp"`)},
		{plugin: "bandwidth", verb: "ADD", conf: prev}, {plugin: "bandwidth", verb: "ADD", conf: `"ingressRate":8000,` + prev}, {plugin: "bandwidth", verb: "ADD", conf: `"egressBurst":8000,` + prev},
		{plugin: "bandwidth", verb: "ADD", conf: `"ingressRate":8000,"ingressBurst":8000`}, {plugin: "bandwidth", verb: "ADD", conf: `"ingressRate":8000,"ingressBurst":800000000000,` + prev},
		{plugin: "bandwidth", verb: "ADD", conf: `"ingressRate":0,"ingressBurst":0,"runtimeConfig":{"bandwidth":{"ingressRate":8000000,"ingressBurst":8000}},` + prev},
		{plugin: "bandwidth", verb: "DEL", conf: `"ingressRate":8000,"ingressBurst":8000`},
		{plugin: "firewall", verb: "ADD", conf: `"ingressPolicy":"open"`}, {plugin: "firewall", verb: "ADD", conf: `"ingressPolicy":"half-open",` + prev},
		{plugin: "firewall", verb: "DEL", conf: `"ingressPolicy":"open"`}, {plugin: "firewall", verb: "DEL", conf: prev}, {plugin: "firewall", verb: "CHECK", conf: `"ingressPolicy":"open"`},
		{plugin: "firewall", verb: "VERSION"}, {plugin: "bandwidth", verb: "VERSION"}, {plugin: "portmap", verb: "VERSION"},
		{plugin: "firewall", verb: "STATUS", conf: `"x":1`}, {plugin: "portmap", verb: "GC", conf: `"cni.dev/valid-attachments":[]`},
	} {
		v.id = "a"
		name := fmt.Sprintf("%d, %s of %s with %s", i, v.verb, v.plugin, v.conf)
		version := "1.0.0"
		if v.verb == "STATUS" || v.verb == "GC" {
			version = "1.1.0"
		}
		v.conf = `{"cniVersion":"` + version + `","name":"net","stateDir":"STATE","type":"` + v.plugin + `",` + v.conf + `}`
		if v.verb == "VERSION" {
			v.conf = `{"cniVersion":"1.0.0"}`
		}
		agree(t, name, theirs.call(v), ours.call(v))
	}
	for _, v := range []verb{
		{plugin: "portmap", conf: `"conditionsV4":["-s","10.0.0.1"],` + mapped(`"hostPort":8080,"containerPort":80`)}, {plugin: "portmap", conf: `"conditionsV6":["ip6 saddr fd00::1"],` + mapped(`"hostPort":8080,"containerPort":80`)},
	} {
		v.verb, v.id, v.conf = "ADD", "a", `{"cniVersion":"1.0.0","name":"net","stateDir":"STATE",`+v.conf+`}`
		e := failure(ours.call(v).stdout)
		expect.That(t, e != nil && e.Code == 2, "%s: %v, want error 2", v.conf, e)
	}
}

// Whole chains at once, by names alone, give each pod what it asks for, and leave nothing.
func TestChainsByNameAtOnce(t *testing.T) {
	t.Parallel()
	const main = `{"type":"bridge","isGateway":true,"ipMasq":true,"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24"}}`
	s := newSide(t, referenceDir(t), byName())
	var sides []*side
	for i := range 8 {
		s.of(fmt.Sprint(i))
		one := *s
		one.results = map[string]string{}
		sides = append(sides, &one)
	}
	each := func(what string) {
		t.Helper()
		nstest.NoErrors(t, what, nstest.AtOnce(sides, func(i int, one *side) error {
			one.chain(what, fmt.Sprint(i), []string{
				main, portmapping("", fmt.Sprintf(`{"hostPort":%d,"containerPort":80,"protocol":"tcp"}`, 8000+i)), `{"type":"firewall","ingressPolicy":"same-bridge"}`,
				`{"type":"bandwidth","ingressRate":80000000,"ingressBurst":800000,"egressRate":40000000,"egressBurst":400000}`,
			})
			return nil
		}))
		o := s.operate("check", "--state", s.state)
		expect.That(t, o.status == 0, "check after %s: %s%s", what, o.stdout, o.stderr)
	}
	each("ADD")
	n := strings.Count(s.run("nft", "list", "map", "inet", "tombolo", "hostports4"), "tcp . 80")
	expect.That(t, n == len(sides), "%d ports lead to pods, want %d", n, len(sides))
	each("DEL")
	left, _ := filepath.Glob(s.state + "/*/net/*.json")
	expect.That(t, len(left) == 0, "records are left: %q", left)
	rules := s.run("nft", "list", "table", "inet", "tombolo")
	expect.That(t, !regexp.MustCompile(`10\.5\.0\.[1-9]|tcp \. 80`).MatchString(rules), "elements are left:\n%s", rules)
}

// chain runs the plugins of a list for a pod as libcni does, and gives the last result; the types
// say which.
func (s *side) chain(what, id string, plugins []string) string {
	s.Helper()
	prev := ""
	order := plugins
	if what == "DEL" {
		order = nil
		for i := range plugins {
			order = append(order, plugins[len(plugins)-1-i])
		}
	}
	for _, plugin := range order {
		var conf struct{ Type string }
		must.Succeed(s, json.Unmarshal([]byte(plugin), &conf))
		full := `{"cniVersion":"1.0.0","name":"` + cmp.Or(s.network, "net") + `","stateDir":"STATE",` + strings.TrimPrefix(plugin, "{")
		if prev == "" && what != "ADD" {
			prev = s.results[id]
		}
		if prev != "" {
			full = strings.TrimSuffix(full, "}") + `,"prevResult":` + prev + "}"
		}
		o := s.call(verb{plugin: conf.Type, verb: what, id: id, conf: full})
		if o.status != 0 {
			s.Errorf("%s of %s by %s: %s", what, id, conf.Type, o.stdout)
			return ""
		}
		if what == "ADD" {
			prev = o.stdout
		}
	}
	if what == "ADD" {
		s.results[id] = prev
	}
	return prev
}

// In whichever mixture, plugins by name and the reference's own give a pod the same, and either's
// DEL leaves nothing of it.
func TestPluginsByNameMixWithTheReferences(t *testing.T) {
	t.Parallel()
	const ipam = `"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24","routes":[{"dst":"0.0.0.0/0"}]}`
	const tune = `{"type":"tuning","dataDir":"DATA/t","mac":"02:00:00:00:00:77","mtu":1400,"sysctl":{"net.core.somaxconn":"99"}}`
	const limit = `{"type":"bandwidth","ingressRate":8000000,"ingressBurst":800000}`
	for name, plugins := range map[string][]string{
		"bridge":  {`{"type":"bridge","isGateway":true,` + ipam + `}`, tune, limit},
		"ptp":     {`{"type":"ptp",` + ipam + `}`, tune, limit},
		"macvlan": {`{"type":"macvlan","master":"up0",` + ipam + `}`, tune, `{"type":"firewall"}`}, // the host has no route to it
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			peers, randomMAC := referenceDir(t), regexp.MustCompile(`([0-9a-f]{2}:){5}[0-9a-f]{2}`)
			want := ""
			for _, ours := range [][]string{nil, byName(), {"bridge"}, {"host-local"}, {"tuning"}, {"bridge", "tuning"}, {"firewall"}} {
				s := newSide(t, peers, ours)
				nstest.Veth(t, s.ns, "up0", s.ns, "up1")
				s.chain("ADD", "a", plugins)
				said := said(t, s.results["a"])
				// What was before a tuning is noted by the reference's alone: docs/drop-in.md.
				files := strings.TrimSpace(regexp.MustCompile(`(?m)^/t/.*$`).ReplaceAllString(s.files(), ""))
				got := fmt.Sprintf("%s\n%s%s", said[:strings.Index(said+`"routes"`, `"routes"`)], tunable(t, s.of("a")), randomMAC.ReplaceAllString(files, "MAC"))
				if want == "" {
					want = got
				}
				expect.Equal(t, got, want, "with %q: the reference makes\n%s\nand this", ours, want)
				s.chain("CHECK", "a", plugins)
				s.chain("DEL", "a", plugins)
				expect.Equal(t, s.files(), "", "with %q", ours)
				links := nstest.Run(t, s.of("a").NS, "ip", "-o", "link")
				expect.That(t, !strings.Contains(links, "eth0"), "with %q: %s is left", ours, links)
			}
		})
	}
}

// A runtime sends DEL after an ADD that failed, and ends at the first plugin that fails: the plugins
// before it would never hear of it.
func TestPortsThatNoADDTakesDoNotStopTheDELOfAChain(t *testing.T) {
	t.Parallel()
	_, s := sides(t)
	const bridge = `{"type":"bridge","bridge":"cni0","isGateway":true,"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24"}}`
	twice := portmapping("", `{"hostPort":8080,"containerPort":80,"protocol":"tcp"},{"hostPort":8080,"containerPort":81,"protocol":"tcp"}`)
	s.chain("ADD", "a", []string{bridge})
	o := s.call(verb{plugin: "portmap", verb: "ADD", id: "a", conf: `{"cniVersion":"1.0.0","name":"net","stateDir":"STATE","prevResult":` + s.results["a"] + `,` + twice[1:]})
	must.That(t, o.status != 0, "the ADD succeeds, so nothing is shown")
	s.chain("DEL", "a", []string{bridge, twice})
	expect.Equal(t, s.files(), "", "left")
}

// So it is with limits, and with what firewall is told.
func TestValuesThatNoADDTakesDoNotStopTheDELOfAChain(t *testing.T) {
	t.Parallel()
	const bridge = `{"type":"bridge","bridge":"cni0","isGateway":true,"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24"}}`
	for name, bad := range map[string]string{
		"a rate without a burst": `{"type":"bandwidth","ingressRate":1000}`,
		"a burst too large":      `{"type":"bandwidth","runtimeConfig":{"bandwidth":{"egressRate":1000,"egressBurst":99999999999}}}`,
		"an unknown policy":      `{"type":"firewall","ingressPolicy":"closed"}`,
		"a policy of no text":    `{"type":"firewall","ingressPolicy":5}`,
		"an unknown backend":     `{"type":"portmap","backend":"ebtables","runtimeConfig":{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]}}`,
		"a snat of text":         `{"type":"portmap","snat":"yes","runtimeConfig":{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]}}`,
		"a zone that is none":    `{"type":"firewall","backend":"firewalld","firewalldZone":"a b"}`,
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			_, s := sides(t)
			s.chain("ADD", "a", []string{bridge})
			plugin, _, _ := strings.Cut(strings.TrimPrefix(bad, `{"type":"`), `"`)
			o := s.call(verb{plugin: plugin, verb: "ADD", id: "a", conf: `{"cniVersion":"1.0.0","name":"net","stateDir":"STATE","prevResult":` + s.results["a"] + `,` + bad[1:]})
			must.That(t, o.status != 0, "the ADD succeeds, so nothing is shown")
			s.chain("DEL", "a", []string{bridge, bad})
			expect.Equal(t, s.files(), "", "left")
		})
	}
}

// So it is with an ADD of bridge's that was killed, wherever that was: what comes behind bridge in the list, whose DEL is first,
// has nothing of the attachment yet.
func TestAKilledADDDoesNotStopTheDELOfAChain(t *testing.T) {
	t.Parallel()
	_, s := sides(t)
	plugins := []string{
		attackedBridge, `{"type":"tuning","dataDir":"DATA/t","mtu":1400}`, portmapping("", `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`),
		`{"type":"firewall","backend":"iptables"}`, `{"type":"bandwidth","ingressRate":8000000,"ingressBurst":800000,"egressRate":8000000,"egressBurst":800000}`,
	}
	s.chain("ADD", "first", plugins)
	before, unfinished := s.snapshot(), 0
	add := call{verb: "ADD", id: "a", netns: s.of("a").path, ifName: "eth0", program: filepath.Join(s.programs, "bridge")}
	add.stdin = []byte(strings.NewReplacer("STATE", s.state, "DATA", s.data).Replace(`{"cniVersion":"1.0.0","name":"net","stateDir":"STATE",` + attackedBridge[1:]))
	for at := 20; ; at += 13 {
		f := s.callFaulty(add, fault.Fault{At: at, Kind: fault.Kill})
		if left, _ := filepath.Glob(s.state + "/attachments/net/*.json"); len(left) > 1 && f.status != 0 {
			unfinished++
		}
		s.results["a"] = "" // nothing was said
		if s.chain("DEL", "a", plugins); t.Failed() {
			t.Fatalf("%s: the DEL of the list after it fails", f)
		}
		s.wantSnapshot(f.String()+", DEL", before)
		if f.status == 0 || t.Failed() {
			break
		}
	}
	expect.That(t, unfinished >= 3 || t.Failed(), "an attachment was left on record %d times", unfinished)
}

func TestAnADDByNameTakesBackWhatItAsksForNoMore(t *testing.T) {
	t.Parallel()
	s := newSide(t, referenceDir(t), byName())
	prev := s.chain("ADD", "a", []string{`{"type":"bridge","isGateway":true,"ipam":{"type":"host-local","dataDir":"DATA/n","ranges":[[{"subnet":"10.5.0.0/24"}],[{"subnet":"fd05::/64"}]]}}`})
	localnet := func() string { return nstest.Sysctl(t, s.ns, "net/ipv4/conf/cni0/route_localnet") }
	const port = `{"hostPort":8080,"containerPort":80,"protocol":"tcp"`
	s.mapped("ADD", "a", prev, "", port+"}")
	open := localnet()
	if o := s.mapped("ADD", "a", prev, "", port+`,"hostIP":"`+uplink6+`"}`); o.status != 0 || open != "1" || localnet() != "0" {
		t.Errorf("route_localnet was %s, and without a port of IPv4 it is %s: the host's 127.0.0.1 is open; %+v", open, localnet(), o)
	}
	limit := func(rates string) {
		t.Helper()
		conf := `{"cniVersion":"1.0.0","name":"net","type":"bandwidth","stateDir":"STATE","prevResult":` + prev + rates + "}"
		o := s.call(verb{plugin: "bandwidth", verb: "ADD", id: "a", conf: conf})
		must.That(t, o.status == 0, "%v", o.stdout)
	}
	const ingress = `,"ingressRate":80000000,"ingressBurst":800000`
	limit(ingress + `,"egressRate":40000000,"egressBurst":400000`)
	both := s.shapers()
	limit(ingress)
	if one := s.shapers(); strings.Count(both, "tbf") != 2 || strings.Count(one, "tbf") != 1 || strings.Contains(s.run("ip", "-br", "link"), "ifb") {
		t.Errorf("with both limits the pod had\n%s\nand with that of what it gets alone it has\n%s", both, one)
	}
}
