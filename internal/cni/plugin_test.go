package cni

import (
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

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
		expect.That(t, a.err != nil && a.err.Code == tt.want, "%s %s: got %s, want code %d", tt.verb, tt.conf, a.stdout, tt.want)
	}
}

func TestGCWithoutAListDoesNothing(t *testing.T) {
	t.Parallel()
	for _, fields := range []string{``, `"cni.dev/valid-attachments": null`} {
		a := callWithout(t, map[string]string{"CNI_COMMAND": "GC"}, string(with(fields)))
		expect.That(t, a.status == 0 && a.stdout == "", "%s: status %d: %s", fields, a.status, a.stdout)
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

func TestSupportedVersionsAreTheCallersToChange(t *testing.T) {
	t.Parallel()
	SupportedVersions()[0] = "spoilt"
	expect.Equal(t, SupportedVersions()[0], "0.1.0", "the first is")
}

// The capability dns replaces the lists of the configuration, and leaves its domain.
func TestPreparationReadsWhatTheRuntimeAsksFor(t *testing.T) {
	t.Parallel()
	conf := parsed(t, `"dns": {"nameservers": ["10.0.0.1"], "domain": "d", "search": ["s"], "options": ["o"]},
		"ipam": {"type": "host-local", "dataDir": "/d"},
		"runtimeConfig": {"mac": "02:00:00:00:00:01", "dns": {"servers": ["10.0.0.2"]}}`)
	c := &call{
		Plugin:      &Plugin{Getenv: func(string) string { return "" }, Dial: noKernel},
		containerID: "c1", ifName: "eth0", netns: "/run/netns/p",
		args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web-0",
	}
	a, err := c.readRequest(conf)
	must.Succeed(t, err)
	dns, _ := json.Marshal(a.dns)
	got, want := string(dns), `{"nameservers":["10.0.0.2"],"domain":"d"}`
	expect.That(t, got == want, "dns is %s, want %s", got, want)
	expect.Equal(t, a.pod.MAC.String(), "02:00:00:00:00:01", "mac is")
	nw := conf.settings()
	for what, is := range map[string][2]string{
		"network": {nw.Name, "pods"}, "container": {a.pod.ContainerID, "c1"}, "interface": {a.pod.IfName, "eth0"},
		"pod": {a.pod.Name, "default/web-0"}, "namespace": {a.pod.Path, "/run/netns/p"}, "ipam": {nw.Origin.Type, "host-local"},
		"dataDir": {nw.Origin.Dir, "/d"}, "bridge": {nw.Bridge, "cbr0"},
	} {
		expect.Equal(t, is[0], is[1], "%s is", what)
	}
	expect.That(t, !nw.Down, "the interface is to stay down")
}

func TestCallsThatFailAreCountedByVerbAndCode(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.plugin()
	dir, err := state.Open(n.stateDir)
	must.Succeed(t, err)
	n.run(t, p, "ADD", nil).must(t)
	expect.Failure(t, expect.Err(os.Stat(n.stateDir+"/failures")), "an ADD that succeeds has counted something")
	for _, verb := range []string{"ADD", "ADD", "STATUS"} {
		n.run(t, p, verb, map[string]any{"mtu": map[string]int{"ADD": 0, "STATUS": -1}[verb]})
	}
	n.run(t, p, "CHECK", map[string]any{"unknown": true})
	n.run(t, p, "DEL", map[string]any{"cniVersion": "9.0.0"})
	n.run(t, p, "DEL", nil).must(t)
	list, err := dir.Failures()
	want := []state.Failures{{Verb: "ADD", Code: codeExists, Count: 2}, {Verb: "CHECK", Code: codeUnsupportedField, Count: 1}, {Verb: "DEL", Code: codeIncompatibleVersion, Count: 1}}
	diff := cmp.Diff(want, list)
	expect.That(t, diff == "" && err == nil, "%v, failures (-want +got):\n%s", err, diff)
}
