package cni

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/fault"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

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
