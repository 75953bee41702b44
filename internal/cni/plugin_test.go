package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/nft"
)

func TestErrorsOfTheEnvironment(t *testing.T) {
	t.Parallel()
	const netns = "/run/netns/p"
	add := func(changes map[string]string) map[string]string {
		env := attachmentEnv("ADD", netns)
		maps.Copy(env, changes)
		return env
	}
	var report strings.Builder
	for _, tt := range []struct {
		name string
		env  map[string]string
	}{
		{"a verb of no version", add(map[string]string{"CNI_COMMAND": "UPDATE"})},
		{"a verb in small letters", add(map[string]string{"CNI_COMMAND": "add"})},
		{"ADD without anything", map[string]string{"CNI_COMMAND": "ADD"}},
		{"CHECK without anything", map[string]string{"CNI_COMMAND": "CHECK"}},
		{"DEL without anything", map[string]string{"CNI_COMMAND": "DEL"}},
		{"ADD without a namespace", add(map[string]string{"CNI_NETNS": ""})},
		{"ADD without an interface", add(map[string]string{"CNI_IFNAME": ""})},
		{"container ID with a slash", add(map[string]string{"CNI_CONTAINERID": "a/b"})},
		{"container ID that begins with a dot", add(map[string]string{"CNI_CONTAINERID": ".a"})},
		{"container ID that is not ASCII", add(map[string]string{"CNI_CONTAINERID": "ä"})},
		{"interface's name too long", add(map[string]string{"CNI_IFNAME": "sixteen-bytes-xx"})},
		{"interface's name with a colon", add(map[string]string{"CNI_IFNAME": "eth0:1"})},
		{"interface's name is two dots", add(map[string]string{"CNI_IFNAME": ".."})},
		{"arguments without a value", add(map[string]string{"CNI_ARGS": "IgnoreUnknown"})},
		{"arguments that nobody knows", add(map[string]string{"CNI_ARGS": "FOO=1;BAR=2"})},
	} {
		a := callWithout(t, tt.env, string(with("")))
		if a.err == nil {
			t.Errorf("%s: no error", tt.name)
			continue
		}
		fmt.Fprintf(&report, "%s:\n    code %d: %s\n", tt.name, a.err.Code, a.err.Msg)
	}
	golden.Compare(t, "environment-errors.txt", report.String())
}

func TestErrorsOfVersionAndName(t *testing.T) {
	t.Parallel()
	var report strings.Builder
	for _, tt := range []struct{ verb, conf string }{
		{"ADD", `{"cniVersion": "2.0.0", "name": "pods"}`},
		{"ADD", `{"cniVersion": "", "name": "a b"}`},
		{"DEL", `{"cniVersion": "1.2.0", "name": "pods"}`},
		{"DEL", `{"cniVersion": "1.1.0"}`},
		{"DEL", `{"cniVersion": "1.1.0", "name": "-pods"}`},
		{"DEL", `{`},
		{"ADD", `{"cniVersion": "0.4.0", "name": "pods", "colour": "blue"}`},
		{"ADD", `{"cniVersion": "0.3.1", "name": "pods", "mtu": "big"}`},
		{"CHECK", `{"cniVersion": "1.0.0", "name": "pods", "mode": "routed"}`},
		{"GC", `{"cniVersion": "1.0.0", "name": "pods"}`},
		{"STATUS", `{"cniVersion": "1.0.0", "name": "pods", "unknown": "comes second"}`},
		{"STATUS", `{"cniVersion": "1.1.0", "name": "pods", "unknown": "comes first"}`},
		{"CHECK", `{"cniVersion": "0.3.1", "name": "pods"}`},
		{"CHECK", `{"name": "pods"}`},
		{"CHECK", `{"cniVersion": "0.4.0", "name": "pods"}`},
	} {
		a := callWithout(t, attachmentEnv(tt.verb, "/run/netns/p"), tt.conf)
		if a.err == nil {
			t.Errorf("%s %s: no error", tt.verb, tt.conf)
			continue
		}
		fmt.Fprintf(&report, "%s %s\n    %s", tt.verb, tt.conf, a.stdout)
	}
	golden.Compare(t, "version-errors.txt", report.String())
}

// A network without a name is nobody's, and a verb that needs the kernel meets the
// one of the test.
func TestVerbsReachTheKernelOnlyWithWhatTheyNeed(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		verb, conf string
		want       uint
	}{
		{"DEL", string(with("")), codeKernel},
		{"DEL", string(with(`"colour": "blue", "mtu": "big", "vlan": 7, "ipam": {"type": "host-local", "nonsense": 1}`)), codeKernel},
		{"GC", string(with(`"cni.dev/valid-attachments": []`)), codeKernel},
		{"GC", string(with(`"cni.dev/valid-attachments": "everything"`)), codeDecoding},
		{"STATUS", string(with("")), codeNotAvailable},
		{"ADD", string(with("")), codeInvalidNetNS}, // there is no such namespace
		{"ADD", string(with(`"runtimeConfig": {"mac": "x"}`)), codeInvalidConfig},
		{"ADD", string(with(`"prevResult": {"cniVersion": "9"}`)), codeDecoding},
		{"CHECK", string(with("")), codeInvalidConfig}, // no prevResult
	} {
		a := callWithout(t, attachmentEnv(tt.verb, "/run/netns/none-of-this-name"), tt.conf)
		if a.err == nil || a.err.Code != tt.want {
			t.Errorf("%s %s: got %s, want code %d", tt.verb, tt.conf, a.stdout, tt.want)
		}
	}
}

func TestGCWithoutAListDoesNothing(t *testing.T) {
	t.Parallel()
	for _, fields := range []string{``, `"cni.dev/valid-attachments": null`} {
		a := callWithout(t, map[string]string{"CNI_COMMAND": "GC"}, string(with(fields)))
		if a.status != 0 || a.stdout != "" {
			t.Errorf("%s: status %d: %s", fields, a.status, a.stdout)
		}
	}
}

func TestAPodInTheHostsOwnNamespaceIsRefused(t *testing.T) {
	t.Parallel()
	const own = "/proc/thread-self/ns/net"
	a := callWithout(t, attachmentEnv("ADD", own), string(with("")))
	const want = "CNI_NETNS=" + own + " is the namespace that the plugin itself runs in: a pod needs one of its own"
	if a.err == nil || a.err.Code != codeInvalidNetNS || a.err.Msg != want {
		t.Errorf("got %s", a.stdout)
	}
	for _, override := range []string{"1", "true", "TRUE"} {
		env := attachmentEnv("ADD", own)
		env["CNI_NETNS_OVERRIDE"] = override
		if a := callWithout(t, env, string(with(""))); a.err == nil || !strings.Contains(a.err.Msg, errNoKernel.Error()) {
			t.Errorf("with CNI_NETNS_OVERRIDE=%s: %s", override, a.stdout)
		}
	}
}

func TestConfigurationOnStdinIsBounded(t *testing.T) {
	t.Parallel()
	long := string(with(`"_": "` + strings.Repeat("x", maxStdin) + `"`))
	a := callWithout(t, attachmentEnv("DEL", ""), long)
	if a.err == nil || a.err.Code != codeDecoding || !strings.Contains(a.err.Msg, "longer than 4194304 bytes") {
		t.Errorf("got %s", a.stdout)
	}
}

type brokenPipe struct{}

func (brokenPipe) Read([]byte) (int, error)  { return 0, errors.New("broken pipe") }
func (brokenPipe) Write([]byte) (int, error) { return 0, errors.New("broken pipe") }

func TestStdinThatCannotBeRead(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	env := attachmentEnv("DEL", "")
	p := &Plugin{Getenv: func(name string) string { return env[name] }, Stdin: brokenPipe{}, Stdout: &out}
	expect.Equal(t, p.Run(), 1, "status")
	want := `{"cniVersion":"1.1.0","code":5,"msg":"read the network's configuration from stdin: broken pipe"}` + "\n"
	expect.NoDiff(t, cmp.Diff(want, out.String()), "stdout")
}

func TestVersionVerb(t *testing.T) {
	t.Parallel()
	const supported = `"supportedVersions":["0.1.0","0.2.0","0.3.0","0.3.1","0.4.0","1.0.0","1.1.0"]}` + "\n"
	for _, tt := range []struct{ name, stdin, want string }{
		{"the caller's version comes back", `{"cniVersion": "0.4.0"}`, `{"cniVersion":"0.4.0",` + supported},
		{"one of the future too", `{"cniVersion": "7.0.0"}`, `{"cniVersion":"7.0.0",` + supported},
		{"nothing on stdin", ``, `{"cniVersion":"1.1.0",` + supported},
		{"no version on stdin", `{}`, `{"cniVersion":"1.1.0",` + supported},
		{"rubbish on stdin", `rubbish`, `{"cniVersion":"1.1.0",` + supported},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			a := callWithout(t, map[string]string{"CNI_COMMAND": "VERSION"}, tt.stdin)
			if diff := cmp.Diff(tt.want, a.stdout); diff != "" || a.status != 0 {
				t.Errorf("status %d, stdout (-want +got):\n%s", a.status, diff)
			}
		})
	}
}

func TestSupportedVersionsAreTheCallersToChange(t *testing.T) {
	t.Parallel()
	SupportedVersions()[0] = "spoilt"
	expect.Equal(t, SupportedVersions()[0], "0.1.0", "the first is")
}

func TestVariablesOfEachVerb(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		verb  string
		want  string
		known bool
	}{
		{"ADD", "CNI_CONTAINERID CNI_NETNS CNI_IFNAME", true},
		{"CHECK", "CNI_CONTAINERID CNI_NETNS CNI_IFNAME", true},
		{"DEL", "CNI_CONTAINERID CNI_IFNAME", true},
		{"GC", "", true}, {"STATUS", "", true}, {"VERSION", "", true},
		{"", "", false}, {"Add", "", false},
	} {
		got, known := needs()[tt.verb]
		if strings.Join(got, " ") != tt.want || known != tt.known {
			t.Errorf("%q needs %v, %t", tt.verb, got, known)
		}
	}
}

// The capability dns replaces the lists of the configuration, and leaves its domain.
func TestPreparationReadsWhatTheRuntimeAsksFor(t *testing.T) {
	t.Parallel()
	conf := parsed(t, `"dns": {"nameservers": ["10.0.0.1"], "domain": "d", "search": ["s"], "options": ["o"]},
		"ipam": {"type": "host-local", "dataDir": "/d"},
		"runtimeConfig": {"mac": "02:00:00:00:00:01", "dns": {"servers": ["10.0.0.2"]}}`)
	c := &call{
		Plugin:      &Plugin{Getenv: func(string) string { return "" }, DialNFT: func(*nft.Config) (*nft.Conn, error) { return nil, errNoKernel }},
		containerID: "c1", ifName: "eth0", netns: "/run/netns/p",
		args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web-0",
	}
	a, err := c.asked(conf)
	must.Succeed(t, err)
	dns, _ := json.Marshal(a.dns)
	if got, want := string(dns), `{"nameservers":["10.0.0.2"],"domain":"d"}`; got != want {
		t.Errorf("dns is %s, want %s", got, want)
	}
	expect.Equal(t, a.pod.MAC.String(), "02:00:00:00:00:01", "mac is")
	nw := conf.settings()
	for what, is := range map[string][2]string{
		"network": {nw.Name, "pods"}, "container": {a.pod.ContainerID, "c1"}, "interface": {a.pod.IfName, "eth0"},
		"pod": {a.pod.Name, "default/web-0"}, "namespace": {a.pod.Path, "/run/netns/p"}, "ipam": {nw.Origin.Type, "host-local"},
		"dataDir": {nw.Origin.Dir, "/d"}, "bridge": {nw.Bridge, "cbr0"},
	} {
		expect.Equal(t, is[0], is[1], "%s is", what)
	}
	if nw.Down {
		t.Error("the interface is to stay down")
	}
}
