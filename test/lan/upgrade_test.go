package lan

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// newer is the version under test, among those of nstest.Earlier.
const newer = ""

// upgrade is a node with pods of all kinds, whose programs are replaced while the pods
// run and talk.
type upgrade struct {
	*lan
	d        *dhcp
	networks map[string]*network // home, pods and wire
	pods     map[string]*pod     // those that are there, by name: the network and a number
	talks    []*nstest.Talk
	k        *keeper
	port     uint16
}

// newUpgrade is a node that drops what nobody lets it forward, with three networks in one
// state directory: on the LAN, behind the node, and a wire.
func newUpgrade(t *testing.T) *upgrade {
	l, d := newLab(t)
	for _, program := range []string{"iptables", "ip6tables"} {
		l.hostRun(program, "-P", "FORWARD", "DROP")
		l.hostRun(program, "-A", "FORWARD", "-m", "conntrack", "--ctstate", "INVALID", "-j", "DROP")
	}
	u := &upgrade{lan: l, d: d, pods: map[string]*pod{}, networks: map[string]*network{}, port: 7000}
	home := l.network(kept(nil))
	u.networks["home"] = home
	for name, fields := range map[string]object{
		"pods": {
			"mode": "gateway", "bridge": "cbr0", "macspoofchk": true, "ingressRate": 1e9, "ingressBurst": 1e8, "egressRate": 1e9, "egressBurst": 1e8,
			"ipam": ranges("10.77.0.0/24", "fd77::/64"),
		},
		"wire": {"mode": "l2", "bridge": "br1", "ipam": ranges("10.78.0.0/24")},
	} {
		n := l.network(fields)
		n.conf["name"], n.state, n.leases = name, home.state, home.leases
		n.conf["stateDir"], n.conf["leaseDir"] = home.state, home.leases
		for _, field := range []string{"uplink", "uplinkTimeout"} {
			delete(n.conf, field)
		}
		u.networks[name] = n
	}
	return u
}

// ranges is an ipam section of host-local's.
func ranges(subnets ...string) object {
	var sets []any
	for _, s := range subnets {
		sets = append(sets, []any{object{"subnet": s}})
	}
	return object{"type": "host-local", "ranges": sets}
}

// by has all programs be of a version from now on, and the keeper restarted.
func (u *upgrade) by(program string) {
	u.Helper()
	for _, n := range u.networks {
		n.bin = program
	}
	if u.k != nil {
		if err := u.k.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			u.Fatal(err)
		}
		_ = u.k.cmd.Wait()
	}
	u.k = u.networks["home"].keeper()
}

// of gives a pod's network.
func (u *upgrade) of(name string) *network { return u.networks[strings.Split(name, "-")[0]] }

// start adds a pod to each network.
func (u *upgrade) start(number int, ports ...string) {
	u.Helper()
	for network, n := range u.networks {
		name := fmt.Sprintf("%s-%d", network, number)
		var publishes []string
		if network == "pods" {
			publishes = ports
		}
		p := u.newPod(name, publishes...)
		u.pods[name] = p
		n.add(p)
		n.check(p)
	}
}

// stop deletes the pods of a number.
func (u *upgrade) stop(number int) {
	u.Helper()
	for name, p := range u.pods {
		if strings.HasSuffix(name, fmt.Sprintf("-%d", number)) {
			u.of(name).del(p)
			delete(u.pods, name)
		}
	}
}

// talk begins conversations by both protocols that have to go on until the end.
func (u *upgrade) talk(server place, by string, client place) {
	u.Helper()
	for _, network := range []string{"udp", "tcp"} {
		u.port++
		at := netip.AddrPortFrom(nstest.Addr(by), u.port)
		u.talks = append(u.talks, nstest.NewTalk(u, network, server.ns, at, client.ns, at))
	}
}

// talkAll has old pods talk to all that there is.
func (u *upgrade) talkAll() {
	u.Helper()
	p := func(name string) place { return u.pods[name].place }
	u.talk(u.internet, internetIP4, p("home-1"))
	u.talk(u.internet, internetIP6, u.host)
	u.talk(p("home-1"), p("home-1").ip4.String(), u.other)
	u.talk(p("home-1"), p("home-1").ip4.String(), u.host)
	u.talk(p("home-1"), p("home-1").ip4.String(), p("pods-1"))
	u.talk(u.internet, internetIP4, p("pods-1")) // masqueraded
	u.talk(p("pods-1"), p("pods-1").ip6.String(), u.host)
	u.talk(p("pods-3"), p("pods-3").ip6.String(), p("pods-1"))
	u.talk(p("wire-1"), p("wire-1").ip4.String(), p("wire-3"))
	// And by published ports, which are translated.
	for _, network := range []string{"udp", "tcp"} {
		at := netip.AddrPortFrom(p("pods-1").ip4, servicePort)
		u.talks = append(u.talks, nstest.NewTalk(u, network, p("pods-1").ns, at, u.internet.ns, netip.AddrPortFrom(u.host.ip4, hostPort)))
	}
}

// goesOn fails the test if what talks was cut or lost anything.
func (u *upgrade) goesOn(when string) {
	u.Helper()
	for _, t := range u.talks {
		t.Check(u)
	}
	if u.Failed() {
		u.Fatalf("that was: %s", when)
	}
}

// checkAll has the version of the moment check each pod.
func (u *upgrade) checkAll(when string) {
	u.Helper()
	for _, name := range slices.Sorted(maps.Keys(u.pods)) {
		if _, err := u.of(name).verb("CHECK", u.pods[name]); err != nil {
			u.Errorf("%s: %v", when, err)
		}
	}
}

// collect has it collect what is not among the pods.
func (u *upgrade) collect() {
	u.Helper()
	for network, n := range u.networks {
		valid := []object{}
		for name, p := range u.pods {
			if u.of(name) == n {
				valid = append(valid, object{"containerID": p.id, "ifname": nic})
			}
		}
		conf := maps.Clone(n.conf)
		conf["cni.dev/valid-attachments"] = valid
		stdin, err := json.Marshal(conf)
		if err != nil {
			u.Fatal(err)
		}
		if _, err := n.exec([]string{"CNI_COMMAND=GC", "CNI_PATH=/"}, stdin); err != nil {
			u.Errorf("GC of %s: %v", network, err)
		}
	}
}

// renew has the next keeper renew a pod's lease, and waits until it has.
func (u *upgrade) renew(name string, program string) {
	u.Helper()
	home := u.networks["home"]
	u.k.kill()
	home.makeDue(home.leaseOf(u.pods[name]).Hash)
	mac := macOf(u, u.pods[name].place, nic)
	heard := len(u.d.messages(mac))
	u.k = nil
	u.by(program)
	u.d.renewed(mac, heard)
}

// reach has a pod of each network be reached.
func (u *upgrade) reach(number int) {
	u.Helper()
	for _, network := range []string{"home", "pods"} {
		p := u.pods[fmt.Sprintf("%s-%d", network, number)].place
		u.serve(p, servicePort, 4)
		u.ask(p, u.internet.ip4, servicePort)
		u.ask(u.host, p.ip4, servicePort)
	}
	wire := u.pods[fmt.Sprintf("wire-%d", number)].place
	if err := nstest.Ping(u, wire.ns, u.pods["wire-1"].ip4); err != nil {
		u.Error(err)
	}
}

// mayUse fails the test unless a pod of the network pods may use an address that is not its own,
// or may not: macspoofchk held pods to their addresses before v0.4, and the pods of before stay
// held to them.
func (u *upgrade) mayUse(name string, want bool) {
	u.Helper()
	const gateway, foreign = "10.77.0.1", "10.77.0.200"
	ns := u.pods[name].ns
	nstest.Run(u, ns, "ip", "address", "add", foreign+"/32", "dev", nic)
	nstest.Run(u, ns, "ip", "route", "add", gateway, "dev", nic, "src", foreign)
	wait := time.Second
	if want {
		wait = 0
	}
	if err := nstest.PingWith(u, ns, nstest.Addr(gateway), nstest.Echo{Wait: wait}); (err == nil) != want {
		u.Errorf("%s uses an address of its choice: %v, want %t", name, err, want)
	}
	nstest.Run(u, ns, "ip", "route", "del", gateway, "dev", nic, "src", foreign)
	nstest.Run(u, ns, "ip", "address", "del", foreign+"/32", "dev", nic)
}

// TestNodeIsUpgradedAndGoesBackWithPodsRunning takes a node from each earlier version to
// this one and back, with flows that must not lose a datagram.
func TestNodeIsUpgradedAndGoesBackWithPodsRunning(t *testing.T) {
	for name, older := range nstest.Earlier(t) {
		t.Run(name, func(t *testing.T) {
			u := newUpgrade(t)
			u.by(older)
			u.start(1, published()...)
			u.start(2)
			u.start(3)
			u.talkAll()
			u.goesOn("before")

			u.by(newer)
			u.goesOn("the new keeper begins")
			u.networks["home"].repair()
			u.goesOn("the new version repairs")
			u.checkAll("the new version, after a repair")
			u.collect()
			u.goesOn("the new version collects")
			u.start(4)
			u.goesOn("the new version adds")
			u.reach(4)
			u.checkAll("the new version, after it added")
			u.mayUse("pods-3", false)
			u.mayUse("pods-4", true)
			u.stop(2)
			u.goesOn("the new version deletes pods of the old")
			u.renew("home-1", newer)
			u.checkAll("the new version, after a renewal")
			u.collect()
			u.goesOn("the new version renews and collects")

			u.by(older)
			u.goesOn("the old keeper begins")
			u.start(5)
			u.goesOn("the old version adds")
			u.reach(5)
			u.ask(u.host, u.pods["pods-4"].ip4, servicePort)
			u.mayUse("pods-4", false)
			u.stop(4)
			u.goesOn("the old version deletes pods of the new")
			u.renew("home-1", older)
			u.collect()
			u.goesOn("the old version renews and collects")

			u.by(newer)
			u.start(6)
			u.reach(6)
			u.checkAll("the new version once more")
			u.stop(5)
			u.goesOn("the new version once more")
			u.clear(newer)
		})
	}
}

// TestNodeIsUpgradedByAnADDAlone is about a node where nobody restarts or repairs anything: the next
// ADD of each network finds what the older version made.
func TestNodeIsUpgradedByAnADDAlone(t *testing.T) {
	for name, older := range nstest.Earlier(t) {
		t.Run(name, func(t *testing.T) {
			u := newUpgrade(t)
			u.by(older)
			u.start(1, published()...)
			u.start(3)
			u.talkAll()
			for _, n := range u.networks {
				n.bin = newer
			}
			u.start(4)
			u.goesOn("the new version adds, beside the old keeper")
			u.reach(4)
			u.checkAll("the new version, after it added")
			for _, n := range u.networks {
				n.bin = older
			}
			// Without a DEL of the new version there is nothing of it left that the old one
			// does not know: see clear.
			u.stop(4)
			u.goesOn("the old version deletes what the new one added")
			u.clear(older)
		})
	}
}

// clear deletes all pods and networks, and fails the test if anything is left.
func (u *upgrade) clear(program string) {
	u.Helper()
	u.goesOn("in the end")
	for name, p := range u.pods {
		u.of(name).del(p)
	}
	u.pods = map[string]*pod{}
	u.collect()
	u.k.kill()
	for name, n := range u.networks {
		n.bin = program
		n.operate("remove", name)
	}
	u.wantNoLink("cbr0")
	u.wantNoLink("br1")
	for _, what := range []string{"link show type veth", "link show type ifb"} {
		for _, o := range u.show(what) {
			if name := o["ifname"]; name != nic {
				u.Errorf("%v is left", name)
			}
		}
	}
	if rules := u.hostRun("nft", "list", "ruleset"); strings.Contains(rules, "tombolo") {
		u.Errorf("left:\n%s", rules)
	}
	for _, dir := range []string{"attachments", "networks", "uplinks"} {
		entries, err := os.ReadDir(u.networks["home"].state + "/" + dir)
		if err != nil && !os.IsNotExist(err) {
			u.Fatal(err)
		}
		for _, e := range entries {
			if strings.HasSuffix(e.Name(), ".json") {
				u.Errorf("%s/%s is left", dir, e.Name())
			}
		}
	}
}
