package cni

import (
	"debug/buildinfo"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestAnEpochThatCannotBeReadIsCode5(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(path string) error{
		"a directory":     func(path string) error { return os.Mkdir(path, 0o700) },
		"of a newer one":  func(path string) error { return os.WriteFile(path, []byte(`{"version":99}`), 0o600) },
		"a pipe":          func(path string) error { return unix.Mkfifo(path, 0o600) },
		"a symbolic link": func(path string) error { return os.Symlink("/dev/zero", path) },
		"endless links":   func(path string) error { return os.Symlink(path, path) },
		"too long":        func(path string) error { return os.WriteFile(path, make([]byte, 1<<20), 0o600) },
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			w := n.podnet(nil)
			p := w.addPod("a")
			path := filepath.Join(n.state, "epoch")
			must.Succeed(t, os.Remove(path))
			must.Succeed(t, spoil(path))
			spoiled := name != "a pipe" && name != "too long" // those count as damaged, and are made anew
			for verb, err := range map[string]error{
				"ADD": func() error { _, err := w.tryAdd(n.pod("b")); return err }(), "CHECK": w.check(p), "DEL": w.tryDel(p),
			} {
				if spoiled {
					wantError(t, err, 5, path)
				} else if err != nil {
					t.Errorf("%s: %v", verb, err)
				}
			}
			if spoiled { // so that nothing on record is dropped, until it can be read
				wantError(t, w.status(), 50, path)
				must.Succeed(t, os.Remove(path))
			}
			expect.Success(t, w.status())
			w.add(n.pod("c"))
		})
	}
}

func TestOneHostPortTwiceIsCode7(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.portnet(nil)
	for _, m := range [][]string{
		{"8080:80/tcp", "8080:81/tcp"}, {uplink4 + ":8080:80/tcp", "8080:81/tcp"}, {uplink4 + ":8080:80/tcp", "0.0.0.0:8080:81/tcp"},
		{uplink4 + ":8080:80/udp", uplink4 + ":8080:81/udp"},
	} {
		wantError(t, expect.Err(w.tryAdd(n.pod("b"), publish(t, m...))), 7, "publish a port of the host once")
	}
	n.wantNothing()
	for i, m := range [][]string{
		{"8080:80/tcp", "8080:80/tcp"}, {"8081:80/tcp", "8081:81/udp"}, {uplink4 + ":8082:80/tcp", gateway4 + ":8082:81/tcp"},
		{uplink4 + ":8083:80/tcp", ":::8083:81/tcp"}, {uplink4 + ":8084:80/tcp", "8084:80/tcp"},
	} {
		expect.Success(t, expect.Err(w.tryAdd(n.pod(string(rune('c'+i))), publish(t, m...))), "%q", m)
	}
}

// What comes from outside reaches neither a terminal nor a log as it is.
func TestMessagesHaveNothingThatATerminalObeys(t *testing.T) {
	n := parallelNode(t)
	const evil = "\x1b[2J\u202e\u009b31m\r"
	long := strings.Repeat("x", 5000)
	log := filepath.Join(t.TempDir(), "log")
	p := n.pod("a")
	for name, c := range map[string]struct {
		fields conf
		args   string
	}{
		"a mode":          {fields: conf{"mode": evil + long}},
		"a bridge":        {fields: conf{"bridge": evil}},
		"an unknown key":  {fields: conf{evil + long: 1}},
		"a subnet":        {fields: conf{"ipam": hostLocal(evil + long)}},
		"an ipam":         {fields: conf{"ipam": conf{"type": "x" + evil + long}}},
		"a path":          {fields: conf{"stateDir": "/dev/null/" + evil + long}},
		"a log level":     {fields: conf{"logLevel": evil + long}},
		"an address":      {fields: conf{"ipam": fixed(conf{"address": evil + long})}},
		"CNI_ARGS":        {args: evil + long},
		"CNI_ARGS, a key": {args: evil + long + "=" + evil},
		"CNI_ARGS, IP":    {args: "IP=" + evil + long},
		"a MAC":           {args: "MAC=" + evil + long},
	} {
		fields := conf{"logFile": log}
		for k, v := range c.fields {
			fields[k] = v
		}
		w := n.podnet(fields)
		o := n.call(call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", args: c.args, stdin: w.stdin(nil)})
		failure := failure(o.stdout)
		must.That(t, failure != nil && o.status != 0, "%s: %+v", name, o)
		i := strings.IndexFunc(failure.Msg, func(r rune) bool { return !unicode.IsPrint(r) })
		expect.That(t, i < 0, "%s: byte %d of %q", name, i, failure.Msg)
		expect.That(t, !strings.Contains(failure.Msg, long[:201]),
			"%s: quotes more than 200 bytes: %d in all", name, len(failure.Msg))
	}
	// Names that a pod's owner chose are printed by the operator's commands.
	w := n.podnet(conf{"logFile": log})
	w.add(p, arg("K8S_POD_NAMESPACE", "ns"), arg("K8S_POD_NAME", evil+"\t\v"), arg("IgnoreUnknown", "1"))
	n.run("ip", "link", "set", w.port(p), "alias", evil)
	for _, args := range [][]string{{"ls", "--state", n.state}, {"check", "--state", n.state}, {"ls", "--json", "--state", n.state}, {"ls", "networks", "--state", n.state}, {"ls", "map", "--state", n.state}, {"ls", "map", "--svg", "--state", n.state}, {"repair", "--state", "/dev/null/" + evil}} {
		o, err := n.exec(t.Context(), command(), nil, os.Environ(), args...)
		expect.That(t, err == nil && o.stdout+o.stderr != "", "%q: %+v, %v", args, o, err)
		i := strings.IndexFunc(o.stdout+o.stderr, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) })
		expect.That(t, i < 0, "%q prints, at %d, %q", args, i, o.stdout+o.stderr)
	}
	data, err := os.ReadFile(log)
	expect.That(t, err == nil && len(data) != 0 && !strings.ContainsFunc(string(data), func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }),
		"the log: %q, %v", data, err)
}

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
