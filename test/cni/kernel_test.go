package cni

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// link is a link as ip shows it.
type link struct {
	Name   string   `json:"ifname"`
	Flags  []string `json:"flags"`
	MTU    int      `json:"mtu"`
	Master string   `json:"master"`
	MAC    string   `json:"address"`
	Alias  string   `json:"ifalias"`
	Group  string   `json:"group"`
	Info   struct {
		Kind string `json:"info_kind"`
		Port struct {
			Hairpin  bool `json:"hairpin"`
			Isolated bool `json:"isolated"`
		} `json:"info_slave_data"`
	} `json:"linkinfo"`
}

func (l link) up() bool { return slices.Contains(l.Flags, "UP") }

func links(t testing.TB, ns *netns.NS) map[string]link {
	t.Helper()
	var list []link
	unmarshal(t, nstest.Run(t, ns, "ip", "-details", "-json", "link", "show"), &list)
	named := map[string]link{}
	for _, l := range list {
		named[l.Name] = l
	}
	return named
}

// address is an address as ip shows it.
type address struct {
	Local     netip.Addr `json:"local"`
	Bits      int        `json:"prefixlen"`
	Scope     string     `json:"scope"`
	NoDAD     bool       `json:"nodad"`
	Tentative bool       `json:"tentative"`
	DADFailed bool       `json:"dadfailed"`
}

func addresses(t testing.TB, ns *netns.NS, link string) []address {
	t.Helper()
	var list []struct {
		Addresses []address `json:"addr_info"`
	}
	unmarshal(t, nstest.Run(t, ns, "ip", "-json", "address", "show", "dev", link), &list)
	var all []address
	for _, l := range list {
		all = append(all, l.Addresses...)
	}
	return all
}

// globals are the addresses of a link that are not link-local, with their prefix
// lengths.
func globals(t testing.TB, ns *netns.NS, link string) []string {
	t.Helper()
	var list []string
	for _, a := range addresses(t, ns, link) {
		if a.Scope == "global" {
			list = append(list, netip.PrefixFrom(a.Local, a.Bits).String())
		}
	}
	return list
}

// routes are all of a namespace's routes to a destination, one line each.
func routes(t testing.TB, ns *netns.NS, family, dst string) []string {
	t.Helper()
	var list []string
	for _, line := range strings.Split(nstest.Run(t, ns, "ip", family, "route", "show", "table", "all", dst), "\n") {
		if line = strings.TrimSpace(line); line != "" {
			list = append(list, line)
		}
	}
	return list
}

func unmarshal(t testing.TB, text string, into any) {
	t.Helper()
	err := json.Unmarshal([]byte(text), into)
	must.That(t, err == nil, "%v: %s", err, text)
}

// ruleset is what nft shows of tables of family inet: ours, or nothing.
func (n *node) ruleset() string { n.Helper(); return n.run("nft", "list", "ruleset", "inet") }

// rules counts the rules of our table.
func (n *node) rules() int {
	n.Helper()
	return strings.Count(n.run("nft", "--json", "list", "table", "inet", "tombolo"), `{"rule": `)
}

// owners are what the elements of our sets say of whose they are: tombolo:1:<hash>:<network>.
func (n *node) owners() []string {
	n.Helper()
	return regexp.MustCompile(`tombolo:1:[0-9a-f]{11}:[^"]*`).FindAllString(n.run("nft", "list", "ruleset"), -1)
}

// traces are what attachments have, of all networks: ports, elements, reservations,
// records. A bridge, a table, and what a network keeps in files for its own sake are
// none.
func (n *node) traces() []string {
	n.Helper()
	found := []string{}
	for name, l := range links(n, n.ns) {
		if strings.HasPrefix(name, "veth") || strings.HasPrefix(name, "ifb") {
			found = append(found, "link "+name+" "+l.Alias)
		}
	}
	for _, o := range n.owners() {
		found = append(found, "element of "+o)
	}
	for _, path := range n.files(n.state) {
		switch base := filepath.Base(path); {
		case strings.HasPrefix(path, "attachments/"), strings.HasPrefix(base, ".tmp-"), isAddress(base):
			found = append(found, "file "+path)
		}
	}
	slices.Sort(found)
	return found
}

// wantTraces fails the test unless the traces are those of before.
func (n *node) wantTraces(before []string) {
	n.Helper()
	expect.NoDiff(n, cmp.Diff(before, n.traces()), "what attachments have")
}

// wantNothing fails the test if an attachment left anything.
func (n *node) wantNothing() { n.Helper(); n.wantTraces([]string{}) }

// files lists the files below a directory, which may be missing.
func (n *node) files(dir string) []string {
	n.Helper()
	var list []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			rel, relErr := filepath.Rel(dir, path)
			list, err = append(list, rel), relErr
		}
		return err
	})
	must.That(n, err == nil || errors.Is(err, fs.ErrNotExist), "%v", err)
	return list
}

// reservations maps addresses to the content of their files, in a network's directory.
func (n *node) reservations(dir string) map[string]string {
	n.Helper()
	found := map[string]string{}
	for _, name := range n.files(dir) {
		if isAddress(name) {
			data := must.Of(os.ReadFile(filepath.Join(dir, name))).Get(n)
			found[name] = string(data)
		}
	}
	return found
}

func isAddress(s string) bool { _, err := netip.ParseAddr(s); return err == nil }

// The outside world: its namespace has a link to the node, for which it is the default
// gateway.
const (
	outside4, outside6 = "192.0.2.2", "2001:db8::2"
	uplink4, uplink6   = "192.0.2.1", "2001:db8::1" // the node's own addresses
)

// outside makes a machine that the node reaches by its link eth0, over IPv4 alone where
// the kernel has no IPv6.
func (n *node) outside() *netns.NS {
	n.Helper()
	out := nstest.New(n)
	nstest.Veth(n, n.ns, "eth0", out, "eth0")
	n.ip("address add " + uplink4 + "/24 dev eth0")
	n.ip("route add default via " + outside4)
	nstest.Run(n, out, "ip", "address", "add", outside4+"/24", "dev", "eth0")
	if !nstest.HasIPv6() {
		return out
	}
	n.ip("address add " + uplink6 + "/64 dev eth0 nodad")
	// A router asks for its neighbours from a link-local address.
	n.ip("address add fe80::1/64 dev eth0 nodad")
	n.ip("-6 route add default via " + outside6)
	nstest.Run(n, out, "ip", "address", "add", outside6+"/64", "dev", "eth0", "nodad")
	return out
}

// routeBack lets the outside reach pods by their own addresses.
func routeBack(t testing.TB, out *netns.NS) {
	t.Helper()
	nstest.Run(t, out, "ip", "route", "add", subnet4, "via", uplink4)
	nstest.Run(t, out, "ip", "-6", "route", "add", subnet6, "via", uplink6)
}

// wantPing fails the test unless a namespace reaches each address.
func wantPing(t testing.TB, from *netns.NS, to ...string) {
	t.Helper()
	for _, a := range to {
		expect.Success(t, nstest.PingWith(t, from, nstest.Addr(a), nstest.Echo{Wait: min(left(t), time.Minute)}))
	}
}

// wantNoPing fails the test if a namespace reaches one of the addresses.
func wantNoPing(t testing.TB, from *netns.NS, to ...string) {
	t.Helper()
	for _, a := range to {
		expect.Failure(t, nstest.PingWith(t, from, nstest.Addr(a), nstest.Echo{Wait: 150 * time.Millisecond}), "%s answers, and should not be reached", a)
	}
}

// seenAs is the source address that the outside sees of a caller.
func seenAs(t testing.TB, from, out *netns.NS, at string) string {
	t.Helper()
	server := nstest.Serve(t, out, "tcp", netip.AddrPortFrom(nstest.Addr(at), 0))
	seen, err := nstest.Ask(t, from, "tcp", server)
	expect.Success(t, err)
	return seen.Addr().String()
}

func readFile(t testing.TB, path string) string {
	t.Helper()
	data := must.Of(os.ReadFile(path)).Get(t)
	return string(data)
}
