package cni

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// The LAN that pods lease addresses from: a bridge of the node's with a router on it,
// which runs dnsmasq.
const (
	router4   = "192.168.50.1"
	lanPrefix = "192.168.50.0/24"
)

type lan struct {
	*node
	router *netns.NS
	server *nstest.Dnsmasq
	leases string // dnsmasq's file
	log    string
}

// newLAN has a bridge br0 on the node, and a router with a DHCP server on it.
func newLAN(t *testing.T, options ...string) *lan {
	t.Helper()
	n := newNode(t)
	l := &lan{node: n, router: nstest.New(t)}
	nstest.Veth(t, n.ns, "lan0", l.router, "eth0")
	n.ip("link add br0 type bridge")
	n.ip("link set br0 up")
	n.ip("link set lan0 master br0")
	nstest.Run(t, l.router, "ip", "address", "add", router4+"/24", "dev", "eth0")
	nstest.Run(t, l.router, "ip", "link", "set", "lo", "up")
	l.serve(t, options...)
	return l
}

// serve starts the server, and waits until it is there.
func (l *lan) serve(t *testing.T, options ...string) {
	t.Helper()
	if !strings.Contains(strings.Join(options, " "), "--dhcp-range=") {
		options = append(options, "--dhcp-range=192.168.50.100,192.168.50.200,1h") // which no test outlives that has no keeper
	}
	l.server = nstest.NewDnsmasq(t, l.router, "eth0", options...)
	l.leases, l.log = l.server.LeaseFile, l.server.LogFile
}

func (l *lan) leased() string { l.Helper(); return nstest.ReadIf(l, l.leases) }

// wantReleased waits until the server has no lease of an address: a RELEASE has no
// answer.
func (l *lan) wantReleased(t *testing.T, address string) {
	t.Helper()
	l.eventually(t, func() bool { return !strings.Contains(l.leased(), " "+address+" ") }, "the server takes "+address+" back")
}

func (l *lan) network(fields conf) *network {
	w := l.node.network("lan", conf{"bridge": "br0", "ipMasq": false, "leaseDir": l.state + "-leases",
		"ipam": conf{"type": "dhcp", "keeper": "optional"}, "capabilities": conf{"portMappings": true, "bandwidth": true}})
	w = w.with(fields)
	// How long the plugin waits by itself is too short for a server that gets no CPU.
	ipam := conf{"timeout": patience.String()}
	maps.Copy(ipam, w.plugin["ipam"].(conf))
	w.plugin["ipam"] = ipam
	return w
}

func (l *lan) wantNoLeaseRecords() {
	l.Helper()
	for _, path := range l.files(l.state + "-leases") {
		expect.That(l, !strings.HasSuffix(path, ".json"), "lease record %s is left", path)
	}
}

func TestPodLeasesItsAddressFromTheLAN(t *testing.T) {
	t.Parallel()
	l := newLAN(t, "--dhcp-option=option:dns-server,192.168.50.53", "--dhcp-option=option:domain-name,lan.example",
		"--dhcp-option=option:mtu,1400", "--dhcp-option=option:classless-static-route,10.9.0.0/16,192.168.50.9,0.0.0.0/0,"+router4)
	w := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional"}})
	p := l.pod("a")
	r := w.add(p, named("web-0")...)
	expect.That(t, len(r.IPs) == 1 && r.IPs[0].Gateway.String() == router4 && strings.HasPrefix(r.IPs[0].Address.String(), "192.168.50."),
		"result %v", r)
	expect.That(t, r.DNS.Domain == "lan.example" && len(r.DNS.Nameservers) == 1 && r.DNS.Nameservers[0] == "192.168.50.53",
		"DNS %+v", r.DNS)
	expect.Equal(t, r.Interfaces[2].Mtu, 1400, "the pod's MTU is")
	wantPing(t, p.NS, router4)
	for _, want := range []string{"default via " + router4, "10.9.0.0/16 via 192.168.50.9"} {
		expect.Contains(t, nstest.Run(t, p.NS, "ip", "-4", "route"), want)
	}
	address := ip4(r).String()
	expect.Contains(t, l.leased(), " "+address+" web-0 ", "the server's leases do not name %s as web-0", address)
	// The kernel ends it if nobody renews.
	if got := lifetime(t, p); got < anHourAtLeast || got > 3600 {
		t.Errorf("the address has a lifetime of %d s, want that of the lease, an hour", got)
	}
	expect.Success(t, w.check(p))
	w.del(p)
	l.wantReleased(t, address)
	l.wantNothing()
	l.wantNoLeaseRecords()
}

// anHourAtLeast is what may be left of a lease of an hour, in seconds, at the end of a
// test that takes long.
const anHourAtLeast = 3000

// lifetime is how many seconds the kernel keeps a pod's IPv4 address; 0 if it is for
// ever.
func lifetime(t *testing.T, p *pod) int {
	t.Helper()
	text := nstest.Run(t, p.NS, "ip", "-4", "address", "show", "dev", "eth0")
	m := regexp.MustCompile(`valid_lft (\d+)sec`).FindStringSubmatch(text)
	if m == nil {
		return 0
	}
	return must.Of(strconv.Atoi(m[1])).Get(t)
}

func TestReleaseOfAPodWhoseNamespaceIsGone(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(nil)
	p := l.pod("a")
	address := ip4(w.add(p)).String()
	got := l.leased()
	must.That(t, strings.Contains(got, address), "no lease of %s:\n%s", address, got)
	l.ip("link del " + w.port(p))
	w.del(p, withoutNetNS())
	l.wantReleased(t, address)
	l.wantNothing()
	l.wantNoLeaseRecords()
}

func TestGCReleasesLeases(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(nil)
	a, b, c := l.pod("a"), l.pod("b"), l.pod("c")
	gone, lost := ip4(w.add(a)).String(), ip4(w.add(c)).String()
	kept := ip4(w.add(b)).String()
	must.Succeed(t, os.RemoveAll(l.state+"/attachments/lan/"+strings.TrimPrefix(w.port(a), "veth")+".json"))
	// Of this one, nothing is left but its lease.
	must.Succeed(t, os.RemoveAll(l.state+"/attachments/lan/"+strings.TrimPrefix(w.port(c), "veth")+".json"))
	l.ip("link del " + w.port(c))
	l.nft("delete table inet tombolo")
	w.gc(b)
	l.wantReleased(t, gone)
	l.wantReleased(t, lost)
	// The server empties the file before it writes it anew.
	l.eventually(t, func() bool { return strings.Contains(l.leased(), " "+kept+" ") })
	w.del(b)
	l.wantNothing()
	l.wantNoLeaseRecords()
}

func TestWithoutAServerADDSaysWhatItSentAndHeard(t *testing.T) {
	n := parallelNode(t)
	w := n.network("lan", conf{"bridge": "br0", "leaseDir": n.state + "-leases", "ipam": conf{"type": "dhcp", "keeper": "optional", "timeout": "1s"}})
	wantError(t, expect.Err(w.tryAdd(n.pod("a"))), 11, "DISCOVER")
	n.wantNothing()
	(&lan{node: n}).wantNoLeaseRecords()
}

func TestWithoutAKeeperADDAndSTATUSSayWhatToDo(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(conf{"ipam": conf{"type": "dhcp"}})
	wantError(t, expect.Err(w.tryAdd(l.pod("a"))), 11, "systemctl start tombolod")
	wantError(t, w.status(), 50, "systemctl start tombolod")
	l.wantNothing()
	expect.Equal(t, l.leased(), "", "a lease was taken")
}

func TestIdentityByPodGetsTheSameAddressAgain(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		by   string
		same bool
	}{{"pod", true}, {"mac", true}, {"container", false}} {
		nstest.RunParallel(t, tt.by, func(t *testing.T) {
			// Addresses in turn, so that the same one comes by identity alone.
			l := newLAN(t, "--dhcp-sequential-ip")
			w := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional", "clientID": tt.by}})
			db := named("db-0")
			first, other, again := l.pod("first"), l.pod("other"), l.pod("again")
			r1 := w.add(first, db...)
			w.del(first)
			// Somebody else comes meanwhile.
			w.add(other, named("other")...)
			r2 := w.add(again, db...)
			expect.That(t, (ip4(r1) == ip4(r2)) == tt.same || tt.by == "mac", "first %s, again %s", ip4(r1), ip4(r2))
			if got := r1.Interfaces[2].Mac == r2.Interfaces[2].Mac; got != tt.same {
				t.Errorf("MAC first %s, again %s", r1.Interfaces[2].Mac, r2.Interfaces[2].Mac)
			}
		})
	}
}

func TestLeasedPodHasHostPortsLimitsAndGuard(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	l.ip("address add 192.168.50.2/24 dev br0")
	w := l.network(conf{"guard": true, "bridgeNFCall": true})
	p := w.addPod("a", publish(t, "8080:80/tcp"), limited(1e7, 2e7))
	p.serve(t, "tcp", 80)
	expect.Success(t, expect.Err(askPort(t, l.router, "tcp", "192.168.50.2", 8080)))
	if len(l.rates()) != 2 {
		t.Errorf("rates %v", l.rates())
	}
	expect.Success(t, w.check(p))
	w.del(p)
	l.wantNothing()
}

// The lease's record has the metric, by which the keeper renews its routes.
func TestLeasedDefaultRouteBesideAnotherTakesALargerMetric(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional"}})
	p := l.pod("a")
	nstest.Veth(t, p.NS, "other0", p.NS, "other1")
	nstest.Run(t, p.NS, "ip", "route", "add", "default", "dev", "other0")
	r := w.add(p)
	got := nstest.Run(t, p.NS, "ip", "route", "show", "default", "dev", "eth0")
	expect.That(t, strings.Contains(got, "via "+router4) && strings.Contains(got, "metric 100"), "the default route of the lease is %q", got)
	expect.That(t, len(r.Routes) == 1 && r.Routes[0].Priority == 100, "the result's routes are %v", r.Routes)
	expect.Success(t, w.check(p))
	record, err := os.ReadFile(l.state + "-leases/" + strings.TrimPrefix(w.port(p), "veth") + ".json")
	expect.That(t, err == nil && strings.Contains(strings.ReplaceAll(string(record), " ", ""), `"priority":100`),
		"the lease is on record as %s, %v", record, err)
	w.del(p)
}

func TestLeasesListsWhatPodsHaveLeased(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(nil)
	p := l.pod("a")
	r := w.add(p, named("web-0")...)
	o := l.operate("leases", "--leases", l.state+"-leases")
	expect.That(t, o.status == 0 && strings.Contains(o.stdout, ip4(r).String()) && strings.Contains(o.stdout, "default/web-0"),
		"status %d:\n%s%s", o.status, o.stdout, o.stderr)
	expect.Contains(t, o.stderr, "no keeper runs", "stderr does not say that nobody renews")
	var list []struct {
		Address string
		Left    int
	}
	unmarshal(t, l.operate("leases", "--json", "--leases", l.state+"-leases").stdout, &list)
	expect.That(t, len(list) == 1 && list[0].Address == r.IPs[0].Address.String() && list[0].Left >= anHourAtLeast && list[0].Left <= 3600,
		"leases %+v", list)
}

// What goes by a pod's address follows when its server gives it another.
func TestRepairFollowsALeaseToAnotherAddress(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	l.ip("address add 192.168.50.2/24 dev br0")
	w := l.network(conf{"bridgeNFCall": true})
	p := l.pod("a")
	r := w.add(p, publish(t, "8080:80/tcp"))
	// As the keeper does it.
	path := l.state + "-leases/" + strings.TrimPrefix(w.port(p), "veth") + ".json"
	before := r.IPs[0].Address.String()
	text := strings.ReplaceAll(readFile(t, path), before, "192.168.50.77/24")
	must.Succeed(t, os.WriteFile(path, []byte(text), 0o600))
	nstest.Run(t, p.NS, "ip", "address", "del", before, "dev", "eth0")
	nstest.Run(t, p.NS, "ip", "address", "add", "192.168.50.77/24", "dev", "eth0")
	p.serve(t, "tcp", 80)
	wantError(t, w.check(p), 113, "192.168.50.77")
	// All but the keeper, which is not there.
	o := l.operate("repair", "--state", l.state)
	must.That(t, o.status == 4 && strings.Count(o.stdout, "left: ") == 1 && strings.Contains(o.stdout, "[start tombolod]\n"), "%+v", o)
	expect.Success(t, expect.Err(askPort(t, l.router, "tcp", "192.168.50.2", 8080)))
	w.del(p)
	l.wantNothing()
}

func TestADDThatFailsAfterItsLeaseGivesItBack(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(nil)
	first := l.pod("first")
	r := w.add(first, publish(t, "8080:80/tcp"))
	before := l.traces()
	_, err := w.tryAdd(l.pod("second"), publish(t, "8080:80/tcp"))
	wantError(t, err, 112, "port 8080/tcp is already published")
	l.wantTraces(before)
	l.eventually(t, func() bool { return strings.Contains(nstest.ReadIf(t, l.log), "DHCPRELEASE(") })
	// The server says so before it writes it down: that of the first pod is left.
	l.eventually(t, func() bool {
		got := l.leased()
		return strings.Count(got, "\n") == 1 && strings.Contains(got, " "+ip4(r).String()+" ")
	})
	clients := map[string]bool{}
	for _, m := range regexp.MustCompile(`DHCPACK\(eth0\) (\S+ \S+)`).FindAllStringSubmatch(nstest.ReadIf(t, l.log), -1) {
		clients[m[1]] = true // it may have been asked twice, and answered
	}
	if len(clients) != 2 {
		t.Errorf("the second pod did not lease:\n%s", nstest.ReadIf(t, l.log))
	}
}

// keeper is tombolod, for the leases of a LAN.
type keeper struct {
	*lan
	cmd *exec.Cmd
	log string
}

func (l *lan) keep(t *testing.T) *keeper {
	t.Helper()
	k := &keeper{lan: l, log: filepath.Join(t.TempDir(), "keeper.log")}
	k.cmd = spawn(t, l.ns, k.log, exec.Command(keeperPath(), "--leases", l.state+"-leases", "--state", l.state, "--metrics", "none", "--log-level", "debug"))
	l.eventually(t, func() bool { return l.network(conf{"ipam": conf{"type": "dhcp"}}).status() == nil })
	return k
}

// kill ends it without a word.
func (k *keeper) kill() {
	k.cmd.Process.Kill()
	k.cmd.Wait()
}

// freeze stops it where it is, until thaw.
func (k *keeper) freeze(t *testing.T) { k.signal(t, syscall.SIGSTOP) }
func (k *keeper) thaw(t *testing.T)   { k.signal(t, syscall.SIGCONT) }

func (k *keeper) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	must.Succeed(t, k.cmd.Process.Signal(s))
}

// A keeper that hangs renews nothing.
func TestAKeeperThatHangsIsNone(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	k := l.keep(t)
	w := l.network(conf{"ipam": conf{"type": "dhcp"}})
	k.freeze(t)
	const advice = "systemctl restart tombolod"
	l.eventually(t, func() bool { return w.status() != nil })
	wantError(t, w.status(), 50, advice)
	wantError(t, expect.Err(w.tryAdd(l.pod("a"))), 11, advice)
	k.thaw(t)
	l.eventually(t, func() bool { return w.status() == nil })
	w.add(l.pod("a"))
}

// eventually waits for what another process does in its own time, and says whether it
// came. what may say in words what that is.
func (l *lan) eventually(t testing.TB, ok func() bool, what ...string) bool {
	t.Helper()
	wait := left(t)
	for end := time.Now().Add(wait); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if ok() {
			return true
		}
	}
	t.Errorf("it did not come in %s: %s; the server says:\n%s", wait, strings.Join(what, ", "), nstest.ReadIf(t, l.log))
	return false
}

func (l *lan) acks(t *testing.T) int { return strings.Count(nstest.ReadIf(t, l.log), "DHCPACK(") }

// makeDue has a lease be renewed now.
func (l *lan) makeDue(t *testing.T, w *network, p *pod) {
	t.Helper()
	path := l.state + "-leases/" + strings.TrimPrefix(w.port(p), "veth") + ".json"
	due := regexp.MustCompile(`"renew":"[^"]*"`).ReplaceAllString(readFile(t, path), fmt.Sprintf(`"renew":%q`, time.Now().UTC().Format(time.RFC3339Nano)))
	must.Succeed(t, os.WriteFile(path, []byte(due), 0o600))
}

// isDue says whether a lease's record is as makeDue left it.
func (l *lan) isDue(t *testing.T, w *network, p *pod) bool {
	t.Helper()
	at := regexp.MustCompile(`"renew":"([^"]*)"`).FindStringSubmatch(readFile(t, l.state+"-leases/"+strings.TrimPrefix(w.port(p), "veth")+".json"))
	renew, err := time.Parse(time.RFC3339Nano, at[1])
	must.Succeed(t, err)
	return renew.Before(time.Now())
}

func TestKeeperRenewsAndMayBeKilled(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	k := l.keep(t)
	w := l.network(conf{"ipam": conf{"type": "dhcp"}})
	p := l.pod("a")
	r := w.add(p)
	expect.Success(t, w.check(p))
	k.kill()
	wantError(t, w.status(), 50, "no keeper runs")
	wantError(t, w.check(p), 113, "no keeper runs")
	// The next one takes up where it stood: no DISCOVER, and no other address.
	discovers := strings.Count(nstest.ReadIf(t, l.log), "DHCPDISCOVER(")
	before := l.acks(t)
	l.makeDue(t, w, p)
	l.keep(t)
	l.eventually(t, func() bool { return l.acks(t) > before })
	got := strings.Count(nstest.ReadIf(t, l.log), "DHCPDISCOVER(")
	expect.That(t, got == discovers, "%d DISCOVERs after the restart, %d before", got, discovers)
	if got := globals(t, p.NS, "eth0"); len(got) != 1 || got[0] != r.IPs[0].Address.String() {
		t.Errorf("the pod has %v, want %s", got, r.IPs[0].Address.String())
	}
	expect.Success(t, w.check(p))
	w.del(p)
	l.eventually(t, func() bool { return l.leased() == "" })
	l.wantNothing()
	l.wantNoLeaseRecords()
}

// The first renewal goes by the pod's stack, which may send it elsewhere, and the second by the link alone.
func TestARenewalThatThePodsStackLosesIsSentAgain(t *testing.T) {
	t.Parallel()
	for what, loses := range map[string]string{
		"sends what is for the server elsewhere": "ip neigh replace " + router4 + " lladdr 02:00:00:00:00:99 dev eth0 nud permanent",
		"has a firewall that drops what it sends": "nft add table inet own; " +
			"nft 'add chain inet own out { type filter hook output priority 0; policy drop; }'",
	} {
		nstest.RunParallel(t, what, func(t *testing.T) {
			l := newLAN(t)
			k := l.keep(t)
			w := l.network(conf{"ipam": conf{"type": "dhcp"}})
			p := w.addPod("a")
			k.kill()
			nstest.Run(t, p.NS, "sh", "-c", loses)
			l.makeDue(t, w, p)
			k = l.keep(t)
			for end := time.Now().Add(time.Minute); l.isDue(t, w, p) && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			}
			if l.isDue(t, w, p) {
				t.Errorf("the pod %s, and its lease is not renewed; the keeper says:\n%s", what, nstest.ReadIf(t, k.log))
			}
		})
	}
}

// A server may give the default route as two halves, which count before any default route.
func TestHalvesOfADefaultRouteByALeaseAreNoneWhereNoneIsWanted(t *testing.T) {
	t.Parallel()
	l := newLAN(t, "--dhcp-option=121,0.0.0.0/1,"+router4+",128.0.0.0/1,"+router4+",198.18.0.0/15,"+router4)
	w := l.network(conf{"isDefaultGateway": false})
	p := l.pod("a")
	nstest.Veth(t, p.NS, "other0", p.NS, "other1")
	nstest.Run(t, p.NS, "ip", "route", "add", "198.18.0.0/15", "dev", "other0") // as another network may
	w.add(p)
	routes := nstest.Run(t, p.NS, "ip", "route")
	expect.Contains(t, routes, "198.18.0.0/15 via "+router4+" dev eth0", "the lease's own route is missing")
	expect.Contains(t, routes, "198.18.0.0/15 dev other0", "the other interface's route is missing")
	expect.That(t, !strings.Contains(routes, "/1 "),
		"isDefaultGateway is false, and the lease gives the pod a default route in two halves:\n%s", routes)
}

// dies adds a pod that goes without a DEL.
func (l *lan) dies(t *testing.T, w *network, options ...option) *current.Result {
	t.Helper()
	ns := must.Of(netns.New()).Get(t)
	p := &pod{NS: ns, path: nstest.Path(t, ns), id: "gone"}
	r := w.add(p, options...)
	// The last handles of its namespace, as runtimes let go of them: the keeper may be
	// looking at it.
	nstest.Run(t, l.ns, "umount", "-l", p.path)
	must.Succeed(t, ns.Close())
	// The kernel deletes it as well, and may have done so.
	_, _ = nstest.Try(l.ns, "ip", "link", "del", w.port(p))
	return r
}

func TestKeeperReleasesForAPodThatWentWithoutADEL(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	k := l.keep(t)
	w := l.network(conf{"ipam": conf{"type": "dhcp"}})
	r := l.dies(t, w)
	got := l.leased()
	must.That(t, strings.Contains(got, ip4(r).String()), "no lease:\n%s", got)
	// It looks now and then, and when it starts.
	k.kill()
	l.keep(t)
	l.eventually(t, func() bool { return l.leased() == "" })
}
