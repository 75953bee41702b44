package cni

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/template"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// clusterFiles is what docs/cluster.md has operators install: the tests use these files.
var clusterFiles = filepath.Join(repository, "deploy/cluster")

// cluster is nodes on one link, as deploy/cluster has them, with a router that knows no pod.
type cluster struct {
	testing.TB
	link, router *netns.NS
	nodes        []*member
}

// member is a node of a cluster.
type member struct {
	*network
	t      testing.TB
	number int
	cidrs  []string
	engine []*exec.Cmd // what makes its routes
	dir    string
}

// The router's addresses on the link, and elsewhere.
const (
	clusterRouter4, clusterRouter6 = "192.0.2.1", "2001:db8::1"
	elsewhere4, elsewhere6         = "198.51.100.1", "2001:db8:2::1"
)

func newCluster(t testing.TB, size int) *cluster {
	t.Helper()
	c := &cluster{TB: t, link: nstest.New(t), router: nstest.New(t)}
	nstest.Run(t, c.link, "ip", "link", "add", "name", "sw0", "type", "bridge", "mcast_snooping", "0", "forward_delay", "0")
	nstest.Run(t, c.link, "ip", "link", "set", "sw0", "up")
	c.plug(c.router, "router")
	nstest.Run(t, c.router, "sh", "-ec", strings.NewReplacer("R4", clusterRouter4, "R6", clusterRouter6, "E4", elsewhere4, "E6", elsewhere6).Replace(
		"ip link set lo up; ip address add R4/24 dev eth0; ip address add R6/64 dev eth0 nodad; ip address add E4/32 dev lo; ip address add E6/128 dev lo"))
	for i := 1; i <= size; i++ {
		c.nodes = append(c.nodes, c.join(i))
	}
	return c
}

func (c *cluster) plug(ns *netns.NS, port string) {
	c.Helper()
	nstest.Veth(c, c.link, port, ns, "eth0")
	nstest.Run(c, c.link, "ip", "link", "set", port, "master", "sw0")
}

// join makes a node of the cluster, whose runtime has its network from the template.
func (c *cluster) join(number int) *member {
	c.Helper()
	n := newNode(c)
	c.plug(n.ns, fmt.Sprint("node", number))
	n.ip(fmt.Sprintf("address add 192.0.2.%d/24 dev eth0", 10+number))
	n.ip(fmt.Sprintf("address add 2001:db8::%d/64 dev eth0 nodad", 10+number))
	// A router asks for its neighbours from a link-local address.
	n.ip(fmt.Sprintf("address add fe80::%d/64 dev eth0 nodad", 10+number))
	n.ip("route add default via " + clusterRouter4)
	n.ip("-6 route add default via " + clusterRouter6)
	m := &member{t: c, number: number, dir: c.TempDir(),
		cidrs: []string{fmt.Sprintf("10.244.%d.0/24", number), fmt.Sprintf("fd24:0:0:%d::/64", number)}}
	var list struct {
		Name    string
		Plugins []conf
	}
	err := json.Unmarshal([]byte(fromTemplate(c, "10-tombolo.conflist.template", m.cidrs)), &list)
	must.That(c, err == nil && len(list.Plugins) == 1, "%+v, %v", list, err)
	m.network = &network{node: n, name: list.Name, version: "1.1.0", plugin: list.Plugins[0]}
	m.plugin["stateDir"], m.plugin["deadline"] = n.state, patience.String()
	return m
}

// fromTemplate is what containerd makes of a template of deploy/cluster when the kubelet tells it
// the pod CIDRs: it has text/template execute it with these three.
func fromTemplate(t testing.TB, name string, cidrs []string) string {
	t.Helper()
	parsed := must.Of(template.ParseFiles(filepath.Join(clusterFiles, name))).Get(t)
	var routes []string
	for _, cidr := range cidrs {
		routes = append(routes, map[bool]string{true: "0.0.0.0/0", false: "::/0"}[nstest.Prefix(cidr).Addr().Is4()])
	}
	var out strings.Builder
	must.Succeed(t, parsed.Execute(&out, struct {
		PodCIDR               string
		PodCIDRRanges, Routes []string
	}{cidrs[0], cidrs, routes}))
	return out.String()
}

func (m *member) bird() {
	m.Helper()
	nstest.Need(m.t, "bird")
	m.begin("bird", "-f", "-c", filepath.Join(clusterFiles, "bird.conf"), "-s", filepath.Join(m.dir, "s"))
}

// careless starts BIRD with a configuration that announces all that the bridge has.
func (m *member) careless() {
	m.Helper()
	text, found := readFile(m.t, filepath.Join(clusterFiles, "bird.conf")), "{ return net ~ PODS4 || net ~ PODS6; }"
	must.That(m.t, strings.Contains(text, found), "bird.conf lacks %s", found)
	nodes := must.Of(filepath.Abs(filepath.Join(clusterFiles, "nodes.conf"))).Get(m.t)
	text = strings.NewReplacer(found, "{ return true; }", `"nodes.conf"`, strconv.Quote(nodes)).Replace(text)
	name := filepath.Join(m.dir, "careless.conf")
	must.Succeed(m.t, os.WriteFile(name, []byte(text), 0o644))
	m.begin("bird", "-f", "-c", name, "-s", filepath.Join(m.dir, "s"))
}

// frr starts FRR on the node, which is the one that frr.conf is for.
func (m *member) frr() {
	m.Helper()
	nstest.Need(m.t, "vtysh")
	dir, err := os.MkdirTemp("", "frr") // which FRR's own user reaches
	must.Succeed(m.t, err)
	m.t.Cleanup(func() { os.RemoveAll(dir) })
	m.run("chown", "frr:frr", dir)
	of := func(name string) string { return filepath.Join(dir, name) }
	for _, daemon := range []string{"zebra", "staticd", "bfdd", "bgpd"} {
		line := []string{"/usr/lib/frr/" + daemon, "-f", "/dev/null", "-i", of(daemon + ".pid"), "-z", of("zserv.api"), "--vty_socket", dir}
		if daemon == "bfdd" {
			line = append(line, "--bfdctl", of("bfdd.sock"))
		}
		m.begin(line...)
		m.until(daemon, func() bool { _, err := os.Stat(of(daemon + ".vty")); return err == nil })
	}
	m.run("vtysh", "--vty_socket", dir, "-f", filepath.Join(clusterFiles, "frr.conf"))
}

func (m *member) begin(line ...string) {
	m.Helper()
	out := must.Of(os.Create(filepath.Join(m.dir, filepath.Base(line[0])))).Get(m.t)
	defer out.Close()
	cmd := exec.Command(line[0], line[1:]...)
	cmd.Stdout, cmd.Stderr = out, out
	must.Succeed(m.t, m.ns.Do(cmd.Start))
	m.engine = append(m.engine, cmd)
	if len(m.engine) == 1 {
		m.t.Cleanup(m.stop)
	}
}

func (m *member) stop() {
	for _, cmd := range m.engine {
		cmd.Process.Kill()
		cmd.Wait()
		if m.t.Failed() {
			m.t.Logf("%s of node %d: %s", cmd.Path, m.number, nstest.ReadIf(m.t, filepath.Join(m.dir, filepath.Base(cmd.Path))))
		}
	}
	m.engine = nil
}

func (m *member) engines() []string {
	m.Helper()
	var list []string
	for _, family := range []string{"-4", "-6"} {
		for line := range strings.Lines(m.run("ip", family, "route", "show")) {
			if slices.ContainsFunc([]string{"bird", "bgp", "static"}, func(p string) bool { return strings.Contains(line, " proto "+p+" ") }) {
				list = append(list, strings.TrimSpace(line))
			}
		}
	}
	slices.Sort(list)
	return list
}

// to says that the node has routes to another one's pods, of both families.
func (m *member) to(other *member) bool {
	m.Helper()
	found := 0
	for _, r := range m.engines() {
		for _, cidr := range other.cidrs {
			if strings.HasPrefix(r, cidr+" ") && strings.Contains(r, " via ") {
				found++
			}
		}
	}
	return found == 2
}

func (m *member) until(what string, ok func() bool) {
	m.Helper()
	must.Until(m, fmt.Sprintf("%s on node %d", what, m.number), ok)
}

func (c *cluster) converge() {
	c.Helper()
	for _, a := range c.nodes {
		for _, b := range c.nodes {
			if a != b {
				must.Until(c, fmt.Sprintf("routes from node %d to node %d", a.number, b.number), func() bool { return a.to(b) })
			}
		}
	}
}

// resident is a pod of a cluster's node.
type resident struct {
	*pod
	at []netip.AddrPort // servers, one of each family
}

func (m *member) start(t *testing.T, id string) *resident {
	t.Helper()
	r := &resident{pod: m.pod(id)}
	for _, a := range ips(m.add(r.pod)) {
		r.at = append(r.at, nstest.Serve(t, r.NS, "tcp", netip.AddrPortFrom(a, 0)))
	}
	must.That(t, len(r.at) == 2, "%s has %v", id, r.at)
	return r
}

// wantDirect has each pod reach each of the others, and be seen there with its own address.
func wantDirect(t *testing.T, pods ...*resident) {
	t.Helper()
	for _, a := range pods {
		for _, b := range pods {
			for family := range b.at {
				seen, err := nstest.Ask(t, a.NS, "tcp", b.at[family])
				if err != nil || seen.Addr() != a.at[family].Addr() {
					t.Errorf("%s at %s sees %s as %s, %v", b.id, b.at[family], a.id, seen, err)
				}
			}
		}
	}
}

// wantAllInOrder has nothing of the network found different on any node, by anybody.
func (c *cluster) wantAllInOrder(when string) {
	c.Helper()
	for _, m := range c.nodes {
		before := m.engines()
		expect.Success(c, m.operate("check", "--state", m.state).err(), "%s, check on node %d", when, m.number)
		expect.Success(c, m.operate("doctor", "--dns", "none", "--state", m.state).err(), "%s, doctor on node %d", when, m.number)
		o := m.operate("repair", "--state", m.state)
		expect.That(c, o.status == 0 && !strings.Contains(o.stdout, "repaired: "), "%s, repair on node %d: %+v", when, m.number, o)
		after := m.engines()
		expect.That(c, slices.Equal(before, after), "%s, the engine's routes on node %d were %q, and are %q", when, m.number, before, after)
	}
}

// Pods of three nodes reach each other by their own addresses, by routes that BIRD announces, and FRR
// on one of them; one of the nodes dies, and comes back.
func TestPodsOfAClusterReachEachOther(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3)
	var pods []*resident
	var minders []*minder
	for i, m := range c.nodes {
		if i == 1 {
			m.frr()
		} else {
			m.bird()
		}
		if i == 0 { // one node has its routes before its network, the others after
			m.until("the cluster's own route", func() bool { return len(m.engines()) > 1 })
		}
		pods = append(pods, m.start(t, fmt.Sprint("pod-", m.number)))
		minders = append(minders, m.mind(t))
	}
	c.converge()
	wantDirect(t, pods...)
	for i, m := range c.nodes {
		for _, at := range []string{elsewhere4, elsewhere6} {
			want := netip.MustParseAddr(map[string]string{elsewhere4: "192.0.2.1", elsewhere6: "2001:db8::1"}[at] + fmt.Sprint(m.number)).String()
			expect.Equal(t, seenAs(t, pods[i].NS, c.router, at), want, "%s sees a pod of node %d as", at, m.number)
		}
	}
	expect.Equal(t, seenAs(t, pods[0].NS, c.nodes[1].ns, "192.0.2.12"), pods[0].at[0].Addr().String(), "node 2 sees a pod of node 1 as")
	c.wantAllInOrder("at first")

	// Its power fails: it says no goodbye.
	first, second, third := c.nodes[0], c.nodes[1], c.nodes[2]
	talk := nstest.NewTalk(t, "tcp", pods[2].NS, netip.AddrPortFrom(pods[2].at[0].Addr(), 7007), pods[0].NS, netip.AddrPortFrom(pods[2].at[0].Addr(), 7007))
	third.stop()
	nstest.Run(t, c.link, "ip", "link", "set", "node3", "nomaster")
	must.Until(c, "the withdrawal of node 3's routes", func() bool { return !first.to(third) && !second.to(third) })
	wantDirect(t, pods[:2]...)
	// The pod hears of it, and nothing leaves the node by the default route.
	expect.Failure(t, expect.Err(nstest.AskWithin(t, pods[0].NS, "tcp", pods[2].at[1], time.Second)), "a pod of the dead node answers")
	if says := first.find(pods[2].at); !strings.Contains(says, "the host has no route to "+pods[2].at[0].Addr().String()) || !strings.Contains(says, "birdc show protocols") {
		t.Errorf("tombolo doctor says %s", says)
	}
	nstest.Run(t, c.link, "ip", "link", "set", "node3", "master", "sw0")
	// Somebody has changed its configuration: others take from it what they take from any.
	const foreign = "172.30.0.0/24"
	third.ip("address add 172.30.0.1/24 dev cbr0")
	third.careless()
	c.converge()
	talk.Check(t)
	wantDirect(t, pods...)
	sent := third.run("birdc", "-s", filepath.Join(third.dir, "s"), "show route export node1")
	must.That(t, strings.Contains(sent, foreign), "node 3 announces only %s", sent)
	for _, m := range []*member{first, second} {
		all := m.run("ip", "route")
		expect.That(t, !strings.Contains(all, foreign), "node %d believes a neighbour that it has %s: %s", m.number, foreign, all)
	}
	third.ip("address del 172.30.0.1/24 dev cbr0")

	// A node announces its pods while its bridge is there.
	third.del(pods[2].pod)
	must.Succeed(t, third.remove("pods").err(), "remove")
	must.Until(c, "the withdrawal of node 3's routes", func() bool { return !first.to(third) && !second.to(third) })
	pods[2] = third.start(t, "another")
	c.converge()
	wantDirect(t, pods...)
	c.wantAllInOrder("at last")
	for i, m := range minders {
		for _, name := range []string{"drift_found_total", "drift_mended_total"} {
			expect.Equal(t, m.metric(name), 0, "tombolod of node %d has %s", i+1, name)
		}
	}
}

func TestTemplatesOfAClusterAreValid(t *testing.T) {
	n := parallelNode(t)
	templates, err := filepath.Glob(filepath.Join(repository, "deploy/*/*.template"))
	must.That(t, err == nil && len(templates) >= 2, "%v, %v", templates, err)
	for _, path := range templates {
		for _, cidrs := range [][]string{{"10.244.1.0/24"}, {"fd24:0:0:1::/64"}, {"10.244.1.0/24", "fd24:0:0:1::/64"}} {
			name := filepath.Join(t.TempDir(), "10-containerd-net.conflist")
			rel, err := filepath.Rel(clusterFiles, path)
			if err == nil {
				err = os.WriteFile(name, []byte(fromTemplate(t, rel, cidrs)), 0o644)
			}
			must.Succeed(t, err)
			o := n.operate("validate", name)
			expect.That(t, o.status == 0 && strings.Contains(o.stdout, ": valid\n"), "%s with %v: %+v", path, cidrs, o)
			for _, cidr := range cidrs {
				expect.Contains(t, o.stdout, cidr, "%s with %v", path, cidrs)
			}
		}
	}
}

// find runs tombolo doctor for the only pod of a node, and gives what it says.
func (m *member) find(to []netip.AddrPort) string {
	m.Helper()
	return m.operate("doctor", "--state", m.state, "--dns", "none", "--to", to[0].Addr().String()+","+to[1].Addr().String()).stdout
}

// Where the routes are missing, tombolo doctor says which, and finds nothing when they are there.
func TestDoctorFollowsTheWayToAnotherNodesPods(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	a, b := c.nodes[0], c.nodes[1]
	pod, other := a.start(t, "a"), b.start(t, "b")
	lead := func(verb string, from, to *member) {
		t.Helper()
		from.ip(fmt.Sprintf("route %s %s via 192.0.2.%d", verb, to.cidrs[0], 10+to.number))
		from.ip(fmt.Sprintf("-6 route %s %s via 2001:db8::%d", verb, to.cidrs[1], 10+to.number))
	}
	want := func(when string, says ...string) {
		t.Helper()
		got := a.find(other.at)
		for family, at := range other.at {
			for _, s := range says {
				s = strings.NewReplacer("OTHER", at.Addr().String(), "POD", pod.at[family].Addr().String(),
					"ROUTER", []string{clusterRouter4, clusterRouter6}[family], "ALL", []string{"10.244.0.0/16", "fd24::/48"}[family]).Replace(s)
				expect.That(t, strings.Contains(got, s), "%s: %q is missing in %s", when, s, got)
			}
		}
	}
	want("no routes", "only the host's default route, by ROUTER, leads to OTHER, a destination without masquerade", "routing engine")
	a.ip("route add unreachable 10.244.0.0/16")
	a.ip("-6 route add unreachable fd24::/48")
	// It need not be wrong: the first node of a cluster is alone.
	o := a.operate("doctor", "--state", a.state, "--dns", "none")
	expect.That(t, o.status == 0 && strings.Count(o.stdout, "nothing, if no other node has pods; else") == 2, "a node that knows of no other: %+v", o)
	want("an engine that knows of no node", "the host has routes to no other pods of ALL", "the host has no route to OTHER", "routing engine")
	lead("add", a, b)
	want("no way back", "the host reaches OTHER, and the pod POD does not", "ip route get POD")
	lead("add", b, a)
	want("all routes", "eth0 of network pods: nothing found")
	wantDirect(t, pod, other)

	// A firewall of the other node keeps its pods to itself, until it is told better.
	b.run("sh", "-ec", "iptables -P FORWARD DROP; ip6tables -P FORWARD DROP")
	b.add(b.pod("behind")) // an ADD sees to it that what pods send passes
	for _, at := range other.at {
		wantNoPing(t, pod.NS, at.Addr().String())
	}
	for _, at := range pod.at {
		wantPing(t, other.NS, at.Addr().String())
	}
	want("a firewall", "neither the host nor the pod reaches OTHER, to which a route leads by ", "whether a firewall there drops")
	blocks := docBlocks(t)
	i := slices.IndexFunc(blocks, func(b docBlock) bool { return b.page == "docs/cluster.md" && strings.HasPrefix(b.text, "iptables ") })
	must.That(t, i >= 0, "docs/cluster.md says nothing of iptables")
	b.run("sh", "-ec", blocks[i].text)
	want("a rule for other nodes' pods", "eth0 of network pods: nothing found")
	wantDirect(t, pod, other)
	expect.Success(t, b.operate("check", "--state", b.state).err(), "check with the rule")
}

// With mode lan, pods of all nodes are on one link: nothing is routed.
func TestPodsOfTwoNodesOnOneLANReachEachOther(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	var pods []*resident
	for i, m := range c.nodes {
		var list struct{ Plugins []conf }
		unmarshal(t, docConfig(t, "docs/cluster.md"), &list)
		m.network = m.node.network("lan", list.Plugins[0])
		if i == 1 { // the next part of the subnet
			r := m.plugin["ipam"].(map[string]any)["ranges"].([]any)[0].([]any)[0].(map[string]any)
			r["rangeStart"], r["rangeEnd"] = "192.0.2.96", "192.0.2.127"
		}
		p := &resident{pod: m.pod(fmt.Sprint("pod-", m.number))}
		for _, a := range ips(m.add(p.pod)) {
			p.at = append(p.at, nstest.Serve(t, p.NS, "tcp", netip.AddrPortFrom(a, 0)))
		}
		pods = append(pods, p)
	}
	wantDirect(t, pods...)
	for i, m := range c.nodes {
		for _, at := range []string{clusterRouter4, elsewhere4} {
			wantPing(t, pods[i].NS, at)
		}
		expect.Equal(t, seenAs(t, pods[i].NS, c.router, elsewhere4), pods[i].at[0].Addr().String(), "the router sees a pod of node %d as", m.number)
		expect.Success(t, m.operate("check", "--state", m.state).err(), "check on node %d", m.number)
	}
}
