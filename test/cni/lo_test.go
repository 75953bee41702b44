package cni

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	cniversion "github.com/containernetworking/cni/pkg/version"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// loopbackPlugin is the program under test by the name that containerd 1.6 and 1.7 look for.
func (n *node) loopbackPlugin() string {
	n.Helper()
	path := filepath.Join(n.TempDir(), "loopback")
	must.Succeed(n, os.Symlink(plugin(), path))
	return path
}

func isUp(t testing.TB, p *pod) bool {
	t.Helper()
	return strings.Contains(nstest.Run(t, p.NS, "ip", "-o", "link", "show", "lo"), ",UP")
}

// What the reference plugin says in each version, with and without results before it, is said
// here too; and lo is up, or down, as after it.
func TestLoopbackIsAsTheReferences(t *testing.T) {
	n := parallelNode(t)
	peers := os.Getenv("TOMBOLO_PEERS")
	must.That(t, peers != "", "TOMBOLO_PEERS is not set: make peers builds what this compares with")
	programs := []string{filepath.Join(peers, "loopback"), n.loopbackPlugin()}
	for _, version := range []string{"0.1.0", "0.2.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		for prevName, prev := range map[string]string{
			"alone":   "",
			"chained": `, "prevResult": {"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "/x"}], "ips": [{"address": "10.1.0.2/24", "interface": 0}]}`,
			"null":    `, "prevResult": null`,
		} {
			nstest.RunParallel(t, version+" "+prevName, func(t *testing.T) {
				if prevName == "chained" && version < "1.0.0" {
					prev = strings.Replace(strings.Replace(prev, "1.0.0", version, 1), `{"address"`, `{"version": "4", "address"`, 1)
				}
				if prevName == "chained" && version < "0.3.0" {
					prev = fmt.Sprintf(`, "prevResult": {"cniVersion": %q, "ip4": {"ip": "10.1.0.2/24"}}`, version)
				}
				stdin := []byte(fmt.Sprintf(`{"cniVersion": %q, "name": "cni-loopback", "type": "loopback"%s}`, version, prev))
				var said [2]map[string]any
				for i, program := range programs {
					p := n.pod("a")
					run := func(verb string) outcome {
						t.Helper()
						c := call{verb: verb, id: p.id, netns: p.path, ifName: "lo"}
						return must.Of(n.exec(context.Background(), program, stdin, c.environ())).Get(t)
					}
					if version >= "0.4.0" {
						expect.That(t, run("CHECK").status != 0,
							"%s: CHECK finds nothing wrong with lo that is down", program)
					}
					o := run("ADD")
					if o.status != 0 || !isUp(t, p) {
						t.Fatalf("%s: ADD: %d, %s, and lo is up: %v", program, o.status, o.stdout, isUp(t, p))
					}
					unmarshal(t, strings.ReplaceAll(o.stdout, p.path, "POD"), &said[i])
					if version >= "0.4.0" {
						expect.Success(t, run("CHECK").err(), "%s: CHECK", program)
					}
					if o := run("DEL"); o.status != 0 || isUp(t, p) || o.stdout != "" {
						t.Errorf("%s: DEL: %d, %s, and lo is up: %v", program, o.status, o.stdout, isUp(t, p))
					}
					gone := call{verb: "DEL", id: p.id, netns: "/nonexistent", ifName: "lo"}
					if o, err := n.exec(context.Background(), program, stdin, gone.environ()); err != nil || o.status != 0 {
						t.Errorf("%s: DEL of what is gone: %v, %s", program, err, o.stdout)
					}
				}
				if prevName != "chained" && version < "1.0.0" {
					// The reference says it in the form of 1.0.0, which libcni cannot read up to 0.2.0.
					data := must.Of(json.Marshal(said[1])).Get(t)
					var r *types100.Result
					old, err := cniversion.NewResult(version, data)
					if err == nil {
						r, err = types100.NewResultFromResult(old)
					}
					must.Succeed(t, err)
					var ips []string
					for _, ip := range r.IPs {
						ips = append(ips, ip.Address.String())
					}
					if got := fmt.Sprint(ips); got != "[127.0.0.1/8 ::1/128]" {
						t.Errorf("addresses %s in %v", got, said[1])
					}
					return
				}
				want, got := fmt.Sprint(said[0]), fmt.Sprint(said[1])
				expect.That(t, want == got, "the reference says\n%s\nand this\n%s", want, got)
			})
		}
	}
	nstest.RunParallel(t, "VERSION", func(t *testing.T) {
		var said [2]struct {
			CNIVersion        string   `json:"cniVersion"`
			SupportedVersions []string `json:"supportedVersions"`
		}
		for i, program := range programs {
			o, err := n.exec(context.Background(), program, []byte(`{"cniVersion": "1.0.0"}`), (&call{verb: "VERSION"}).environ())
			must.That(t, err == nil && o.status == 0, "%s: %v, %s", program, err, o.stdout)
			unmarshal(t, o.stdout, &said[i])
		}
		want, got := fmt.Sprint(said[0]), fmt.Sprint(said[1])
		expect.That(t, want == got, "the reference speaks %s, this %s", want, got)
	})
	nstest.RunParallel(t, "another address", func(t *testing.T) {
		for _, program := range programs {
			p := n.pod("a")
			nstest.Run(t, p.NS, "ip", "address", "add", "10.9.9.9/32", "dev", "lo")
			c := call{verb: "ADD", id: p.id, netns: p.path, ifName: "lo"}
			o, err := n.exec(context.Background(), program, []byte(`{"cniVersion": "1.0.0", "name": "l", "type": "loopback"}`), c.environ())
			expect.That(t, err == nil && o.status != 0 && strings.Contains(o.stdout, "10.9.9.9"),
				"%s: %v, %d, %s", program, err, o.status, o.stdout)
		}
	})
}

// By any other name the plugin is the network's, and without CNI_COMMAND it names the operator's command.
func TestLoopbackNameAloneMakesNoDifferenceToNetworks(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	p := w.addPod("a")
	expect.That(t, len(globals(t, p.NS, "eth0")) > 0, "the pod has no address")
	o, err := n.exec(context.Background(), n.loopbackPlugin(), nil, os.Environ(), "version")
	expect.That(t, err == nil && o.status == 2 && strings.HasSuffix(o.stderr, "tombolo version\n"),
		"%v, %d, %s%s", err, o.status, o.stdout, o.stderr)
}

// A path of a process leads elsewhere once its number is another's: that may be the host's namespace.
func TestLoopbackLeavesTheHostsOwnUp(t *testing.T) {
	n := parallelNode(t)
	c := call{verb: "DEL", id: "a", netns: "/proc/self/ns/net", ifName: "lo"}
	o, err := n.exec(context.Background(), n.loopbackPlugin(), []byte(`{"cniVersion": "1.0.0", "name": "l", "type": "loopback"}`), c.environ())
	must.That(t, err == nil && o.status == 0, "DEL: %v, %d, %s", err, o.status, o.stdout)
	expect.Contains(t, nstest.Run(t, n.ns, "ip", "-o", "link", "show", "lo"), ",UP", "the host's lo is down")
}
