package cni

import (
	"cmp"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

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
