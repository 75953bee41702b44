package cni

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// limits are what shapes a pod's traffic at the host's end of its link, up to names and to how long a packet waits:
// rates and bursts of qdiscs.
func (s *side) shapers() string {
	s.Helper()
	var list []string
	for line := range strings.Lines(s.run("tc", "qdisc", "show")) {
		if m := regexp.MustCompile(`^qdisc (tbf) .* dev (veth|ifb|bwp)\S+ .*rate (\S+) burst (\S+)`).FindStringSubmatch(line); m != nil {
			list = append(list, fmt.Sprintf("%s at %s: %s, %s", m[1], strings.Replace(m[2], "bwp", "ifb", 1), m[3], m[4]))
		}
	}
	return strings.Join(list, "\n")
}

// Limits by that name are the reference's, on whichever plugin's interface: in the kernel, and in the result.
func TestBandwidthByNameLimitsAsTheReferencesDoes(t *testing.T) {
	t.Parallel()
	const ipam = `"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24"}`
	const rates = `"ingressRate":80000000,"ingressBurst":800000,"egressRate":40000000,"egressBurst":400000`
	randomIFB := regexp.MustCompile(`"(ifb|bwp)[0-9a-f]+"`)
	for name, plugins := range map[string][]string{
		"bridge":                     {`{"type":"bridge","isGateway":true,` + ipam + `}`, `{"type":"bandwidth",` + rates + `}`},
		"ptp":                        {`{"type":"ptp",` + ipam + `}`, `{"type":"bandwidth",` + rates + `}`},
		"the runtime's":              {`{"type":"bridge","isGateway":true,` + ipam + `}`, `{"type":"bandwidth","runtimeConfig":{"bandwidth":{` + rates + `}}}`},
		"the configuration's before": {`{"type":"bridge","isGateway":true,` + ipam + `}`, `{"type":"bandwidth","ingressRate":80000000,"ingressBurst":800000,"runtimeConfig":{"bandwidth":{` + rates + `}}}`},
		"a few bits a second":        {`{"type":"bridge","isGateway":true,` + ipam + `}`, `{"type":"bandwidth","ingressRate":800,"ingressBurst":24288}`},
		"none":                       {`{"type":"bridge","isGateway":true,` + ipam + `}`, `{"type":"bandwidth"}`},
		"before portmap":             {`{"type":"bridge","isGateway":true,` + ipam + `}`, `{"type":"bandwidth",` + rates + `}`, portmapping("", `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`)},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			want := ""
			for _, ours := range [][]string{nil, byName(), {"bandwidth"}, {"bandwidth", "portmap"}, {"bridge"}} {
				s := newSide(t, referenceDir(t), ours)
				s.chain("ADD", "a", plugins)
				got := s.shapers() + "\n" + randomIFB.ReplaceAllString(said(t, s.results["a"]), "IFB")
				if want == "" {
					want = got
				}
				expect.That(t, strings.Contains(got, "tbf") != (name == "none"),
					"with %q, the limits are\n%s", ours, got)
				expect.Equal(t, cmp.Diff(want, got), "", "with %q, the reference's (-) and this one's (+)", ours)
				s.chain("CHECK", "a", plugins)
				s.chain("DEL", "a", plugins)
				s.chain("DEL", "a", plugins)
				links := s.run("ip", "-br", "link")
				expect.That(t, !strings.Contains(links, "ifb") && !strings.Contains(links, "bwp"), "with %q, left:\n%s", ours, links)
				left, _ := filepath.Glob(s.state + "/*/net/*.json")
				expect.That(t, len(left) == 0, "with %q, records are left: %q", ours, left)
			}
		})
	}
}

// What a pod puts in its interface's place may be a link that nobody can delete, or one that the kernel says more of than
// fits into an answer. The DEL of the list does not fail for it.
func TestALinkInTheInterfacesPlaceStopsNoDEL(t *testing.T) {
	t.Parallel()
	const tune = `{"type":"tuning","dataDir":"DATA/t","mtu":1400}`
	much := "link add link aside name eth0 type macvlan mode source\n"
	for i := range 1600 {
		much += fmt.Sprintf("link set eth0 type macvlan macaddr add 02:00:00:00:%02x:%02x\n", i>>8, i&0xff)
	}
	for i := range 496 { // the kernel takes no more of this length
		much += fmt.Sprintf("link property add dev eth0 altname n%0126d\n", i)
	}
	for name, commands := range map[string]string{
		"lo renamed":                 "link set lo down\nlink set lo name eth0",
		"lo by an alternative name":  "link property add dev lo altname eth0",
		"a link with many MACs":      much,
		"one that takes no such MTU": "link set aside mtu 1300\nlink add link aside name eth0 type macvlan",
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			s := newSide(t, referenceDir(t), byName())
			plugins := []string{attackedBridge, tune}
			s.chain("ADD", "a", plugins)
			dir := t.TempDir()
			nstest.PutFile(t, dir, "commands", "link set eth0 down\nlink set eth0 name aside\n"+commands)
			nstest.Run(t, s.of("a").NS, "ip", "-batch", filepath.Join(dir, "commands"))
			s.chain("DEL", "a", plugins)
			expect.Equal(t, s.run("ip", "-br", "link", "show", "type", "veth"), "", "DEL leaves")
			expect.Equal(t, s.files(), "", "DEL leaves")
		})
	}
}
