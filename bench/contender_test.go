package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/route"
)

// cost is what a call took.
type cost struct {
	wall time.Duration
	cpu  time.Duration // user and system, of the programs that were executed
	peak int           // the largest resident memory of any of them, in KiB, where it was gauged
}

// contender is a way to give a pod its network, and to take it away.
type contender struct {
	name       string
	bridgeless bool                          // it needs a bridge that is there
	idle       bool                          // it does nothing, so that nothing can be proven of it
	gateway    func(netip.Prefix) netip.Addr // of a subnet; nil for its first address
	needs      []string                      // of the peers
	proxy      proxied                       // what kube-proxy does on its node
	// call carries out a verb for a pod on a node; p.result is that of the ADD.
	call func(n *node, verb string, p *pod) (cost, error)
	// plugins are the configurations that a runtime has of it; nil for no plugins.
	plugins func(n *node, p *pod) []object
}

type object = map[string]any

func (n *node) call(verb string, p *pod) (cost, error) {
	c, err := n.contender.call(n, verb, p)
	if err != nil {
		err = n.explain(fmt.Errorf("%s, %s of pod %d: %w", n.name, verb, p.number, err))
	}
	return c, err
}

// reference is the contender that the scenarios of DHCP have an exception for.
const reference = "reference"

func tombolo() contender { return contender{name: "tombolo", call: byRuntime, plugins: ours} }

// inProcess is all of the plugin but for its process: the configuration, the records, the
// locks, the sockets. What composes an ADD is called here and nowhere else.
func inProcess() contender {
	return contender{name: "tombolo-in-process", plugins: ours, call: here}
}

func here(n *node, verb string, p *pod) (cost, error) {
	conf := maps.Clone(n.plugins(n, p)[0])
	maps.Copy(conf, object{"cniVersion": cniVersion, "name": networkName, "runtimeConfig": n.feature.asked(p.number)})
	if verb != "ADD" && p.result != nil {
		conf["prevResult"] = json.RawMessage(p.result)
	}
	stdin, err := json.Marshal(conf)
	if err != nil {
		return cost{}, err
	}
	env := map[string]string{"CNI_COMMAND": verb, "CNI_CONTAINERID": p.id(), "CNI_NETNS": p.path(), "CNI_IFNAME": podIfname}
	var out bytes.Buffer
	plugin := cni.Plugin{
		Getenv: func(name string) string { return env[name] }, Stdin: bytes.NewReader(stdin), Stdout: &out, After: n.after,
	}
	var c cost
	err = n.host.Do(func() error {
		start := time.Now()
		status := plugin.Run()
		c.wall = time.Since(start)
		if status != 0 {
			return errors.New(out.String())
		}
		return nil
	})
	if verb == "ADD" {
		p.result = out.Bytes()
	}
	return c, err
}

// attach is a program that embeds package bridge, and holds a connection.
func attach(tb testing.TB) contender {
	var conn *bridge.Conn
	tb.Cleanup(func() {
		if conn != nil {
			conn.Close()
		}
	})
	return contender{name: "attach", bridgeless: true, call: func(n *node, verb string, p *pod) (cost, error) {
		var err error
		if conn == nil {
			if conn, err = bridge.Dial(n.host); err != nil {
				return cost{}, err
			}
		}
		name := bridge.HostName(networkName, p.id(), podIfname)
		p.result = n.fixedResult(p)
		start := time.Now()
		if verb == "DEL" {
			err = conn.Detach(context.Background(), name, "")
		} else {
			port := bridge.Port{Bridge: floorBridge, Name: name, Peer: podIfname, MTU: podMTU}
			for _, subnet := range subnets(n.feature.dual) {
				port.Addresses = append(port.Addresses, podAddress(subnet, p.number))
				port.Routes = append(port.Routes, route.Route{Gateway: gatewayOf(subnet)})
			}
			_, err = conn.Attach(context.Background(), p.ns, port)
		}
		return cost{wall: time.Since(start)}, err
	}}
}

// floorBridge is the bridge that floor -setup makes.
const floorBridge = "floor0"

// floor is a static C program that asks the kernel for what nobody can leave out, and does
// nothing else; the runtime is told its result.
func floor() contender {
	return contender{name: "floor", bridgeless: true, needs: []string{"floor"}, call: byRuntime,
		plugins: func(*node, *pod) []object { return []object{{"type": "floor"}} }}
}

// kernel is floor's work without a process: one that is there, and is told what to do.
func kernel(tb testing.TB) contender {
	var in io.WriteCloser
	var out *bufio.Scanner
	start := func(n *node) error {
		path, _ := peer("floor")
		cmd := exec.Command(path, append([]string{"-loop"}, floorArgs(false, 0)...)...)
		var errs [2]error
		in, errs[0] = cmd.StdinPipe()
		stdout, err := cmd.StdoutPipe()
		out, errs[1] = bufio.NewScanner(stdout), err
		if err := errors.Join(errs[:]...); err != nil {
			return err
		}
		cmd.Stderr = os.Stderr
		tb.Cleanup(func() { in.Close(); _ = cmd.Wait() })
		return n.host.Do(cmd.Start)
	}
	return contender{name: "kernel", bridgeless: true, needs: []string{"floor"}, call: func(n *node, verb string, p *pod) (cost, error) {
		if in == nil {
			if err := start(n); err != nil {
				return cost{}, err
			}
		}
		p.result = n.fixedResult(&pod{})
		if _, err := fmt.Fprintf(in, "%s %s\n", verb, p.path()); err != nil || !out.Scan() {
			return cost{}, fmt.Errorf("floor -loop has ended: %w", errors.Join(err, out.Err()))
		}
		ns, err := strconv.ParseInt(out.Text(), 10, 64)
		return cost{wall: time.Duration(ns)}, err
	}}
}

func floorArgs(dual bool, pod int) []string {
	var args []string
	for i, subnet := range subnets(dual) {
		family := []string{"", "6"}[i]
		args = append(args, "-address"+family, podAddress(subnet, pod).String(), "-gateway"+family, gatewayOf(subnet).String())
	}
	return args
}

// fixedResult is that of a contender without an IPAM.
func (n *node) fixedResult(p *pod) []byte {
	var ips []object
	for _, subnet := range subnets(n.feature.dual) {
		ips = append(ips, object{"address": podAddress(subnet, p.number), "gateway": gatewayOf(subnet)})
	}
	result, err := json.Marshal(object{"cniVersion": cniVersion, "ips": ips})
	if err != nil {
		panic(err)
	}
	return result
}

func empty() contender {
	return contender{name: "empty", idle: true, needs: []string{"empty"}, call: byRuntime,
		plugins: func(*node, *pod) []object { return []object{{"type": "empty"}} }}
}

// kindnet is a plugin in the way of kindnet's; its database is what it keeps.
func kindnet() contender {
	return contender{name: "kindnet", needs: []string{"kindnet"}, call: byRuntime, plugins: func(n *node, _ *pod) []object {
		return []object{{"type": "kindnet", "ranges": []string{subnets(false)[0].String()}, "dataDir": n.dir}}
	}}
}

// kindnetDir is where bench/build.sh has told cni-kindnet to keep its database.
const kindnetDir = "/run/tombolo-bench-kindnet"

// cniKindnet is kindnet's own plugin, whose database has a fixed place.
func cniKindnet() contender {
	return contender{name: "cni-kindnet", needs: []string{"cni-kindnet"}, call: byRuntime, gateway: netip.Prefix.Addr, plugins: func(n *node, _ *pod) []object {
		return []object{{"type": "cni-kindnet", "ranges": []string{subnets(false)[0].String()}}}
	}}
}

// ours is the plugin's configuration: its defaults, which include masquerade and hairpin.
func ours(n *node, _ *pod) []object {
	c := object{"type": "tombolo", "bridge": "tmb0", "mtu": podMTU, "stateDir": filepath.Join(n.dir, "state"), "capabilities": capabilities}
	if n.lan != nil {
		maps.Copy(c, object{"mode": "l2", "bridge": lanBridge, "leaseDir": n.lan.records})
		c["ipam"] = object{"type": "dhcp", "rapidCommit": n.feature.rapid}
	} else {
		c["ipam"] = n.hostLocal(nil)
	}
	maps.Copy(c, n.feature.options)
	return []object{c}
}

func (n *node) hostLocal(more object) object {
	var ranges [][]object
	for _, subnet := range subnets(n.feature.dual) {
		ranges = append(ranges, []object{{"subnet": subnet}})
	}
	c := object{"type": "host-local", "ranges": ranges}
	maps.Copy(c, more)
	return c
}

var capabilities = map[string]bool{"portMappings": true, "bandwidth": true}

// theirs is the reference bridge with host-local, or dhcp. Where a pod asks for nothing
// but an address it does not masquerade: it would exec nft or iptables, and that is the
// comparison of other scenarios.
func theirs(n *node, backend string) object {
	c := object{"type": "bridge", "mtu": podMTU}
	if n.lan != nil {
		maps.Copy(c, object{"bridge": lanBridge, "ipam": object{"type": "dhcp", "daemonSocketPath": n.lan.socket}})
		return c
	}
	maps.Copy(c, object{"bridge": "cni0", "isGateway": true, "isDefaultGateway": true, "hairpinMode": true, "ipam": n.hostLocal(object{"dataDir": n.dir})})
	if n.feature.masquerade {
		maps.Copy(c, object{"ipMasq": true, "ipMasqBackend": backend})
	}
	return c
}

// referencePlugin is containernetworking's bridge plugin with its IPAM.
func referencePlugin() contender {
	return contender{name: reference, needs: []string{"bridge", "host-local", "dhcp"}, call: byRuntime,
		plugins: func(n *node, _ *pod) []object { return []object{theirs(n, "nftables")} }}
}

// chain is the reference as nodes run it. The firewall plugin knows iptables alone.
func chain(backend string) contender {
	return contender{name: "chain-" + backend, needs: []string{"bridge", "host-local", "portmap", "firewall", "bandwidth"}, call: byRuntime,
		plugins: func(n *node, _ *pod) []object { return chained(n, backend) }}
}

func chained(n *node, backend string) []object {
	return []object{
		theirs(n, backend),
		{"type": "portmap", "backend": backend, "capabilities": object{"portMappings": true}},
		{"type": "firewall", "backend": "iptables"},
		{"type": "bandwidth", "capabilities": object{"bandwidth": true}},
	}
}

// names is the same chain, with Tombolo by the names of its plugins.
func names() contender {
	return contender{name: "names", call: byRuntime, plugins: func(n *node, _ *pod) []object {
		list := chained(n, "nftables")
		for _, conf := range list {
			conf["stateDir"] = filepath.Join(n.dir, "state")
		}
		return list
	}}
}

const cniVersion = "1.1.0"

// byRuntime calls a contender's plugins by libcni, as runtimes do: with the results cached,
// each with that of the one before.
func byRuntime(n *node, verb string, p *pod) (cost, error) {
	spoken := cniVersion
	if strings.HasSuffix(n.name, "kindnet") {
		spoken = "0.4.0"
	}
	text, err := json.Marshal(object{"cniVersion": spoken, "name": networkName, "plugins": n.plugins(n, p)})
	if err != nil {
		return cost{}, err
	}
	list, err := libcni.NetworkConfFromBytes(text)
	if err != nil {
		return cost{}, err
	}
	run := &executor{node: n, pod: p}
	peers, _ := peer(".")
	runtime := libcni.NewCNIConfigWithCacheDir([]string{peers}, filepath.Join(n.dir, "cache"), run)
	call := &libcni.RuntimeConf{ContainerID: p.id(), NetNS: p.path(), IfName: podIfname, CapabilityArgs: n.feature.asked(p.number)}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err = n.host.Do(func() error {
		start := time.Now()
		err := carryOut(ctx, runtime, verb, list, call, p)
		run.cost.wall = time.Since(start)
		return err
	})
	return run.cost, err
}

func carryOut(ctx context.Context, runtime *libcni.CNIConfig, verb string, list *libcni.NetworkConfigList, call *libcni.RuntimeConf, p *pod) error {
	switch verb {
	case "ADD":
		result, err := runtime.AddNetworkList(ctx, list, call)
		if err == nil {
			p.result, err = json.Marshal(result)
		}
		return err
	case "DEL":
		return runtime.DelNetworkList(ctx, list, call)
	case "CHECK":
		return runtime.CheckNetworkList(ctx, list, call)
	}
	return runtime.GetStatusNetworkList(ctx, list)
}

// executor executes plugins for libcni and adds up what they cost.
type executor struct {
	version.PluginDecoder
	node *node
	pod  *pod
	cost cost
}

func (e *executor) FindInPath(plugin string, _ []string) (string, error) {
	switch {
	case plugin == "tombolo" && e.node.gauge: // a large folio is resident as a whole once a page of it is mapped
		dir, err := built()
		return filepath.Join(dir, "tombolo-cni"), err
	case plugin == "tombolo" || e.node.name == names().name:
		dir, err := installed()
		return filepath.Join(dir, plugin), err
	}
	path, _ := peer(plugin)
	return path, nil
}

// ExecPlugin is part of libcni's interface. As libcni's own does, it belongs to the
// namespace of its caller's thread.
func (e *executor) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	var args []string
	if filepath.Base(path) == "floor" {
		args = floorArgs(e.node.feature.dual, e.pod.number)
	}
	cmd := exec.CommandContext(ctx, path, args...)
	if e.node.gauge {
		gauge, _ := peer("peak")
		cmd = exec.CommandContext(ctx, gauge, append([]string{path}, args...)...)
	}
	var out, said bytes.Buffer
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = environ, bytes.NewReader(stdin), &out, &said
	var report *os.File
	if e.node.gauge {
		var err error
		if report, err = os.CreateTemp(e.node.dir, "peak"); err != nil {
			return nil, err
		}
		defer os.Remove(report.Name())
		defer report.Close()
		cmd.ExtraFiles = []*os.File{report}
	}
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%s: %w: %s %s", filepath.Base(path), err, bytes.TrimSpace(out.Bytes()), bytes.TrimSpace(said.Bytes()))
	}
	if used, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
		e.cost.cpu += time.Duration(used.Utime.Nano() + used.Stime.Nano())
	}
	if report != nil {
		figure, err := os.ReadFile(report.Name())
		kib, _ := strconv.Atoi(strings.TrimSpace(string(figure)))
		e.cost.peak = max(e.cost.peak, kib)
		if err != nil {
			return nil, err
		}
	}
	if filepath.Base(path) == "floor" {
		return e.node.fixedResult(e.pod), nil
	}
	return out.Bytes(), nil
}

// addresses are those of a result, of any version, and their gateways.
func addresses(result []byte) ([]*types100.IPConfig, error) {
	parsed, err := create.CreateFromBytes(result)
	if err != nil {
		return nil, fmt.Errorf("result %q: %w", result, err)
	}
	r, err := types100.NewResultFromResult(parsed)
	if err != nil {
		return nil, fmt.Errorf("result %q: %w", result, err)
	}
	return r.IPs, nil
}

// checkResult looks at a plugin's result: one address in each subnet, in order.
func checkResult(result []byte, wanted []netip.Prefix, gatewayOf func(netip.Prefix) netip.Addr) error {
	ips, err := addresses(result)
	if err == nil && len(ips) != len(wanted) {
		err = fmt.Errorf("result %s has %d addresses, want %d", result, len(ips), len(wanted))
	}
	for i := 0; err == nil && i < len(wanted); i++ {
		address, _ := netip.AddrFromSlice(ips[i].Address.IP)
		gateway, _ := netip.AddrFromSlice(ips[i].Gateway)
		if !wanted[i].Contains(address.Unmap()) || gateway.Unmap() != gatewayOf(wanted[i]) {
			err = fmt.Errorf("result has %s by %s, want one of %s by %s", address, gateway, wanted[i], gatewayOf(wanted[i]))
		}
	}
	return err
}

// missing says what a contender lacks on this machine; empty for nothing.
func (c contender) missing() string {
	for _, name := range c.needs {
		if path, there := peer(name); !there {
			return path + " is missing: make peers builds it, bench/build.sh DIRECTORY kindnet [CLONE] the kindnets"
		}
	}
	return ""
}

// floorBridgeOn makes the bridge with the gateways' addresses.
func floorBridgeOn(tb testing.TB, n *node) {
	tb.Helper()
	path, there := peer("floor")
	if !there {
		tb.Skip("floor is missing: make peers builds it")
	}
	nstest.Run(tb, n.host, path, append([]string{"-setup"}, floorArgs(n.feature.dual, 0)...)...)
}
