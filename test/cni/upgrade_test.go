package cni

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jsimonetti/rtnetlink/v2/driver"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/share"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	rtlink "github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// release has what v0.1.0's programs leave on a node: their files, and what makes the kernel's objects anew.
const release = "testdata/v0.1.0"

const changed = `What is made now differs from what v0.1.0 leaves on a node. Nodes are upgraded while their pods run: the next release
has to understand both, and its ADD, DEL, repair and GC have to work on what v0.1.0 has made. Show that here, and let
the comparison know of the change. Until v0.1.0 is tagged, go test -update writes its files anew`

// releasedNode has pods of all sorts: with host ports and limits, with nothing, and on the LAN, whose NIC is shared.
type releasedNode struct {
	*lan
	web, plain, leased *pod
	podnet, home       *network
}

func newReleasedNode(t *testing.T) *releasedNode {
	t.Helper()
	n := newNode(t)
	l := &lan{node: n, router: nstest.New(t)}
	nstest.Veth(t, n.ns, "eth0", l.router, "eth0")
	n.run("ip", "link", "set", "eth0", "address", "02:00:00:00:50:02") // which rules name
	n.run("iptables", "-P", "FORWARD", "DROP")
	nstest.Run(t, l.router, "ip", "address", "add", router4+"/24", "dev", "eth0")
	l.serve(t, "--dhcp-host=leased-0,192.168.50.100")
	return &releasedNode{
		lan: l, web: n.pod("web"), plain: n.pod("plain"), leased: n.pod("leased"),
		podnet: n.portnet(nil), home: l.network(conf{"mode": "lan", "uplink": "eth0"}),
	}
}

func (r *releasedNode) webOptions(t *testing.T) []option {
	return []option{
		capability("bandwidth", conf{"ingressRate": 8000000, "ingressBurst": 400000, "egressRate": 8000000, "egressBurst": 400000}),
		publish(t, "8080:80/tcp", "192.168.50.2:53:5353/udp"), arg("K8S_POD_NAMESPACE", "shop"), arg("K8S_POD_NAME", "web-0"),
	}
}

func (r *releasedNode) leasedOptions() []option {
	return []option{arg("K8S_POD_NAMESPACE", "shop"), arg("K8S_POD_NAME", "leased-0")}
}

func (r *releasedNode) add(t *testing.T) {
	t.Helper()
	r.ip("address add 192.168.50.2/24 dev eth0")
	r.ip("route add default via " + router4)
	r.podnet.add(r.web, r.webOptions(t)...)
	r.podnet.add(r.plain)
	r.home.add(r.leased, r.leasedOptions()...)
}

// dirs are the directories that are kept, by their names in the release's.
func (r *releasedNode) dirs() map[string]string {
	return map[string]string{"state": r.state, "leases": r.state + "-leases", "results": r.cache + "/results"}
}

// names are the paths of a node, with what they are called in the release's files.
func (r *releasedNode) names() []string {
	return []string{r.web.path, "/run/netns/web", r.plain.path, "/run/netns/plain", r.leased.path, "/run/netns/leased",
		r.state, "/run/tombolo"}
}

// freeze writes down what is there.
func (r *releasedNode) freeze(t *testing.T) {
	t.Helper()
	for name, dir := range r.dirs() {
		must.Succeed(t, os.RemoveAll(filepath.Join(release, name)))
		for _, file := range r.files(dir) {
			text := strings.NewReplacer(r.names()...).Replace(readFile(t, filepath.Join(dir, file)))
			to := filepath.Join(release, name, strings.ReplaceAll(file, ":", "="))
			must.Succeed(t, os.MkdirAll(filepath.Dir(to), 0o755))
			must.Succeed(t, os.WriteFile(to, []byte(text), 0o644))
		}
	}
	must.Succeed(t, os.WriteFile(release+"/ruleset.nft", []byte(r.run("nft", "--stateless", "list", "ruleset")), 0o644))
}

// today gives the release's files to a node of today: its boot, namespaces and directories have taken those of then's
// place, and its leases are as old as they were.
func (r *releasedNode) today(t *testing.T, now *releasedNode) func(text string) string {
	t.Helper()
	var then, is struct{ Boot string }
	unmarshal(t, readFile(t, release+"/state/epoch"), &then)
	epoch := readFile(t, now.state+"/epoch")
	unmarshal(t, epoch, &is)
	lease := now.leaseRecords(t)[0]
	same := func(text, from, pattern string) string {
		re := regexp.MustCompile(pattern)
		return re.ReplaceAllLiteralString(text, re.FindString(from))
	}
	obtained := fieldOf(t, release+"/leases/"+filepath.Base(lease), "obtained")
	age := time.Since(must.Of(time.Parse(time.RFC3339, obtained)).Get(t))
	return func(text string) string {
		text = regexp.MustCompile(`20\d\d-[-:.T\d]*Z`).ReplaceAllStringFunc(text, func(s string) string {
			return must.Of(time.Parse(time.RFC3339, s)).Get(t).Add(age).Format(time.RFC3339Nano)
		})
		text = strings.ReplaceAll(text, then.Boot, is.Boot)
		for _, key := range []string{`"init":\d+`, `"made":\d+`} {
			text = same(text, epoch, key)
		}
		text = same(text, readFile(t, lease), `"booted":"[^"]*"`)
		text = regexp.MustCompile(`"netns":\d+`).ReplaceAllString(text, fmt.Sprintf(`"netns":%d`, must.Of(r.ns.Cookie()).Get(t)))
		for _, p := range []*pod{r.web, r.plain, r.leased} {
			if strings.Contains(text, `"/run/netns/`+p.id+`"`) {
				text = regexp.MustCompile(`"netnsCookie":\d+`).ReplaceAllString(text, fmt.Sprintf(`"netnsCookie":%d`, must.Of(p.NS.Cookie()).Get(t)))
			}
		}
		names := r.names()
		for i := 0; i < len(names); i += 2 {
			text = strings.ReplaceAll(text, names[i+1], names[i])
		}
		return text
	}
}

// thaw puts a node into the state in which v0.1.0 has left one.
func (r *releasedNode) thaw(t *testing.T, now *releasedNode) {
	t.Helper()
	today := r.today(t, now)
	for name, dir := range r.dirs() {
		for _, file := range r.files(filepath.Join(release, name)) {
			to := filepath.Join(dir, strings.ReplaceAll(file, "=", ":"))
			must.Succeed(t, os.MkdirAll(filepath.Dir(to), 0o700))
			must.Succeed(t, os.WriteFile(to, []byte(today(readFile(t, filepath.Join(release, name, file)))), 0o600))
		}
	}
	nstest.Run(t, r.router, "sh", "-c", "ip link set eth0 address "+fieldOf(t, r.leaseRecords(t)[0], "serverMAC"))
	r.run("env", "state="+r.state, "results="+r.cache+"/results", "web="+r.web.path, "plain="+r.plain.path, "leased="+r.leased.path,
		"sh", "-eu", release+"/links.sh")
	// A program of extended BPF is nothing that tc makes by itself.
	bridges := must.Of(bridge.Dial(r.ns)).Get(t)
	defer bridges.Close()
	shared := share.Share{NIC: "eth0", Bridge: "br0", Alias: endpoint.ShareAlias}
	must.Of(share.On(bridges.Socket()).Ensure(t.Context(), shared)).Get(t)
	r.run("nft", "-f", release+"/ruleset.nft")
	conn := must.Of(nl.Dial(unix.NETLINK_ROUTE, r.ns)).Get(t)
	defer conn.Close()
	var b nl.Batch
	for _, name := range []string{"cbr0", "br0"} { // Debian 12's ip does not know of it
		rtlink.Request{Name: name, Kind: "bridge", Data: &driver.Bridge{FdbMaxLearned: new(uint32(16384))}}.Set(&b, "limit", name)
	}
	must.Succeed(t, conn.Execute(&b))
}

func fieldOf(t *testing.T, path, key string) string {
	t.Helper()
	return regexp.MustCompile(`"` + key + `":"([^"]*)"`).FindStringSubmatch(readFile(t, path))[1]
}

// shown is all that the release has of a node, without what is another in each run.
func (r *releasedNode) shown(t *testing.T) nstest.Snapshot {
	t.Helper()
	all := nstest.Snap(t, r.ns, "/nonexistent", nil)
	for _, p := range []*pod{r.web, r.plain, r.leased} {
		for _, line := range nstest.Snap(t, p.NS, "/nonexistent", nil) {
			all = all.Plus(p.id + ": " + line)
		}
	}
	for name, link := range links(t, r.ns) {
		all = all.Plus(fmt.Sprintf("link %+v", link))
		for _, at := range []string{"ingress", "egress"} {
			all = all.Plus("filter " + name + " " + at + " " + r.run("tc", "filter", "show", "dev", name, at))
		}
	}
	for name, dir := range r.dirs() {
		for _, file := range r.files(dir) {
			all = all.Plus("file " + name + "/" + file + " " + strings.NewReplacer(r.names()...).Replace(readFile(t, filepath.Join(dir, file))))
		}
	}
	// A bridge leaves the groups of IPv6 some time after IPv6 is switched off there.
	isGroup := func(line string) bool {
		return strings.HasPrefix(line, "33:33:") || strings.HasPrefix(line, "01:00:5e:")
	}
	all = slices.DeleteFunc(all, isGroup)
	for i := range all {
		all[i] = unnamed(all[i])
	}
	return all
}

func TestNodesOfTheReleaseAreUpgraded(t *testing.T) {
	t.Parallel()
	now := newReleasedNode(t)
	now.add(t)
	then := newReleasedNode(t)
	then.thaw(t, now)
	diff := then.shown(t).Diff(now.shown(t))
	if diff != "" && golden.Updates() {
		must.That(t, now.run("git", "tag", "--list", "v0.1.0") == "", "%s: v0.1.0 is tagged, so its files stay as they are", release)
		now.freeze(t)
		t.Skip("written anew: run the test again")
	}
	must.That(t, diff == "", "%s (- v0.1.0, + now):\n%s", changed, diff)
	then.serves(t)
	then.goes(t)
}

// serves has today's programs find nothing to repair, renew the lease, and add a pod beside those of v0.1.0.
func (r *releasedNode) serves(t *testing.T) {
	t.Helper()
	before, acks := r.shown(t), r.acks(t)
	r.makeDue(t, r.home, r.leased)
	r.mind(t)
	r.eventually(t, func() bool { return r.acks(t) > acks })
	expect.Success(t, r.podnet.status())
	expect.Success(t, r.home.status())
	r.check(t)
	o := r.operate("repair", "--state", r.state, "--leases", r.state+"-leases")
	expect.That(t, o.status == 0, "%+v", o)
	diff := before.Diff(r.shown(t))
	expect.Equal(t, strings.TrimSpace(diff), "+ file leases/keeper.lock", "what today's programs have changed (- before, + after)")
	wantPing(t, r.web.NS, gateway4, gateway6, "10.77.0.3", router4)
	next, other := r.pod("next"), r.pod("other")
	r.podnet.add(next)
	r.home.add(other)
	wantPing(t, next.NS, "10.77.0.2", "fd77::3", router4)
	wantPing(t, other.NS, "192.168.50.100", router4)
	r.podnet.del(next)
	r.home.del(other)
	r.check(t)
}

func (r *releasedNode) check(t *testing.T) {
	t.Helper()
	expect.Success(t, r.podnet.check(r.web, r.webOptions(t)...))
	expect.Success(t, r.podnet.check(r.plain))
	expect.Success(t, r.home.check(r.leased, r.leasedOptions()...))
}

// goes takes all down, each pod in another way.
func (r *releasedNode) goes(t *testing.T) {
	t.Helper()
	r.podnet.del(r.web, r.webOptions(t)...)
	r.podnet.gc()
	r.home.del(r.leased, r.leasedOptions()...)
	r.wantReleased(t, "192.168.50.100")
	r.wantNoLeaseRecords()
	for _, args := range [][]string{{"remove", "lan"}, {"remove", "podnet"}} {
		o := r.operate(append(args, "--state", r.state, "--leases", r.state+"-leases")...)
		expect.That(t, o.status == 0, "%v: %+v", args, o)
	}
	expect.Contains(t, r.run("ip", "-4", "address", "show", "dev", "eth0"), "192.168.50.2/24")
	r.wantNothing()
}

// unnamed leaves out of a line what is another in each run.
func unnamed(text string) string {
	for _, part := range []struct{ pattern, is string }{
		{`"(boot|booted|epoch|id|token|created|updated|obtained|renew|rebind|expire|time)":"[^"]*"`, `"$1":""`},
		{`"(mac|hostMAC|serverMAC|config|configHash)":"[^"]*"`, `"$1":""`},
		{`"(init|made|netns|netnsCookie)":\d+`, `"$1":0`},
		{`"settings":\{[^}]*\}`, `"settings":{}`},
		{`([0-9a-f]{16} )?[-0-9a-f]{36}/[0-9a-f]{32}( \d+( [0-9a-f]{16})+)?`, "EPOCH"},
		{`\b([0-9a-f]{2}:){5}[0-9a-f]{2}\b|0x[0-9a-f]{10,12}\b`, "MAC"},
		{`not_in_hw id \d+ name (\S+) tag [0-9a-f]+`, "name $1"},
		{`refcnt \d+`, "refcnt"}, // depends on when it is asked
		{`\bfe80::[0-9a-f:]{10,}`, "fe80::MAC"},
	} {
		text = regexp.MustCompile(part.pattern).ReplaceAllString(text, part.is)
	}
	return text
}
