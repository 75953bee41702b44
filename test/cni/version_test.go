package cni

import (
	"debug/buildinfo"
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func versions() []string {
	return []string{"0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}
}

// settle replaces what is another in each run: paths, names and MACs that are random.
// Keys come out in the order of the alphabet.
func settle(t *testing.T, text string, replacements ...string) string {
	t.Helper()
	var value any
	unmarshal(t, strings.NewReplacer(replacements...).Replace(text), &value)
	out := must.Of(json.MarshalIndent(value, "", "  ")).Get(t)
	return string(out) + "\n"
}

func TestResultHasTheShapeOfItsVersion(t *testing.T) {
	t.Parallel()
	for _, version := range versions() {
		nstest.RunParallel(t, version, func(t *testing.T) {
			n := newNode(t)
			ipam := dualStack()
			ipam["routes"] = []conf{{"dst": "10.1.0.0/16", "mtu": 1300, "priority": 5}, {"dst": "fd99::/32", "gw": "fd77::9"}}
			w := n.podnet(conf{"ipam": ipam, "dns": conf{"nameservers": []string{"10.77.0.10"}, "search": []string{"a.example"}}})
			w.version = version
			p := n.pod("a")
			out := n.callOK(call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(nil)})
			host := links(t, n.ns)
			port := w.port(p)
			golden.Compare(t, "result-"+version+".json", settle(t, out,
				p.path, "NETNS", host["cbr0"].MAC, "BRIDGE-MAC", host[port].MAC, "PORT-MAC"))
			// What was printed can be handed back, by the version's own rules.
			stdin := w.stdin(conf{"prevResult": json.RawMessage(out)})
			if version >= "0.4.0" {
				n.callOK(call{verb: "CHECK", id: p.id, netns: p.path, ifName: "eth0", stdin: stdin})
			}
			expect.Equal(t, n.callOK(call{verb: "DEL", id: p.id, netns: p.path, ifName: "eth0", stdin: stdin}), "", "DEL printed")
			n.wantNothing()
		})
	}
}

func TestVerbsAreRefusedBeforeTheirVersion(t *testing.T) {
	t.Parallel()
	first := map[string]string{"CHECK": "0.4.0", "STATUS": "1.1.0", "GC": "1.1.0"}
	for verb, since := range first {
		for _, version := range versions() {
			nstest.RunParallel(t, verb+" "+version, func(t *testing.T) {
				n := newNode(t)
				w := n.podnet(nil)
				w.version = version
				c := call{verb: verb, stdin: w.stdin(nil)}
				if verb == "CHECK" {
					p := n.pod("a")
					c.id, c.netns, c.ifName = p.id, p.path, "eth0"
				}
				var failure struct {
					CNIVersion, Msg string
					Code            uint
				}
				o := n.call(c)
				if o.stdout != "" {
					unmarshal(t, o.stdout, &failure)
				}
				expect.Equal(t, failure.Code == 1, version < since, "exit status %d, %s", o.status, o.stdout)
				expect.That(t, o.status == 0 || failure.CNIVersion == version,
					"the error's cniVersion is %q, want the configuration's", failure.CNIVersion)
			})
		}
	}
}

func TestVERSION(t *testing.T) {
	n := parallelNode(t)
	for _, tt := range []struct{ name, stdin, want string }{
		{"empty stdin", "", "1.1.0"},
		{"echo", `{"cniVersion":"0.4.0"}`, "0.4.0"},
		{"echo of one that is not supported", `{"cniVersion":"7.0.0"}`, "7.0.0"},
		{"no version", `{}`, "1.1.0"},
		{"not JSON", `what?`, "1.1.0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var got struct {
				CNIVersion        string
				SupportedVersions []string
			}
			unmarshal(t, n.callOK(call{verb: "VERSION", stdin: []byte(tt.stdin)}), &got)
			expect.Equal(t, got.CNIVersion, tt.want, "cniVersion")
			expect.NoDiff(t, cmp.Diff(versions(), got.SupportedVersions), "supported versions")
		})
	}
	got := n.files(n.state)
	expect.That(t, len(got) == 0, "VERSION made %v", got)
}

func TestLibcniTakesThePluginForEachVersion(t *testing.T) {
	t.Parallel()
	for _, version := range versions() {
		nstest.RunParallel(t, version, func(t *testing.T) {
			n := newNode(t)
			w := n.podnet(nil)
			w.version = version
			must.Succeed(t, expect.Err(n.cni.ValidateNetworkList(t.Context(), w.list())))
			p := n.pod("a")
			r := w.add(p)
			expect.Equal(t, len(r.IPs), 2, "result %v, want two addresses", r)
			if version >= "0.4.0" {
				expect.Success(t, w.check(p))
			}
			w.del(p)
			n.wantNothing()
		})
	}
}

// govulncheck makes no version of one that names an experiment, and reports then that all is well.
func TestProgramsNameTheGoTheyWereBuiltWithAsScannersReadIt(t *testing.T) {
	t.Parallel()
	for _, path := range []string{plugin(), command(), keeperPath()} {
		info := must.Of(buildinfo.ReadFile(path)).Get(t)
		expect.That(t, !strings.Contains(info.GoVersion, "X:"), "%s is said to be built with %q", path, info.GoVersion)
	}
}
