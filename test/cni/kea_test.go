package cni

import (
	"encoding/csv"
	"encoding/hex"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
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
	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// kea is a server in a namespace of its own, with all its files in one directory. It
// grants leases of seconds, where dnsmasq has two minutes at least.
type kea struct {
	testing.TB
	ns     *netns.NS
	dir    string
	leases string // its lease file; another server may take it over
	cmd    *exec.Cmd
}

// newKea has a server on the node's bridge, which does not run yet. Its address is its
// server identifier too.
func (n *node) newKea(port, address string) *kea {
	n.Helper()
	nstest.Need(n, "kea-dhcp4")
	dir := n.TempDir()
	k := &kea{TB: n, ns: nstest.New(n), dir: dir, leases: filepath.Join(dir, "leases.csv")}
	nstest.Veth(n, n.ns, port, k.ns, "eth0")
	n.ip("link set " + port + " master br0")
	nstest.Run(n, k.ns, "ip", "address", "add", address+"/24", "dev", "eth0")
	nstest.Run(n, k.ns, "ip", "link", "set", "lo", "up")
	return k
}

// A lease is renewed after 2 s, as often as if it were short. Where server and keeper are
// too slow for that they have three more tries, by REBINDING after 20 s and then after
// half of what is left: nobody loses a lease for want of CPU.
const keaPool = "192.168.50.10 - 192.168.50.250"

// short has leases end soon, in a test of their end; but not before the ADD does.
func short(fields conf) conf {
	changed := conf{"valid-lifetime": 15, "rebind-timer": 4}
	maps.Copy(changed, fields)
	return changed
}

// start runs the server, with other fields than these in its subnet, and waits until
// it is there.
func (k *kea) start(fields conf) {
	k.Helper()
	subnet := conf{
		"id": 1, "subnet": lanPrefix, "pools": []conf{{"pool": keaPool}},
		"valid-lifetime": 150, "renew-timer": 2, "rebind-timer": 20, "authoritative": true,
		"option-data": []conf{{"name": "routers", "data": router4}},
	}
	maps.Copy(subnet, fields)
	k.launch("kea-dhcp4", conf{"Dhcp4": conf{
		"interfaces-config": conf{"interfaces": []string{"eth0"}, "dhcp-socket-type": "raw"}, "subnet4": []conf{subnet},
	}})
}

// launch starts one of Kea's programs, with its section of a configuration, and waits until it serves.
func (k *kea) launch(program string, config conf) {
	k.Helper()
	to := []conf{{"output": filepath.Join(k.dir, "log"), "maxsize": 0}}
	for _, section := range config {
		section.(conf)["lease-database"] = conf{"type": "memfile", "name": k.leases, "lfc-interval": 0}
		section.(conf)["loggers"] = []conf{
			{"name": program, "severity": "INFO", "output_options": to},
			{"name": program + ".packets", "severity": "DEBUG", "debuglevel": 50, "output_options": to},
		}
	}
	file := filepath.Join(k.dir, "kea.json")
	must.Succeed(k, os.WriteFile(file, marshal(k, config), 0o600))
	before := k.count(keaStarted)
	cmd := exec.Command(program, "-c", file)
	cmd.Env = append(os.Environ(), "KEA_LOCKFILE_DIR="+k.dir, "KEA_PIDFILE_DIR="+k.dir)
	k.cmd = spawn(k, k.ns, filepath.Join(k.dir, "out"), cmd)
	must.Until(k, program+" serves", func() bool { return k.count(keaStarted) > before })
}

// stop kills the server; it may have been stopped already.
func (k *kea) stop() {
	if k.cmd != nil {
		k.cmd.Process.Kill()
		k.cmd.Wait()
	}
}

func (k *kea) log() string { k.Helper(); return nstest.ReadIf(k, filepath.Join(k.dir, "log")) }

// Words of kea's log.
const (
	keaStarted = "_STARTED Kea DHCP"
	keaHeard   = "DHCP4_PACKET_RECEIVED "
	keaSends   = "DHCP4_PACKET_SEND "
)

// count is how many lines of the log have all the words.
func (k *kea) count(words ...string) int { k.Helper(); return countIn(k.log(), words...) }

// countIn is count for a part of a log.
func countIn(log string, words ...string) int {
	n := 0
lines:
	for line := range strings.Lines(log) {
		for _, w := range words {
			if !strings.Contains(line, w) {
				continue lines
			}
		}
		n++
	}
	return n
}

func (k *kea) discovers() int { k.Helper(); return k.count(keaHeard, "DHCPDISCOVER (") }

// keaLease is one that the server has granted.
type keaLease struct{ mac, clientID, hostName string }

// ledger is what the server did so far.
type ledger struct {
	held   map[string]keaLease // by address
	times  map[string]int      // how often an address was granted or renewed
	lapsed []string            // addresses that nobody gave back
}

// ledger reads the lease file, to which the server appends.
func (k *kea) ledger() *ledger {
	k.Helper()
	l := &ledger{held: map[string]keaLease{}, times: map[string]int{}}
	const address, mac, clientID, valid, hostName, state, columns = 0, 1, 2, 3, 8, 9, 11
	const reclaimed = "2" // after its end
	text := nstest.ReadIf(k, k.leases)
	text = text[:strings.LastIndexByte(text, '\n')+1] // it may be writing a line
	rows := must.Of(csv.NewReader(strings.NewReader(text)).ReadAll()).Get(k)
	for i, row := range rows {
		switch {
		case i == 0:
		case len(row) != columns:
			k.Fatalf("%s: line %d has %d columns", k.leases, i+1, len(row))
		case row[state] == reclaimed:
			delete(l.held, row[address])
			l.lapsed = append(l.lapsed, row[address])
		case row[valid] == "0":
			delete(l.held, row[address])
		default:
			l.held[row[address]] = keaLease{row[mac], strings.ReplaceAll(row[clientID], ":", ""), strings.TrimSuffix(row[hostName], ".")}
			l.times[row[address]]++
		}
	}
	return l
}

func (k *kea) held() map[string]keaLease { k.Helper(); return k.ledger().held }

func (k *kea) times(address string) int { k.Helper(); return k.ledger().times[address] }

// wantHeld waits until the server has leased these addresses and no others, and fails
// the test if one meanwhile came to its end instead of being given back. What a DEL
// releases in the midst of a renewal, the keeper releases again after it.
func (k *kea) wantHeld(t *testing.T, addresses ...string) {
	t.Helper()
	want := map[string]bool{}
	for _, a := range addresses {
		want[a] = true
	}
	before := k.ledger()
	now := before
	(&lan{log: filepath.Join(k.dir, "log")}).eventually(t, func() bool {
		now = k.ledger()
		for a := range now.held {
			if !want[a] {
				return false
			}
		}
		return len(now.held) == len(want)
	})
	if lapsed := now.lapsed[len(before.lapsed):]; len(now.held) != len(want) || len(lapsed) > 0 {
		t.Errorf("the server holds %v, want those of %q; nobody gave back %q", now.held, addresses, lapsed)
	}
}

// keaLAN is a LAN whose server is kea.
type keaLAN struct {
	*lan
	*kea
	watched string // what ip says of addresses that come and go in pods
}

// newKeaLAN has a bridge br0 on the node, and a router with a server on it.
func newKeaLAN(t *testing.T, fields conf) *keaLAN {
	t.Helper()
	n := newNode(t)
	n.ip("link add br0 type bridge")
	n.ip("link set br0 up")
	k := n.newKea("lan0", router4)
	l := &keaLAN{
		lan:     &lan{node: n, router: k.ns, leases: k.leases, log: filepath.Join(k.dir, "log")},
		kea:     k,
		watched: filepath.Join(t.TempDir(), "watched"),
	}
	l.watch(t)
	k.start(fields)
	return l
}

// watch has ip write down all that happens to the addresses of the node and its pods,
// which tells an address that was always there from one that came back.
func (l *keaLAN) watch(t *testing.T) {
	t.Helper()
	spawn(t, l.lan.ns, l.watched, exec.Command("ip", "-o", "-4", "-tshort", "monitor", "address", "all-nsid"))
	// From when it hears.
	l.eventually(t, func() bool {
		l.ip("address replace 127.1.2.3/32 dev lo")
		l.ip("address del 127.1.2.3/32 dev lo")
		return strings.Contains(nstest.ReadIf(t, l.watched), "127.1.2.3")
	})
}

// came and went are how often an address was seen so. Each renewal is a coming.
func (l *keaLAN) came(t *testing.T, address string) int { return l.saw(t, false, address) }
func (l *keaLAN) went(t *testing.T, address string) int { return l.saw(t, true, address) }

func (l *keaLAN) saw(t *testing.T, going bool, address string) int {
	t.Helper()
	n := 0
	for line := range strings.Lines(nstest.ReadIf(t, l.watched)) {
		if strings.Contains(line, "inet "+address+" ") && strings.Contains(line, "Deleted") == going {
			n++
		}
	}
	return n
}

// leasing is the network of the LAN, whose leases a keeper keeps.
func (l *keaLAN) leasing(ipam conf) *network {
	section := conf{"type": "dhcp"}
	maps.Copy(section, ipam)
	return l.network(conf{"ipam": section})
}

// named is what Kubernetes says of a pod.
func named(pod string) []option {
	return []option{arg("K8S_POD_NAMESPACE", "default"), arg("K8S_POD_NAME", pod), arg("IgnoreUnknown", "1")}
}

// prefix is a result's address as globals has it.
func prefix(r *current.Result) string { return r.IPs[0].Address.String() }

// has says whether a pod has an address and no other.
func has(t testing.TB, p *pod, address string) bool {
	t.Helper()
	got := globals(t, p.NS, "eth0")
	return len(got) == 1 && got[0] == address
}

// wantPut waits until a pod that leased anew has the address and no other, and the route.
// It had both before its record said so. But the kernel's work on addresses that end
// (check_lifetime in net/ipv4/devinet.c) goes by the time at which it began, and where it
// has to wait, as on a busy machine, takes an address that was set since for one long
// ended: then the pod has them back by its next renewal.
func (l *keaLAN) wantPut(t *testing.T, p *pod, address string) {
	t.Helper()
	put := func() bool {
		got := routes(t, p.NS, "-4", "default")
		return has(t, p, address) && len(got) == 1 && strings.Contains(got[0], "via "+router4+" ")
	}
	if !l.eventually(t, put) {
		t.Errorf("the pod has %v and default routes %q, want %s and one by %s", globals(t, p.NS, "eth0"), routes(t, p.NS, "-4", "default"), address, router4)
	}
}

// recordOf is a pod's lease as the operator sees it.
func (l *keaLAN) recordOf(t *testing.T, p *pod) (e struct{ State, Address, Server, Error string }) {
	t.Helper()
	var list []struct{ ContainerID, State, Address, Server, Error string }
	unmarshal(t, l.operate("leases", "--json", "--leases", l.state+"-leases").stdout, &list)
	for _, one := range list {
		if one.ContainerID == p.id {
			e.State, e.Address, e.Server, e.Error = one.State, one.Address, one.Server, one.Error
		}
	}
	return e
}

func TestKeaLeasesAndTheKeeperRenews(t *testing.T) {
	t.Parallel()
	l := newKeaLAN(t, nil)
	l.keep(t)
	w := l.leasing(nil)
	p := l.pod("a")
	r := w.add(p, named("web-0")...)
	address := ip4(r).String()
	mac := r.Interfaces[2].Mac
	want := map[string]keaLease{address: {mac, "00" + hex.EncodeToString([]byte("a/lan/eth0")), "web-0"}}
	expect.NoDiff(t, cmp.Diff(want, l.held(), cmp.AllowUnexported(keaLease{})), "what the server holds")
	// Renewals are unicast from the pod's address.
	renewal := "from " + address + " to " + router4 + " "
	l.eventually(t, func() bool { return l.count(keaHeard, "DHCPREQUEST (", renewal) >= 3 })
	toGet, toKeep, _ := strings.Cut(l.kea.log(), renewal)
	for _, kind := range []string{"DHCPOFFER (", "DHCPACK ("} {
		// To a slow server the pod says everything again, and is answered again.
		got := countIn(toGet, keaSends, kind, " to "+address+":68 ")
		expect.That(t, got != 0 && got == countIn(toGet, keaSends, kind), "the server did not send its %s to %s:\n%s", kind, address, toGet)
	}
	a, b := countIn(toKeep, keaHeard, "DHCPDISCOVER ("), countIn(toKeep, keaHeard, "DHCPREQUEST (", "from 0.0.0.0 ")
	expect.That(t, a+b == 0, "%d DISCOVERs and %d REQUESTs without an address, where the pod has one:\n%s", a, b, toKeep)
	l.eventually(t, func() bool { return l.times(address) > 3 })
	if l.went(t, prefix(r)) != 0 || !has(t, p, prefix(r)) {
		t.Errorf("the address did not stay:\n%s", nstest.ReadIf(t, l.watched))
	}
	expect.Success(t, w.check(p))
	wantPing(t, p.NS, router4)
	w.del(p)
	l.wantHeld(t)
	l.wantNothing()
	l.wantNoLeaseRecords()
}

func TestKeaIsToldOfReleases(t *testing.T) {
	t.Parallel()
	l := newKeaLAN(t, nil)
	l.keep(t)
	w := l.leasing(nil)
	stays, inside, outside, collected := l.pod("stays"), l.pod("inside"), l.pod("outside"), l.pod("collected")
	address := map[*pod]string{}
	for _, p := range []*pod{stays, inside, outside, collected} {
		address[p] = ip4(w.add(p)).String()
	}
	l.wantHeld(t, address[stays], address[inside], address[outside], address[collected])
	w.del(inside)
	l.wantHeld(t, address[stays], address[outside], address[collected])
	l.ip("link del " + w.port(outside))
	w.del(outside, withoutNetNS())
	l.wantHeld(t, address[stays], address[collected])
	w.gc(stays)
	l.wantHeld(t, address[stays])
	// Of what is just being renewed there are two.
	got := l.count(keaHeard, "DHCPRELEASE (")
	expect.That(t, got >= 3, "%d RELEASEs, want 3", got)
	w.del(stays)
	l.wantHeld(t)
	l.wantNothing()
	l.wantNoLeaseRecords()
}

// The server's successor has its pool and its leases, but not its address: a renewal
// comes to nothing, and a broadcast request is answered.
func TestKeaReplacedByAnotherServerRebinds(t *testing.T) {
	t.Parallel()
	const successor4 = "192.168.50.2"
	l := newKeaLAN(t, conf{"rebind-timer": 4})
	k := l.keep(t)
	w := l.leasing(nil)
	p := l.pod("a")
	r := w.add(p)
	next := l.newKea("lan1", successor4)
	k.freeze(t) // nobody asks while there is no server, however long it takes to start
	l.stop()
	l.ip("link del lan0")
	next.leases = l.kea.leases
	next.start(conf{"option-data": []conf{{"name": "routers", "data": successor4}}})
	k.thaw(t)
	l.eventually(t, func() bool { return l.recordOf(t, p).Server == successor4 })
	if next.count(keaHeard, "DHCPREQUEST (", "from "+ip4(r).String()+" to 255.255.255.255 ") == 0 {
		t.Errorf("no REQUEST of REBINDING:\n%s", next.log())
	}
	// And from then on its own.
	l.eventually(t, func() bool {
		return next.count(keaHeard, "DHCPREQUEST (", "from "+ip4(r).String()+" to "+successor4+" ") > 0
	})
	if next.discovers() != 0 || l.went(t, prefix(r)) != 0 || !has(t, p, prefix(r)) {
		t.Errorf("%d DISCOVERs; the pod's addresses:\n%s", next.discovers(), nstest.ReadIf(t, l.watched))
	}
	got := routes(t, p.NS, "-4", "default")
	expect.That(t, len(got) == 1 && strings.Contains(got[0], "via "+successor4+" "), "default routes %q, want one by the new router", got)
	wantPing(t, p.NS, successor4)
	w.del(p)
	next.wantHeld(t)
	l.wantNothing()
	l.wantNoLeaseRecords()
}

func TestKeaThatRefusesGivesAnotherAddress(t *testing.T) {
	t.Parallel()
	const low, high = "192.168.50.10 - 192.168.50.10", "192.168.50.200 - 192.168.50.209"
	for _, tt := range []struct {
		because     string
		before, now conf
		naks        bool
		silent      bool // until it has another address to give
	}{
		{"it is another's", conf{"pools": []conf{{"pool": low}}}, conf{
			"pools":        []conf{{"pool": low}, {"pool": high}},
			"reservations": []conf{{"hw-address": "02:00:00:00:00:01", "ip-address": "192.168.50.10"}},
		}, true, false},
		{"it is another's, and there is none", conf{"pools": []conf{{"pool": low}}}, conf{
			"pools":        []conf{{"pool": low}},
			"reservations": []conf{{"hw-address": "02:00:00:00:00:01", "ip-address": "192.168.50.10"}},
		}, true, true},
		// Of an address that is none of its own kea says nothing, and waits for the end.
		{"the pool moved", short(conf{"pools": []conf{{"pool": low}}}), conf{"pools": []conf{{"pool": high}}}, false, false},
	} {
		nstest.RunParallel(t, tt.because, func(t *testing.T) {
			l := newKeaLAN(t, tt.before)
			k := l.keep(t)
			w := l.leasing(nil)
			p := l.pod("a")
			l.ip("address add 192.168.50.2/24 dev br0")
			before := w.add(p, publish(t, "5300:53/udp"))
			p.serve(t, "udp", 53)
			newSender(t, l.router, addrPort("192.168.50.2", 5300)).ask(t)
			flows := func() string { return l.run("conntrack", "-L", "-p", "udp") }
			expect.Contains(t, flows(), "src="+ip4(before).String(), "no flow to begin with")
			k.freeze(t)
			l.stop()
			l.start(tt.now)
			k.thaw(t)
			if tt.silent {
				l.eventually(t, func() bool { return l.recordOf(t, p).State == "expired" })
				got := globals(t, p.NS, "eth0")
				expect.That(t, len(got) == 0, "refused, and the pod has %q still", got)
				l.stop()
				l.start(conf{"pools": []conf{{"pool": high}}})
			}
			l.eventually(t, func() bool {
				e := l.recordOf(t, p)
				return e.State == "bound" && strings.HasPrefix(e.Address, "192.168.50.20")
			}, "the pod, whose address the server refuses, gets another")
			e := l.recordOf(t, p)
			if naks := l.count(keaSends, "DHCPNAK ("); naks > 0 != tt.naks {
				t.Errorf("the server sent %d NAKs:\n%s", naks, l.kea.log())
			}
			expect.Equal(t, e.Error, "", "its lease is %+v", e)
			l.wantPut(t, p, e.Address)
			l.eventually(t, func() bool { return l.went(t, prefix(before)) == 1 }, "the address of before goes")
			if list := flows(); strings.Contains(list, "src="+ip4(before).String()) {
				t.Errorf("flows to the host's port lead to the address still that the pod had, and that may be another's:\n%s", list)
			}
			wantPing(t, p.NS, router4)
			w.del(p)
			l.eventually(t, func() bool { _, held := l.held()[netip.MustParsePrefix(e.Address).Addr().String()]; return !held })
			l.wantNothing()
			l.wantNoLeaseRecords()
		})
	}
}

// With a keeper or without, the kernel ends the lease.
func TestKeaGoneTheAddressGoesAndComesBackWithIt(t *testing.T) {
	t.Parallel()
	for _, without := range []string{"server", "server and keeper"} {
		nstest.RunParallel(t, without, func(t *testing.T) {
			l := newKeaLAN(t, short(nil))
			k := l.keep(t)
			w := l.leasing(nil)
			p := l.pod("a")
			r := w.add(p)
			l.stop()
			if without != "server" {
				k.kill()
			}
			l.eventually(t, func() bool { return len(globals(t, p.NS, "eth0")) == 0 })
			// So the watch would tell of a pod that loses its address.
			l.eventually(t, func() bool { return l.went(t, prefix(r)) == 1 })
			if without != "server" {
				l.keep(t)
			}
			l.eventually(t, func() bool { return l.recordOf(t, p).State == "expired" })
			wantError(t, w.check(p), 113, ip4(r).String())
			l.start(nil)
			l.eventually(t, func() bool { return l.recordOf(t, p).State == "bound" })
			l.wantPut(t, p, prefix(r))
			wantPing(t, p.NS, router4)
			// The attachment follows its lease.
			l.eventually(t, func() bool { return w.check(p) == nil })
			w.del(p)
			l.wantHeld(t)
			l.wantNothing()
			l.wantNoLeaseRecords()
		})
	}
}

// Where the keeper does not get at the pod, it is the host that nothing may lead by the address any more; not a try later.
func TestKeaGoneALeaseOutOfReachEndsInTime(t *testing.T) {
	t.Parallel()
	const lasts = 20 * time.Second
	l := newKeaLAN(t, short(conf{"valid-lifetime": int(lasts / time.Second)}))
	l.keep(t)
	w := l.leasing(nil).with(conf{"guard": true})
	p := l.pod("a")
	own, added := ip4(w.add(p)).String(), time.Now()
	leads := func() bool { return strings.Contains(l.run("nft", "list", "ruleset"), own) }
	must.That(t, leads(), "nothing leads to the pod")
	l.stop()
	nstest.Run(t, p.NS, "sh", "-ec", "ip link set eth0 down; ip link set eth0 name mine0")
	l.eventually(t, func() bool { return !leads() })
	// Tries are after 2 s, and by then 5, 10 and 20 s more, or a quarter less.
	took := time.Since(added)
	expect.That(t, took <= lasts+7*time.Second, "the host forgets it %s after the ADD", took)
}

func TestKeaReservesByIdentity(t *testing.T) {
	t.Parallel()
	const reserved = "192.168.50.5" // not in the pool
	for _, tt := range []struct {
		by    string
		again string // the ID of the container that gets the reserved address
		field string
		value func(l keaLease) string
	}{
		{"container", "first", "client-id", func(keaLease) string { return "00" + hex.EncodeToString([]byte("first/lan/eth0")) }},
		{"pod", "second", "client-id", func(keaLease) string { return "00" + hex.EncodeToString([]byte("default/db-0/lan/eth0")) }},
		{"mac", "second", "hw-address", func(l keaLease) string { return l.mac }},
	} {
		nstest.RunParallel(t, tt.by, func(t *testing.T) {
			l := newKeaLAN(t, nil)
			l.keep(t)
			w := l.leasing(conf{"clientID": tt.by})
			first := l.pod("first")
			// An operator sees in the server's list what to reserve for.
			address := ip4(w.add(first, named("db-0")...)).String()
			seen := l.held()[address]
			w.del(first)
			l.stop()
			l.start(conf{"reservations": []conf{{tt.field: tt.value(seen), "ip-address": reserved}}})
			again, other := &pod{NS: first.NS, path: first.path, id: tt.again}, l.pod("other")
			if got := ip4(w.add(again, named("db-0")...)).String(); got != reserved {
				t.Errorf("the pod has %s, want the reserved %s", got, reserved)
			}
			expect.That(t, ip4(w.add(other, named("db-1")...)).String() != reserved,
				"another pod has the reserved address")
			expect.Equal(t, l.held()[reserved], seen, "the server knows the pod as")
			before := l.times(reserved)
			l.eventually(t, func() bool { return l.times(reserved) > before })
			w.del(again)
			w.del(other)
			l.wantNothing()
		})
	}
}

func TestKeaWithAnExhaustedPool(t *testing.T) {
	t.Parallel()
	l := newKeaLAN(t, conf{"pools": []conf{{"pool": "192.168.50.10 - 192.168.50.10"}}})
	l.keep(t)
	w := l.leasing(nil)
	first, second := l.pod("first"), l.pod("second")
	r := w.add(first)
	before := l.traces()
	wantError(t, expect.Err(l.leasing(conf{"timeout": "1s"}).tryAdd(second)), 11, "DISCOVER")
	l.wantTraces(before)
	l.wantHeld(t, ip4(r).String())
	w.del(first)
	if got := w.add(second); prefix(got) != prefix(r) {
		t.Errorf("the second pod has %s, want %s, which the first gave back", prefix(got), prefix(r))
	}
	w.del(second)
	l.wantHeld(t)
	l.wantNothing()
}

// Both offer; the one that was not chosen gets nothing, and is never asked again.
func TestKeaTwiceOnOneLAN(t *testing.T) {
	t.Parallel()
	l := newKeaLAN(t, conf{"pools": []conf{{"pool": "192.168.50.10 - 192.168.50.19"}}})
	second := l.newKea("lan1", "192.168.50.2")
	second.start(conf{"pools": []conf{{"pool": "192.168.50.20 - 192.168.50.29"}}})
	k := l.keep(t)
	w := l.leasing(nil)
	p := l.pod("a")
	r := w.add(p)
	chosen, other := l.kea, second
	if strings.HasPrefix(prefix(r), "192.168.50.2") {
		chosen, other = second, l.kea
	}
	l.eventually(t, func() bool { return other.count(keaSends, "DHCPOFFER (") > 0 })
	renewed := func() {
		t.Helper()
		before := chosen.times(ip4(r).String())
		l.eventually(t, func() bool { return chosen.times(ip4(r).String()) > before })
	}
	renewed()
	k.kill()
	l.keep(t)
	renewed()
	other.wantHeld(t)
	chosen.wantHeld(t, ip4(r).String())
	if chosen.count(keaSends, "DHCPNAK (")+other.count(keaSends, "DHCPNAK (") > 0 || l.went(t, prefix(r)) > 0 || !has(t, p, prefix(r)) {
		t.Errorf("a server refused, or the address went:\n%s\n%s", chosen.log(), other.log())
	}
	w.del(p)
	chosen.wantHeld(t)
	l.wantNothing()
}

// TOMBOLO_PODS=100 is what is promised, and takes a quarter of a minute.
func TestKeaLosesNoLeaseThoughTheKeeperIsKilled(t *testing.T) {
	t.Parallel()
	pods, kills := 20, 4
	if n, err := strconv.Atoi(os.Getenv("TOMBOLO_PODS")); err == nil {
		pods, kills = min(n, 200), 12
	}
	l := newKeaLAN(t, nil)
	k := l.keep(t)
	w := l.leasing(nil)
	all := l.pods(pods)
	results := make([]*current.Result, pods)
	at := map[*pod]int{}
	for i, p := range all {
		at[p] = i
	}
	atOnce(all, func(p *pod) {
		r, err := w.tryAdd(p, named(p.id)...)
		expect.Success(t, err)
		results[at[p]] = r
	})
	if t.Failed() {
		t.FailNow()
	}
	// Nobody has to ask anew from here on.
	discovers := l.discovers()
	for i := range kills {
		// At any moment, and in the midst of renewals, of which there is one about every
		// tenth of a second.
		pause := rand.N(2 * time.Second)
		if i%2 == 1 {
			acks := l.count(keaSends, "DHCPACK (")
			l.eventually(t, func() bool { return l.count(keaSends, "DHCPACK (") > acks })
			pause = rand.N(10 * time.Millisecond)
		}
		time.Sleep(pause)
		k.kill()
		expect.That(t, k.cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL,
			"the keeper was not killed: %s", k.cmd.ProcessState)
		k = l.keep(t)
	}
	before := l.ledger().times
	l.eventually(t, func() bool {
		times := l.ledger().times
		for _, r := range results {
			if a := ip4(r).String(); times[a] < before[a]+2 {
				return false
			}
		}
		return true
	})
	l.wantEachAsBefore(t, all, results)
	expect.Equal(t, l.discovers()-discovers, 0, "DISCOVERs since the pods had their leases")
	expect.Equal(t, l.count(keaSends, "DHCPNAK ("), 0, "NAKs")
	for _, p := range all {
		expect.Success(t, w.check(p), "CHECK of %s", p.id)
	}
	atOnce(all, func(p *pod) { w.del(p) })
	// Of so many RELEASEs at once one may be lost, and its lease runs out then.
	l.eventually(t, func() bool { return len(l.held()) == 0 })
	l.wantNothing()
	l.wantNoLeaseRecords()
}

// wantEachAsBefore fails the test unless each pod always had the address of its ADD, in
// its namespace and in the server's list.
func (l *keaLAN) wantEachAsBefore(t *testing.T, pods []*pod, results []*current.Result) {
	t.Helper()
	held := l.held()
	for i, p := range pods {
		address := prefix(results[i])
		if !has(t, p, address) {
			t.Errorf("%s has %v, want %s", p.id, globals(t, p.NS, "eth0"), address)
		}
		came, went := l.came(t, address), l.went(t, address)
		expect.That(t, came >= 2 && went == 0, "%s: its %s was set %d times and went %d times", p.id, address, came, went)
		got := held[ip4(results[i]).String()]
		expect.That(t, got.hostName == p.id, "%s: the server holds its %s for %+v", p.id, address, got)
	}
	expect.That(t, len(held) == len(pods), "the server holds %d leases, want %d", len(held), len(pods))
	// The watch has missed nothing.
	expect.Equal(t, regexp.MustCompile(`(?i)overrun|no buffer`).FindString(nstest.ReadIf(t, l.watched)), "", "ip says")
}

func (l keaLease) String() string { return fmt.Sprintf("%s %s %s", l.mac, l.clientID, l.hostName) }
