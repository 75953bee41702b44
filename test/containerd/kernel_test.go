package containerd

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net/netip"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// The bridge of the template, and the directory of the plugin's state in the node.
const (
	bridgeName = "cbr0"
	stateDir   = "/run/tombolo"
)

// traces are what pods have on the node: links, elements, queues, namespaces, and what
// is in files. A bridge, a table, and what a network keeps in files for its own sake
// are none.
func (n *node) traces() []string {
	n.Helper()
	found := []string{}
	for _, l := range n.links() {
		if l != "lo" && l != bridgeName && l != uplinkName {
			found = append(found, "link "+l)
		}
	}
	for _, owner := range regexp.MustCompile(`tombolo:1:[0-9a-f]{11}:[^"]*`).FindAllString(n.run("nft", "list", "ruleset"), -1) {
		found = append(found, "element of "+owner)
	}
	for _, line := range strings.Split(n.run("tc", "qdisc", "show"), "\n") {
		// The clsact of the bridge itself is there as long as the bridge.
		if line != "" && !strings.Contains(line, "noqueue") && !strings.HasPrefix(line, "qdisc clsact ffff: dev cbr0 ") {
			found = append(found, "queue "+line)
		}
	}
	for _, name := range n.files(stateDir) {
		if base := filepath.Base(name); strings.HasPrefix(name, "attachments/") || strings.HasPrefix(base, ".tmp-") || isAddress(base) {
			found = append(found, "file "+name)
		}
	}
	for _, name := range n.files(netnsDir) {
		found = append(found, "namespace "+name)
	}
	slices.Sort(found)
	return found
}

func (n *node) wantNothing() { n.Helper(); n.wantTraces([]string{}) }

// wantTraces fails the test unless the traces are those of before.
func (n *node) wantTraces(before []string) {
	n.Helper()
	expect.NoDiff(n, cmp.Diff(before, n.traces()), "what pods have")
}

// files lists the files below a directory of the node, which may be missing.
func (n *node) files(dir string) []string {
	n.Helper()
	top := n.path(dir)
	var list []string
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			list = append(list, strings.TrimPrefix(path, top+"/"))
		}
		return err
	})
	must.That(n, err == nil || errors.Is(err, fs.ErrNotExist), "%v", err)
	return list
}

func isAddress(s string) bool { _, err := netip.ParseAddr(s); return err == nil }

func (n *node) links() []string {
	n.Helper()
	var list []struct {
		Name string `json:"ifname"`
	}
	unmarshal(n, n.run("ip", "-json", "link", "show"), &list)
	var names []string
	for _, l := range list {
		names = append(names, l.Name)
	}
	return names
}

// gateways are the addresses of the node's bridge that are not link-local.
func (n *node) gateways() []string {
	n.Helper()
	var links []struct {
		Addresses []struct {
			Local netip.Addr `json:"local"`
			Bits  int        `json:"prefixlen"`
		} `json:"addr_info"`
	}
	unmarshal(n, n.run("ip", "-json", "address", "show", "dev", bridgeName), &links)
	var list []string
	for _, a := range links[0].Addresses {
		if !a.Local.IsLinkLocalUnicast() {
			list = append(list, netip.PrefixFrom(a.Local, a.Bits).String())
		}
	}
	slices.Sort(list)
	return list
}

func (n *node) wantGateways(want ...string) {
	n.Helper()
	slices.Sort(want)
	expect.NoDiff(n, cmp.Diff(want, n.gateways()), "addresses of the bridge")
}

func unmarshal(t testing.TB, text string, into any) {
	t.Helper()
	err := json.Unmarshal([]byte(text), into)
	must.That(t, err == nil, "%v: %s", err, text)
}

// The world outside of a node: another namespace, with a link to it.
const (
	uplinkName         = "eth0"
	uplink4, uplink6   = "192.0.2.1", "2001:db8::1" // the node's own addresses
	outside4, outside6 = "192.0.2.2", "2001:db8::2"
	// An address of another node of the same cluster, as far as the template knows.
	cluster4 = "10.255.0.2"
)

// outside makes a machine that the node reaches by its link eth0, and that knows the
// way to the pods of the node.
func (n *node) outside() *netns.NS {
	n.Helper()
	out := nstest.New(n)
	nstest.Veth(n, n.ns, uplinkName, out, "eth0")
	for _, line := range []string{
		"address add " + uplink4 + "/24 dev " + uplinkName,
		"address add " + uplink6 + "/64 dev " + uplinkName + " nodad",
		// A router asks for its neighbours from a link-local address.
		"address add fe80::1/64 dev " + uplinkName + " nodad",
		"route add default via " + outside4,
		"-6 route add default via " + outside6,
	} {
		n.run("ip", strings.Fields(line)...)
	}
	for _, line := range []string{
		"address add " + outside4 + "/24 dev eth0",
		"address add " + cluster4 + "/32 dev eth0",
		"address add " + outside6 + "/64 dev eth0 nodad",
		"address add fe80::2/64 dev eth0 nodad",
		"route add default via " + uplink4,
		"-6 route add default via " + uplink6,
	} {
		nstest.Run(n, out, "ip", strings.Fields(line)...)
	}
	return out
}
