package cni

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

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
