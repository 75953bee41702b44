package cni

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
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
