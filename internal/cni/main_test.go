package cni

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func TestMain(m *testing.M) {
	nstest.Main(m)
}

// describe writes an error for golden files: its code and its message.
func describe(err error) string {
	if err == nil {
		return "no error"
	}
	e := newCNIError(err)
	return fmt.Sprintf("code %d: %s", e.Code, e.Msg)
}

// code gives an error's code, if it has one of its own.
func code(err error) uint {
	var e *types.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return 0
}

// errNoKernel is what a plugin meets that must not get as far as the kernel.
var errNoKernel = errors.New("this test has no kernel")

// answer is what a call of the plugin came to.
type answer struct {
	status int
	stdout string
	err    *types.Error // what was printed, where the status is not 0
}

func noKernel(int, bool) (*nl.Conn, error) { return nil, errNoKernel }

// call runs a verb without a kernel.
func callWithout(t *testing.T, env map[string]string, stdin string) answer {
	t.Helper()
	return run(t, &Plugin{Dial: noKernel}, env, stdin)
}

// run fills in a plugin's environment, and runs it.
func run(t *testing.T, p *Plugin, env map[string]string, stdin string) answer {
	t.Helper()
	var out bytes.Buffer
	p.Getenv = func(name string) string { return env[name] }
	p.Stdin, p.Stdout = strings.NewReader(stdin), &out
	a := answer{status: p.Run(), stdout: out.String()}
	if a.status != 0 {
		a.err = decodeError(t, out.Bytes())
	}
	return a
}

// decodeError reads the specification's error object, which must be all that was
// printed.
func decodeError(t *testing.T, out []byte) *types.Error {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(out))
	d.DisallowUnknownFields()
	var e struct {
		CNIVersion string `json:"cniVersion"`
		types.Error
	}
	err := d.Decode(&e)
	must.That(t, err == nil, "stdout is no error object: %v: %q", err, out)
	must.That(t, !d.More(), "more than an error object on stdout: %q", out)
	expect.That(t, e.CNIVersion != "" && e.Code != 0 && e.Msg != "" && !strings.Contains(e.Msg, "\n"),
		"an error object that lacks something: %q", out)
	return &e.Error
}

// attachmentEnv is the environment of a verb for one attachment.
func attachmentEnv(verb, path string) map[string]string {
	return map[string]string{
		"CNI_COMMAND": verb, "CNI_CONTAINERID": "c1", "CNI_IFNAME": "eth0", "CNI_NETNS": path, "CNI_PATH": "/opt/cni/bin",
	}
}

// node is a host's namespace with a state directory, and one pod.
type node struct {
	host, pod *netns.NS
	podPath   string
	stateDir  string
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{host: nstest.New(t), pod: nstest.New(t), stateDir: filepath.Join(t.TempDir(), "state")}
	n.podPath = nstest.Path(t, n.pod)
	return n
}

// plugin is one that works on the node's kernel.
func (n *node) plugin() *Plugin { return &Plugin{} }

// run runs a verb for the pod in the host's namespace. What conf says overrides
// the configuration of dualStack.
func (n *node) run(t *testing.T, p *Plugin, verb string, conf map[string]any) answer {
	t.Helper()
	return n.runWith(t, p, attachmentEnv(verb, n.podPath), conf)
}

func (n *node) runWith(t *testing.T, p *Plugin, env map[string]string, conf map[string]any) answer {
	t.Helper()
	var a answer
	must.Succeed(t, n.host.Do(func() error {
		a = run(t, p, env, n.conf(conf))
		return nil
	}))
	return a
}

// conf is a dual-stack network with everything that ADD can make.
func (n *node) conf(changes map[string]any) string {
	conf := map[string]any{
		"cniVersion": "1.1.0", "name": "pods", "type": "tombolo", "stateDir": n.stateDir,
		"ipam": map[string]any{
			"type":   "host-local",
			"ranges": []any{[]any{map[string]any{"subnet": "10.61.0.0/24"}}, []any{map[string]any{"subnet": "fd61::/64"}}},
		},
	}
	maps.Copy(conf, changes)
	for name, value := range changes {
		if value == nil {
			delete(conf, name)
		}
	}
	data, err := json.Marshal(conf)
	if err != nil {
		panic(err) // the test's own map
	}
	return string(data)
}

// must fails the test unless the verb succeeded.
func (a answer) must(t *testing.T) answer {
	t.Helper()
	must.That(t, a.status == 0, "status %d: %s", a.status, a.stdout)
	return a
}
