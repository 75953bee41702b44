package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// node is a machine of its own: a network namespace, a state directory, and a
// runtime's cache. Nothing of the real host is touched.
type node struct {
	testing.TB
	ns    *netns.NS
	state string
	cni   *libcni.CNIConfig
	cache string   // of the runtime
	root  string   // where it is set, programs find their /run and /var/lib there, as run and lib
	by    []string // a command that runs the node's programs; empty is none
}

func newNode(t testing.TB) *node {
	t.Helper()
	n := &node{TB: t, ns: nstest.New(t), state: filepath.Join(t.TempDir(), "state")}
	n.searchAlso()
	n.run("ip", "link", "set", "lo", "up")
	return n
}

// parallelNode makes a node for a test that runs in parallel with others.
func parallelNode(t *testing.T) *node {
	t.Helper()
	t.Parallel()
	return newNode(t)
}

// searchAlso has the runtime look for plugins in more directories.
func (n *node) searchAlso(dirs ...string) {
	n.Helper()
	n.cache = filepath.Join(n.TempDir(), "cache")
	n.cni = libcni.NewCNIConfigWithCacheDir(append([]string{cniPath}, dirs...), n.cache, &execIn{node: n})
}

func (n *node) run(name string, args ...string) string {
	n.Helper()
	return nstest.Run(n, n.ns, name, args...)
}

// ip runs ip with arguments that have no spaces of their own.
func (n *node) ip(args string) { n.Helper(); n.run("ip", strings.Fields(args)...) }

func (n *node) nft(line string) string { n.Helper(); return n.run("nft", line) }

// execIn runs plugins on a node. What Tombolo writes to stderr, which belongs to the
// runtime, fails the test.
type execIn struct {
	version.PluginDecoder
	node *node
}

func (*execIn) FindInPath(plugin string, paths []string) (string, error) {
	return invoke.FindInPath(plugin, paths)
}

func (e *execIn) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	o, err := e.node.exec(ctx, path, stdin, environ)
	if err != nil {
		return nil, err
	}
	if o.status == 0 {
		return []byte(o.stdout), nil
	}
	var failure types.Error
	if err := json.Unmarshal([]byte(o.stdout), &failure); err != nil {
		return nil, fmt.Errorf("exit status %d, stdout %q, stderr %q: %w", o.status, o.stdout, o.stderr, err)
	}
	return nil, &failure
}

// outcome is how a process ended.
type outcome struct {
	stdout, stderr string
	status         int
}

// err is what went wrong, nil where nothing did.
func (o outcome) err() error {
	if o.status == 0 {
		return nil
	}
	return fmt.Errorf("%+v", o)
}

// exec runs a program on the node. An error means that it could not be run, or did not end.
func (n *node) exec(ctx context.Context, path string, stdin []byte, environ []string, args ...string) (outcome, error) {
	endless := fmt.Errorf("%s %s did not end within %s", filepath.Base(path), strings.Join(args, " "), patience/2)
	ctx, cancel := context.WithTimeoutCause(ctx, patience/2, endless)
	defer cancel()
	var out, errOut bytes.Buffer
	line := append(append(slices.Clone(n.by), path), args...)
	cmd := exec.CommandContext(ctx, line[0], line[1:]...)
	if n.root != "" {
		const script = `mount --bind "$0/run" /run && mount --bind "$0/lib" /var/lib && exec "$@"`
		cmd = exec.CommandContext(ctx, "sh", append([]string{"-c", script, n.root, path}, args...)...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	}
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = environ, bytes.NewReader(stdin), &out, &errOut
	// A child belongs to the namespace of the thread that forks it.
	if err := n.ns.Do(cmd.Start); err != nil {
		return outcome{}, err
	}
	err := cmd.Wait()
	if context.Cause(ctx) == endless {
		return outcome{}, endless
	}
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		return outcome{}, err
	}
	if filepath.Base(path) == "tombolo" && len(args) == 0 {
		expect.Equal(n, errOut.String(), "", "the plugin wrote to stderr")
	}
	return outcome{out.String(), errOut.String(), cmd.ProcessState.ExitCode()}, nil
}

// spawn starts a program in a namespace, which runs until the test ends. A test that failed shows its output, which goes
// to a file.
func spawn(t testing.TB, ns *netns.NS, log string, cmd *exec.Cmd) *exec.Cmd {
	t.Helper()
	out := must.Of(os.Create(log)).Get(t)
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	must.Succeed(t, ns.Do(cmd.Start))
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			t.Logf("%s: %s", cmd, nstest.ReadIf(t, log))
		}
	})
	return cmd
}

// call is one exec of the plugin with nothing in between. Empty variables are left
// out of the environment.
type call struct {
	verb, id, netns, ifName, args string
	stdin                         []byte
	program                       string // of callFaulty's; the plugin where it is empty
	operands                      []string
}

func (c *call) environ() []string {
	environ := []string{"PATH=" + os.Getenv("PATH"), "CNI_PATH=" + cniPath}
	for name, value := range map[string]string{
		"CNI_COMMAND": c.verb, "CNI_CONTAINERID": c.id, "CNI_NETNS": c.netns, "CNI_IFNAME": c.ifName, "CNI_ARGS": c.args,
	} {
		if value != "" {
			environ = append(environ, name+"="+value)
		}
	}
	return environ
}

func (n *node) call(c call) outcome {
	n.Helper()
	return must.Of(n.exec(context.Background(), plugin(), c.stdin, c.environ())).Get(n)
}

func (n *node) callOK(c call) string {
	n.Helper()
	o := n.call(c)
	must.That(n, o.status == 0, "%s: exit status %d: %s", c.verb, o.status, o.stdout)
	return o.stdout
}

// plugin is the path of the plugin under test, command that of the operator's, and keeperPath the keeper's.
func plugin() string     { return filepath.Join(cniPath, "tombolo") }
func command() string    { return filepath.Join(built, "tombolo") }
func keeperPath() string { return filepath.Join(built, "tombolod") }

func (n *node) operate(args ...string) outcome {
	n.Helper()
	return must.Of(n.exec(context.Background(), command(), nil, os.Environ(), args...)).Get(n)
}

// remove takes a network down by the operator's command.
func (n *node) remove(network string) outcome {
	n.Helper()
	return n.operate("remove", "--state", n.state, network)
}

// pod is a container: its namespace, with a name in the file system, and its ID.
type pod struct {
	*netns.NS
	path, id string
}

func (n *node) pod(id string) *pod {
	n.Helper()
	ns := nstest.New(n)
	return &pod{NS: ns, path: nstest.Path(n, ns), id: id}
}

func (n *node) pods(count int) []*pod {
	n.Helper()
	list := make([]*pod, count)
	for i := range list {
		list[i] = n.pod(fmt.Sprintf("pod-%d", i))
	}
	return list
}

// conf is the configuration of a plugin.
type conf map[string]any

// The ranges that most tests use.
const (
	subnet4, gateway4 = "10.77.0.0/24", "10.77.0.1"
	subnet6, gateway6 = "fd77::/64", "fd77::1"
)

// hostLocal is an ipam section with a range set for each subnet.
func hostLocal(subnets ...string) conf {
	ranges := []any{}
	for _, s := range subnets {
		ranges = append(ranges, []any{conf{"subnet": s}})
	}
	return conf{"type": "host-local", "ranges": ranges}
}

func dualStack() conf { return hostLocal(subnet4, subnet6) }

func fixed(addresses ...conf) conf { return conf{"type": "static", "addresses": addresses} }

// network is a configured network of a node.
type network struct {
	*node
	name    string
	version string
	plugin  conf
	after   []conf // plugins that are chained behind
}

// patience is how long tests wait for what is to come: far longer than any machine
// needs, however busy.
const patience = 5 * time.Minute

// left is how long a test waits: one that has failed only as long as a quiet machine needs, so that it comes to its end.
func left(t testing.TB) time.Duration {
	if t.Failed() {
		return 3 * time.Second
	}
	return patience
}

// podnet is a dual-stack network in gateway mode, with other fields than that where
// they are given; nil takes a field out.
func (n *node) podnet(fields conf) *network { return n.network("podnet", fields) }

func (n *node) network(name string, fields conf) *network {
	w := &network{node: n, name: name, version: "1.1.0", plugin: conf{
		"type": "tombolo", "stateDir": n.state, "deadline": patience.String(), "ipam": dualStack(),
	}}
	for k, v := range fields {
		w.plugin[k] = v
		if v == nil {
			delete(w.plugin, k)
		}
	}
	return w
}

// with is the network with other fields.
func (w *network) with(fields conf) *network {
	changed := w.node.network(w.name, w.plugin)
	for k, v := range fields {
		changed.plugin[k] = v
		if v == nil {
			delete(changed.plugin, k)
		}
	}
	changed.version, changed.after = w.version, w.after
	return changed
}

// list is the configuration as a runtime reads it.
func (w *network) list() *libcni.NetworkConfigList {
	w.Helper()
	list, err := libcni.ConfListFromBytes(marshal(w, conf{
		"cniVersion": w.version, "name": w.name, "plugins": append([]conf{w.plugin}, w.after...),
	}))
	must.Succeed(w, err)
	return list
}

// stdin is the configuration as a runtime hands it to the plugin, with other fields.
func (w *network) stdin(fields conf) []byte {
	w.Helper()
	all := conf{"cniVersion": w.version, "name": w.name}
	for _, part := range []conf{w.plugin, fields} {
		for k, v := range part {
			all[k] = v
		}
	}
	return marshal(w, all)
}

func marshal(t testing.TB, v any) []byte {
	t.Helper()
	return must.Of(json.Marshal(v)).Get(t)
}

// option changes what the runtime says of an attachment.
type option func(*libcni.RuntimeConf)

// as names the interface, which is otherwise eth0.
func as(ifName string) option { return func(rt *libcni.RuntimeConf) { rt.IfName = ifName } }

func arg(key, value string) option {
	return func(rt *libcni.RuntimeConf) { rt.Args = append(rt.Args, [2]string{key, value}) }
}

// capability is an argument that the runtime passes if the configuration has the
// capability.
func capability(name string, value any) option {
	return func(rt *libcni.RuntimeConf) { rt.CapabilityArgs = map[string]any{name: value} }
}

// without leaves CNI_NETNS out.
func withoutNetNS() option { return func(rt *libcni.RuntimeConf) { rt.NetNS = "" } }

func (p *pod) runtime(options []option) *libcni.RuntimeConf {
	rt := &libcni.RuntimeConf{ContainerID: p.id, NetNS: p.path, IfName: "eth0"}
	for _, o := range options {
		o(rt)
	}
	return rt
}

// add adds a pod, which must succeed.
func (w *network) add(p *pod, options ...option) *current.Result {
	w.Helper()
	return must.Of(w.tryAdd(p, options...)).Get(w, "ADD of %s", p.id)
}

// addPod makes a pod and adds it to the network.
func (w *network) addPod(id string, options ...option) *pod {
	w.Helper()
	p := w.pod(id)
	w.add(p, options...)
	return p
}

func (w *network) tryAdd(p *pod, options ...option) (*current.Result, error) {
	w.Helper()
	res, err := w.cni.AddNetworkList(context.Background(), w.list(), p.runtime(options))
	if err != nil {
		return nil, err
	}
	return current.NewResultFromResult(res)
}

func (w *network) del(p *pod, options ...option) {
	w.Helper()
	expect.Success(w, w.tryDel(p, options...), "DEL of %s", p.id)
}

func (w *network) tryDel(p *pod, options ...option) error {
	w.Helper()
	return w.cni.DelNetworkList(context.Background(), w.list(), p.runtime(options))
}

func (w *network) check(p *pod, options ...option) error {
	w.Helper()
	return w.cni.CheckNetworkList(context.Background(), w.list(), p.runtime(options))
}

func (w *network) status() error {
	w.Helper()
	return w.cni.GetStatusNetworkList(context.Background(), w.list())
}

// gc has the plugin collect all but the pods' eth0; no pods is an empty list. It goes
// past libcni, which would first DEL whatever it has in its cache.
func (w *network) gc(pods ...*pod) {
	w.Helper()
	valid := []types.GCAttachment{}
	for _, p := range pods {
		valid = append(valid, types.GCAttachment{ContainerID: p.id, IfName: "eth0"})
	}
	expect.Equal(w, w.callOK(call{verb: "GC", stdin: w.stdin(conf{"cni.dev/valid-attachments": valid})}), "", "GC printed")
}

func (w *network) port(p *pod) string { return "veth" + ident.Hash(w.name, p.id, "eth0") }

// code is that of the error object in an error; 0 if there is none.
func code(err error) uint {
	var e *types.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return 0
}

// wantError fails the test unless an error has a code and says something.
func wantError(t testing.TB, err error, want uint, says string) {
	t.Helper()
	if err == nil || code(err) != want || !strings.Contains(err.Error(), says) {
		t.Errorf("error %v (code %d), want code %d and %q", err, code(err), want, says)
	}
}

func ips(r *current.Result) []netip.Addr {
	var list []netip.Addr
	for _, ip := range r.IPs {
		a, _ := netip.AddrFromSlice(ip.Address.IP)
		list = append(list, a.Unmap())
	}
	return list
}

// ip4 and ip6 are the first address of each family in a result.
func ip4(r *current.Result) netip.Addr { return firstOf(r, netip.Addr.Is4) }
func ip6(r *current.Result) netip.Addr { return firstOf(r, netip.Addr.Is6) }

func firstOf(r *current.Result, is func(netip.Addr) bool) netip.Addr {
	for _, a := range ips(r) {
		if is(a) {
			return a
		}
	}
	return netip.Addr{}
}

func (p *pod) netnsName() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), p.FD()) }
