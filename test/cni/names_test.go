package cni

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	cniversion "github.com/containernetworking/cni/pkg/version"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// byName are the reference's names that this program takes.
func byName() []string {
	return []string{"bandwidth", "bridge", "firewall", "host-local", "portmap", "static", "tuning"}
}

// side is a node on which plugins are at work that are found by the reference's names.
type side struct {
	*node
	programs string // the directory of them
	network  string // the name of that of chain; net where it is empty
	bus      string // address of the system's; empty for none
	data     string // for the files that a configuration names, as DATA
	pods     map[string]*pod
	results  map[string]string // of a pod's last ADD
}

// sides are two nodes alike: one with the reference's plugins, and one with this program by
// their names, and the reference's own by all others.
func sides(t testing.TB) (theirs, ours *side) {
	t.Helper()
	peers := os.Getenv(peersVar)
	must.That(t, peers != "", "TOMBOLO_PEERS is not set: make peers builds what this compares with")
	return newSide(t, peers, nil), newSide(t, peers, byName())
}

// newSide makes a node with the reference's plugins, where some names are this program's.
func newSide(t testing.TB, peers string, ours []string) *side {
	t.Helper()
	return newNode(t).side(peers, ours)
}

// side has plugins be found on a node by the reference's names.
func (n *node) side(peers string, ours []string) *side {
	n.Helper()
	t := n
	s := &side{node: n, programs: t.TempDir(), data: t.TempDir(), pods: map[string]*pod{}, results: map[string]string{}}
	for _, name := range []string{"bridge", "ptp", "macvlan", "host-local", "static", "dhcp", "portmap", "bandwidth", "firewall", "tuning", "loopback"} {
		target := filepath.Join(peers, name)
		_, err := os.Stat(target)
		must.That(t, err == nil, "%v: make peers builds it", err)
		path := filepath.Join(s.programs, name)
		if slices.Contains(ours, name) { // as install --names does
			must.Succeed(t, os.Symlink(target, path+".reference"))
			target = plugin()
		}
		must.Succeed(t, os.Symlink(target, path))
	}
	return s
}

// of is a pod of the side's by name, which is made when it is first named.
func (s *side) of(id string) *pod {
	if s.pods[id] == nil {
		s.pods[id] = s.pod(id)
	}
	return s.pods[id]
}

// verb is one call of a plugin by a name, as the runtime makes it, or another plugin.
type verb struct {
	plugin, verb, id string
	conf             string // the configuration; DATA stands for the side's directory, POD for the pod's path
	args             string
	ifName           string // eth0 where it is empty
	netns            string // the pod's where it is empty; "-" for none
}

// call makes the call, and says how it ended.
func (s *side) call(v verb) outcome {
	s.Helper()
	p := s.of(v.id)
	c := call{verb: v.verb, id: v.id, netns: p.path, ifName: v.ifName, args: v.args}
	if c.ifName == "" {
		c.ifName = "eth0"
	}
	switch v.netns {
	case "":
	case "-":
		c.netns = ""
	default:
		c.netns = v.netns
	}
	stdin := strings.NewReplacer("DATA", s.data, "POD", p.path, "STATE", s.state).Replace(v.conf)
	environ := append(c.environ(), "CNI_PATH="+s.programs, "DBUS_SYSTEM_BUS_ADDRESS="+cmp.Or(s.bus, "unix:path=/nowhere"))
	o := must.Of(s.exec(context.Background(), filepath.Join(s.programs, v.plugin), []byte(stdin), environ)).Get(s)
	o.stdout = strings.NewReplacer(s.data, "DATA", p.path, "POD").Replace(o.stdout)
	return o
}

// said is a result, up to the names of links on the host and MACs, and with nothing for what is
// empty. What is no result stays.
func said(t testing.TB, stdout string) string {
	t.Helper()
	var said map[string]any
	if json.Unmarshal([]byte(stdout), &said) != nil || said["cniVersion"] == "" {
		return stdout
	}
	if dns, ok := said["dns"].(map[string]any); ok && len(dns) == 0 {
		delete(said, "dns")
	}
	if routes, ok := said["routes"].([]any); ok { // whose order means nothing
		slices.SortFunc(routes, func(a, b any) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
	}
	text := string(marshal(t, said))
	text = regexp.MustCompile(`([0-9a-f]{2}:){5}[0-9a-f]{2}`).ReplaceAllString(text, "MAC")
	return regexp.MustCompile(`veth[0-9a-f]+`).ReplaceAllString(text, "VETH")
}

// failure is what an error object says; nil if there is none.
func failure(stdout string) *types.Error {
	var e types.Error
	if json.Unmarshal([]byte(stdout), &e) != nil || e.Code == 0 {
		return nil
	}
	return &e
}

// specific says that a code tells more than that something failed: the reference has few such.
func specific(code uint) bool { return code != types.ErrInternal && code < 100 }

// agree compares how a call ended on both sides: both fail, with the same code where the
// reference's means something, or both succeed, with the same result.
func agree(t testing.TB, name string, theirs, ours outcome) {
	t.Helper()
	their, our := failure(theirs.stdout), failure(ours.stdout)
	switch {
	case (theirs.status == 0) != (ours.status == 0):
		t.Errorf("%s: the reference ends with %d, %s\nand this with %d, %s", name, theirs.status, theirs.stdout, ours.status, ours.stdout)
	case theirs.status != 0:
		if their == nil || our == nil {
			t.Errorf("%s: no error object: %s\n%s", name, theirs.stdout, ours.stdout)
		} else if specific(their.Code) && their.Code != our.Code {
			t.Errorf("%s: the reference's error is %d: %s\nthis one's %d: %s", name, their.Code, their.Msg, our.Code, our.Msg)
		}
	default:
		want, got := said(t, theirs.stdout), said(t, ours.stdout)
		expect.That(t, want == got, "%s: the reference says\n%s\nand this\n%s", name, want, got)
	}
}

// files are those below a side's directory, but for what each keeps for itself, and the note of
// the last address: the reference has reserved one before it refuses another.
func (s *side) files() string {
	s.Helper()
	var list []string
	must.Succeed(s, filepath.WalkDir(s.data, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Name() == "lock" || d.Name() == ".tombolo-epoch" || strings.HasPrefix(d.Name(), "last_reserved_ip.") {
			return err
		}
		content, err := os.ReadFile(path)
		list = append(list, fmt.Sprintf("%s: %q", strings.TrimPrefix(path, s.data), content))
		return err
	}))
	return strings.Join(list, "\n")
}

// In each version and each verb, IPAM plugins by name end as the reference's do, say the same,
// and leave the same files.
func TestIPAMPluginsByNameAreAsTheReferences(t *testing.T) {
	t.Parallel()
	const prev = `"prevResult":{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"POD"}],"ips":[{"address":"10.5.0.2/24","gateway":"10.5.0.1","interface":0}]}`
	conf := func(version, ipam string, more ...string) string {
		return fmt.Sprintf(`{"cniVersion":%q,"name":"net","type":"ptp","unknown":1,"ipam":%s%s}`, version, ipam, strings.Join(append([]string{""}, more...), ","))
	}
	local := func(section string) string { return `{"type":"host-local","dataDir":"DATA/n",` + section + `}` }
	const one = `"subnet":"10.5.0.0/24"`
	const both = `"ranges":[[{"subnet":"fd05::/64"}],[{"subnet":"10.5.0.0/24","rangeStart":"10.5.0.10","rangeEnd":"10.5.0.11"}]],"routes":[{"dst":"0.0.0.0/0"},{"dst":"10.9.0.0/16","gw":"10.5.0.9","mtu":1400,"table":7}],"unknown":true`
	static := func(section string) string { return `{"type":"static",` + section + `}` }
	const two = `"addresses":[{"address":"fd05::7/64"},{"address":"10.5.0.7/24","gateway":"10.5.0.1"}],"routes":[{"dst":"0.0.0.0/0","gw":"10.5.0.1"}],"dns":{"nameservers":["10.5.0.1"],"search":["x"]}`
	for name, steps := range map[string][]verb{
		"host-local: pods in turn, until there is none left": {
			{conf: conf("1.0.0", local(both)), verb: "ADD", id: "a"}, {conf: conf("1.0.0", local(both)), verb: "ADD", id: "b"},
			{conf: conf("1.0.0", local(both)), verb: "ADD", id: "c"}, {conf: conf("1.0.0", local(both)), verb: "DEL", id: "a"},
			{conf: conf("1.0.0", local(both)), verb: "ADD", id: "c"}, {conf: conf("1.0.0", local(both)), verb: "CHECK", id: "c"},
			{conf: conf("1.0.0", local(both)), verb: "CHECK", id: "a"}, {conf: conf("1.0.0", local(both)), verb: "DEL", id: "a"},
		},
		"host-local: two interfaces of a pod, and one twice": {
			{conf: conf("0.4.0", local(one)), verb: "ADD", id: "a"}, {conf: conf("0.4.0", local(one)), verb: "ADD", id: "a", ifName: "net1"},
			{conf: conf("0.4.0", local(one)), verb: "ADD", id: "a"}, {conf: conf("0.4.0", local(one)), verb: "DEL", id: "a", netns: "-"},
			{conf: conf("0.4.0", local(one)), verb: "CHECK", id: "a", ifName: "net1"}, {conf: conf("0.4.0", local(one)), verb: "ADD", id: "a"},
		},
		"host-local: addresses that were asked for": {
			{conf: conf("1.0.0", local(one)), verb: "ADD", id: "a", args: "IP=10.5.0.77"}, {conf: conf("1.0.0", local(one)), verb: "ADD", id: "b", args: "IP=10.5.0.77"},
			{conf: conf("1.0.0", local(one)), verb: "ADD", id: "b", args: "IP=10.6.0.77"}, {conf: conf("1.0.0", local(one)), verb: "ADD", id: "b", args: "IP=10.5.0.1"},
			{conf: conf("1.0.0", local(one)), verb: "ADD", id: "b", args: "IP=10.5.0.78/24"}, {conf: conf("1.0.0", local(one)), verb: "ADD", id: "a", args: "IP=10.5.0.77"},
			{conf: conf("1.0.0", local(one), `"args":{"cni":{"ips":["10.5.0.80"]}}`), verb: "ADD", id: "c"},
			{conf: conf("1.0.0", local(both), `"runtimeConfig":{"ips":["10.5.0.11","fd05::9"]}`), verb: "ADD", id: "d"},
			{conf: conf("1.0.0", local(both), `"runtimeConfig":{"ips":["10.5.0.11","10.5.0.10"]}`), verb: "ADD", id: "e"},
			{conf: conf("1.0.0", local(one)), verb: "ADD", id: "f", args: "FOO=1"}, {conf: conf("1.0.0", local(one)), verb: "ADD", id: "f", args: "IgnoreUnknown=1;FOO=1"},
		},
		"host-local: ranges that the runtime gives": {
			{conf: conf("1.0.0", local(`"routes":[]`), `"runtimeConfig":{"ipRanges":[[{"subnet":"10.6.0.0/24","gateway":"10.6.0.254"}],[{"subnet":"fd06::/120"}]]}`), verb: "ADD", id: "a"},
			{conf: conf("1.0.0", local(one), `"runtimeConfig":{"ipRanges":[[{"subnet":"10.6.0.0/24"}]]}`), verb: "ADD", id: "b"},
		},
		"host-local: what cannot be": {
			{conf: conf("1.0.0", local(`"routes":[]`)), verb: "ADD", id: "a"}, {conf: conf("1.0.0", local(`"subnet":"10.5.0.1/24"`)), verb: "ADD", id: "a"},
			{conf: conf("1.0.0", local(`"subnet":"10.5.0.0/31"`)), verb: "ADD", id: "a"}, {conf: conf("1.0.0", local(`"subnet":7`)), verb: "ADD", id: "a"},
			{conf: conf("1.0.0", local(`"ranges":[[{"subnet":"10.5.0.0/24"}],[{"subnet":"10.5.0.128/25"}]]`)), verb: "ADD", id: "a"},
			{conf: conf("0.2.0", local(`"ranges":[[{"subnet":"10.5.0.0/24"}],[{"subnet":"10.6.0.0/24"}]]`)), verb: "ADD", id: "a"},
			{conf: conf("1.0.0", local(one+`,"resolvConf":"DATA/none"`)), verb: "ADD", id: "a"},
			{conf: `{"cniVersion":"1.0.0","name":"net","type":"ptp"}`, verb: "ADD", id: "a"}, {conf: `{"cniVersion":"9.0.0","name":"net"}`, verb: "ADD", id: "a"},
			{conf: `{"cniVersion":"1.0.0","type":"ptp"}`, verb: "ADD", id: "a"}, {conf: `{`, verb: "ADD", id: "a"}, {conf: conf("0.3.1", local(one)), verb: "CHECK", id: "a"},
			{conf: conf("1.0.0", local(one)), verb: "STATUS", id: "a"}, {conf: conf("1.0.0", local(one)), verb: "ADD", id: "a", ifName: "a/b"},
		},
		"host-local: results of earlier versions": {
			{conf: conf("0.1.0", local(both)), verb: "ADD", id: "a"}, {conf: conf("0.2.0", local(both)), verb: "ADD", id: "b"}, {conf: conf("0.3.1", local(one)), verb: "ADD", id: "c"},
		},
		"host-local: verbs that it has not": {
			{conf: conf("1.1.0", local(one)), verb: "ADD", id: "a"}, {conf: conf("1.1.0", local(one)), verb: "STATUS", id: "a"},
			{conf: conf("1.1.0", local(one), `"cni.dev/valid-attachments":[]`), verb: "GC", id: "a"}, {conf: conf("1.1.0", local(one)), verb: "VERSION", id: "a"},
		},
		"static: addresses of the configuration": {
			{conf: conf("1.0.0", static(two)), verb: "ADD", id: "a"}, {conf: conf("0.2.0", static(two)), verb: "ADD", id: "a"}, {conf: conf("1.1.0", static(two)), verb: "VERSION", id: "a"},
			{conf: conf("1.0.0", static(two)), verb: "DEL", id: "a", netns: "-"}, {conf: conf("1.1.0", static(two)), verb: "STATUS", id: "a"}, {conf: conf("1.1.0", static(two)), verb: "GC", id: "a"},
		},
		"static: addresses from elsewhere": {
			{conf: conf("1.0.0", static(two)), verb: "ADD", id: "a", args: "IP=10.6.0.7/24,fd06::7/64;GATEWAY=10.6.0.1"},
			{conf: conf("1.0.0", static(two), `"args":{"cni":{"ips":["10.6.0.7/24"]}}`), verb: "ADD", id: "a"},
			{conf: conf("1.0.0", static(two), `"args":{"cni":{"ips":["10.6.0.7/24"]}}`, `"runtimeConfig":{"ips":["10.7.0.7/24"]}`), verb: "ADD", id: "a"},
			{conf: conf("1.0.0", static(two)), verb: "ADD", id: "a", args: "IP=10.6.0.7"}, {conf: conf("1.0.0", static(`"routes":[]`)), verb: "ADD", id: "a"},
			{conf: conf("1.0.0", static(`"addresses":[{"address":"10.5.0.7"}]`)), verb: "ADD", id: "a"},
		},
		"static: without ipam": {
			{conf: `{"cniVersion":"1.0.0","name":"net","type":"ptp"}`, verb: "ADD", id: "a"}, {conf: conf("1.0.0", "null"), verb: "ADD", id: "a"},
			{conf: conf("1.0.0", "{}"), verb: "ADD", id: "a"}, {conf: `{"cniVersion":"1.0.0","name":"net","type":"ptp",` + prev + `}`, verb: "CHECK", id: "a"},
			{conf: `{"cniVersion":"1.0.0","name":"net","type":"ptp"}`, verb: "DEL", id: "a"},
		},
		"static: CHECK": {
			{conf: conf("1.0.0", static(`"addresses":[{"address":"10.5.0.2/24","gateway":"10.5.0.1"}]`), prev), verb: "CHECK", id: "a"},
			{conf: conf("1.0.0", static(`"addresses":[{"address":"10.5.0.2/24"}]`), prev), verb: "CHECK", id: "a"},
			{conf: conf("1.0.0", static(`"addresses":[{"address":"10.5.0.2/24","gateway":"10.5.0.9"}]`), prev), verb: "CHECK", id: "a"},
			{conf: conf("1.0.0", static(`"addresses":[{"address":"10.5.0.3/24"}]`), prev), verb: "CHECK", id: "a"},
			{conf: conf("1.0.0", static(two)), verb: "CHECK", id: "a"},
		},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			theirs, ours := sides(t)
			plugin, _, _ := strings.Cut(name, ":")
			for i, v := range steps {
				v.plugin = plugin
				agree(t, fmt.Sprintf("step %d, %s of %s", i, v.verb, v.id), theirs.call(v), ours.call(v))
				want, got := theirs.files(), ours.files()
				must.That(t, want == got, "step %d, %s of %s: the reference leaves\n%s\nand this\n%s", i, v.verb, v.id, want, got)
			}
		})
	}
}

// The resolv.conf that a configuration names is in the result.
func TestHostLocalByNameReadsResolvConf(t *testing.T) {
	t.Parallel()
	theirs, ours := sides(t)
	for _, s := range []*side{theirs, ours} {
		nstest.PutFile(t, s.data, "resolv.conf", "# x\nnameserver 10.5.0.1\nsearch a b\ndomain c\noptions ndots:5\n")
	}
	v := verb{plugin: "host-local", verb: "ADD", id: "a", conf: `{"cniVersion":"1.0.0","name":"net","ipam":{"type":"host-local","dataDir":"DATA/n","resolvConf":"DATA/resolv.conf","subnet":"10.5.0.0/24"}}`}
	agree(t, "ADD", theirs.call(v), ours.call(v))
}

// Both work in one directory at once: no address is given twice, and each releases what the other
// has reserved.
func TestHostLocalByNameBesideTheReferences(t *testing.T) {
	t.Parallel()
	theirs, ours := sides(t)
	ours.data = theirs.data
	const each, conf = 12, `{"cniVersion":"1.0.0","name":"net","ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/27"}}`
	var calls []int
	for i := range 2 * each {
		calls = append(calls, i)
		[]*side{theirs, ours}[i%2].of(fmt.Sprint("pod-", i))
	}
	given := make([]string, len(calls))
	nstest.NoErrors(t, "ADD", nstest.AtOnce(calls, func(i int, _ int) error {
		o := []*side{theirs, ours}[i%2].call(verb{plugin: "host-local", verb: "ADD", id: fmt.Sprint("pod-", i), conf: conf})
		var r current.Result
		if err := json.Unmarshal([]byte(o.stdout), &r); err != nil || o.status != 0 || len(r.IPs) != 1 {
			return fmt.Errorf("pod-%d: %s", i, o.stdout)
		}
		given[i] = r.IPs[0].Address.String()
		return nil
	}))
	slices.Sort(given)
	n := len(slices.Compact(given))
	expect.That(t, n == 2*each, "%d addresses for %d pods: %s", n, 2*each, given)
	for i := range calls {
		by := []*side{ours, theirs}[i%2] // the other's
		expect.Success(t, by.call(verb{plugin: "host-local", verb: "DEL", id: fmt.Sprint("pod-", i), conf: conf, netns: "-"}).err(), "DEL of pod-%d", i)
	}
	for name := range nstest.Files(t, filepath.Join(theirs.data, "n", "net"), "lock", "last_reserved_ip.0") {
		t.Errorf("%s is left", name)
	}
}

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
					var r *current.Result
					old, err := cniversion.NewResult(version, data)
					if err == nil {
						r, err = current.NewResultFromResult(old)
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

// dhcpSide is a side on whose bridge br0 there is a LAN, with dnsmasq in it.
type dhcpSide struct {
	*side
	*lan
}

// dhcpSides are two LANs alike: on the one the reference's plugins are at work, with its daemon.
func dhcpSides(t *testing.T, options ...string) (theirs, ours *dhcpSide) {
	t.Helper()
	peers := os.Getenv(peersVar)
	must.That(t, peers != "", "TOMBOLO_PEERS is not set: make peers builds what this compares with")
	options = append(options, "--dhcp-sequential-ip") // both give the same
	made := func(names []string) *dhcpSide {
		l := newLAN(t, options...)
		return &dhcpSide{l.node.side(peers, names), l}
	}
	theirs, ours = made(nil), made([]string{"bridge"})
	socket := theirs.data + "/dhcp.sock"
	daemon := exec.Command(filepath.Join(theirs.programs, "dhcp"), "daemon", "-socketpath", socket, "-resendtimeout", "20s")
	must.Succeed(t, theirs.side.ns.Do(daemon.Start))
	t.Cleanup(func() {
		daemon.Process.Kill()
		daemon.Wait()
	})
	theirs.eventually(t, func() bool { _, err := os.Stat(socket); return err == nil })
	return theirs, ours
}

const dhcpFields = `"stateDir":"STATE","leaseDir":"STATE-leases","unknown":1`

func dhcpConf(version, ipam string, more ...string) string {
	return fmt.Sprintf(`{"cniVersion":%q,"name":"net","type":"macvlan",%s,"ipam":{"type":"dhcp","daemonSocketPath":"DATA/dhcp.sock","keeper":"optional"%s}%s}`,
		version, dhcpFields, ipam, strings.Join(append([]string{""}, more...), ","))
}

// held is what dnsmasq holds, but for when it ends.
func held(t *testing.T, s *dhcpSide) string {
	t.Helper()
	return regexp.MustCompile(`(?m)^\d+ `).ReplaceAllString(s.leased(), "")
}

// The bridge by name leases in process, as the reference's does by its plugin.
func TestBridgeByNameLeasesAsTheReferences(t *testing.T) {
	t.Parallel()
	theirs, ours := dhcpSides(t, "--dhcp-option=option:dns-server,192.168.50.53", "--dhcp-option=option:mtu,1400")
	for _, fields := range []string{"", `"request":[{"option":"42"}],"priority":7,"provide":[{"option":"host-name","value":"printer"}]`} {
		id := fmt.Sprint("pod-", len(fields))
		conf := strings.Replace(dhcpConf("1.0.0", strings.TrimSuffix(","+fields, ",")), `"type":"macvlan"`, `"type":"bridge","bridge":"br0"`, 1)
		add := verb{plugin: "bridge", verb: "ADD", id: id, conf: conf, args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web"}
		agree(t, "ADD with "+fields, theirs.call(add), ours.call(add))
		a, b := identities(t, theirs), identities(t, ours)
		expect.That(t, a == b, "%s: the reference's server holds\n%s\nand this one's\n%s", fields, a, b)
	}
	del := verb{plugin: "bridge", verb: "DEL", id: "pod-0", conf: strings.Replace(dhcpConf("1.0.0", ""), `"type":"macvlan"`, `"type":"bridge","bridge":"br0"`, 1)}
	agree(t, "DEL", theirs.call(del), ours.call(del))
	ours.wantReleased(t, "192.168.50.100")
}

// identities are the addresses, names and client identifiers of what dnsmasq holds.
func identities(t *testing.T, s *dhcpSide) string {
	t.Helper()
	return regexp.MustCompile(`(?m)^\S+ `).ReplaceAllString(held(t, s), "")
}

// Once all names have changed over, the reference's daemon leases for interfaces of the reference's as before, since dhcp
// is no name of ours; for the bridge's pods, the bridge leases itself.
func TestTheReferencesDHCPStaysWithItsDaemon(t *testing.T) {
	t.Parallel()
	s, _ := dhcpSides(t)
	o := s.side.operate("install", "--names", "all", s.programs)
	must.That(t, o.status == 0 && !strings.Contains(o.stdout, "dhcp"), "install: %+v", o)
	for _, plugin := range []string{"macvlan", "bridge"} {
		link := map[string]string{"macvlan": `"master":"br0"`, "bridge": `"bridge":"br0"`}[plugin]
		conf := strings.Replace(dhcpConf("1.0.0", ""), `"type":"macvlan"`, `"type":"`+plugin+`",`+link, 1)
		o := s.call(verb{plugin: plugin, verb: "ADD", id: plugin, conf: conf})
		address := regexp.MustCompile(`192\.168\.50\.1\d\d`).FindString(o.stdout)
		if o.status != 0 || address == "" || !strings.Contains(held(t, s), address) {
			t.Errorf("ADD by %s: %+v, and the server holds\n%s", plugin, o, held(t, s))
		}
		records, err := filepath.Glob(s.side.state + "-leases/*.json")
		expect.That(t, err == nil && len(records) > 0 == (plugin == "bridge"),
			"%s: records of leases: %q, %v", plugin, records, err)
		expect.Success(t, s.call(verb{plugin: plugin, verb: "DEL", id: plugin, conf: conf}).err(), "DEL by %s", plugin)
	}
}
