package cni

import (
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// inTrusted waits until the link is in firewalld's zone trusted.
func (f *firewalld) inTrusted(t *testing.T, link string) {
	t.Helper()
	must.Until(t, link+" is in the zone trusted", func() bool { return f.zone(link) == "trusted" })
}

// The runtime asks STATUS before it adds the first pod, when nothing is on record yet.
func TestBridgesJoinFirewalldsZone(t *testing.T) {
	n := parallelNode(t)
	out := n.outside()
	w := n.portnet(nil)
	f := n.firewalld(t)
	f.do("firewall-cmd --permanent --zone=public --remove-forward && firewall-cmd --reload")
	a, b := n.pod("a"), n.pod("b")

	alone := n.mindOn(t, f.bus, []string{"--firewalld=false"})
	_, err := w.tryAdd(a)
	must.That(t, err != nil, "an ADD succeeds without the zone")
	wantError(t, w.status(), 50, "--zone=trusted")
	alone.end(t)
	expect.Equal(t, f.zone("cbr0"), "", "with --firewalld=false the bridge is in zone")

	m := n.mindOn(t, f.bus, nil)
	must.Until(t, "STATUS succeeds", func() bool { return w.status() == nil })
	w.add(a, publish(t, "8080:80/tcp"))
	a.serve(t, "tcp", 80)
	for _, after := range []string{"", "firewall-cmd --reload", "firewall-cmd --complete-reload", "firewalld begins anew"} {
		switch after {
		case "":
		case "firewalld begins anew":
			f.end(t)
			f.begin(t)
		default:
			f.do(after)
		}
		f.inTrusted(t, "cbr0")
		wantPing(t, a.NS, outside4, outside6)
		_, err := nstest.AskWithin(t, out, "tcp", netip.AddrPortFrom(nstest.Addr(uplink4), 8080), 10*time.Second)
		expect.That(t, err == nil, "after %q, the published port: %v", after, err)
		for _, command := range [][]string{{"check"}, {"doctor", "--dns", "none"}} {
			expect.Success(t, n.operate(append(command, "--state", n.state)...).err(), "%s after %q", command, after)
		}
		expect.Success(t, w.status(), "after %q", after)
	}
	f.do("! firewall-cmd --permanent --get-zone-of-interface=cbr0") // it is in none
	log := nstest.ReadIf(t, m.log)
	expect.That(t, strings.Count(log, "a bridge joins a zone of firewalld") >= 2 && !strings.Contains(log, "trying again"), "log: %s", log)

	// The next tombolod undoes what this one did.
	m.end(t)
	w.add(b)
	wantPing(t, b.NS, outside4)
	w.del(a, publish(t, "8080:80/tcp"))
	w.del(b)
	must.Succeed(t, n.remove("podnet").err(), "remove")
	n.mindOn(t, f.bus, nil)
	must.Until(t, "the bridge left the zone", func() bool { return f.zone("cbr0") == "" })
}

func TestBridgesJoinAFirewalldThatComesLater(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.podnet(nil)
	f := n.firewalldToBe(t)
	m := n.mindOn(t, f.bus, nil)
	a := w.addPod("a")
	wantPing(t, a.NS, outside4)
	f.beginBus(t)
	f.begin(t)
	f.inTrusted(t, "cbr0")
	wantPing(t, a.NS, outside4, outside6)
	// A second network's, while it runs.
	second := n.network("second", conf{"bridge": "cbr1", "ipam": conf{"type": "host-local", "subnet": "10.23.0.0/16"}})
	second.add(n.pod("b"))
	if zone := f.zone("cbr1"); zone != "trusted" {
		t.Errorf("after the ADD that built the network its bridge is in zone %q; log: %s", zone, nstest.ReadIf(t, m.log))
	}
}

// While firewalld is reloaded, a table of its drops all new connections. An ADD waits for the end of that.
func TestAnADDWaitsForFirewalldsReload(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	f := n.firewalld(t)
	n.mindOn(t, f.bus, nil)
	must.Until(t, "firewalld is attended to", n.attendsFirewalld)
	w := n.podnet(nil)
	// What firewalld 1.3 has there, for as long as this test wants.
	n.nft("add table inet firewalld_policy_drop; add chain inet firewalld_policy_drop filter_forward { type filter hook forward priority 9; policy drop; };" +
		" add rule inet firewalld_policy_drop filter_forward ct state { established, related } accept")
	expect.Success(t, w.status(), "STATUS meanwhile")
	a := n.pod("a")
	added := make(chan error)
	go func() { _, err := w.tryAdd(a); added <- err }()
	f.inTrusted(t, "cbr0") // the ADD has seen that table
	n.nft("delete table inet firewalld_policy_drop")
	must.Succeed(t, <-added, "ADD")
	wantPing(t, a.NS, outside4, outside6)
}

func TestAnOperatorsZoneOfFirewalldStays(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	f := n.firewalldToBe(t)
	// So a reload keeps what runs, and with it what we did.
	f.configure(t, "FlushAllOnReload=no")
	f.beginBus(t)
	f.begin(t)
	f.do("firewall-cmd --permanent --zone=block --add-interface=permanent")
	m := n.mindOn(t, f.bus, nil)
	must.Until(t, "firewalld is attended to", n.attendsFirewalld)
	add := func(bridge, subnet string) error {
		w := n.network(bridge, conf{"bridge": bridge, "ipam": conf{"type": "host-local", "subnet": subnet}})
		_, err := w.tryAdd(n.pod(bridge))
		return err
	}
	wantError(t, add("permanent", "10.1.0.0/16"), 117, "--zone=trusted --change-interface=permanent")
	f.do("firewall-cmd --zone=drop --add-interface=running")
	f.do("firewall-cmd --zone=public --add-interface=managed") // as network managers do
	for bridge, subnet := range map[string]string{"running": "10.2.0.0/16", "managed": "10.3.0.0/16", "free": "10.4.0.0/16"} {
		err := add(bridge, subnet)
		expect.That(t, err == nil || bridge == "running", "%s: %v", bridge, err)
	}
	f.inTrusted(t, "managed")
	f.inTrusted(t, "free")
	f.do("firewall-cmd --permanent --zone=drop --add-interface=free; firewall-cmd --zone=block --change-interface=managed; firewall-cmd --reload")
	must.Until(t, "the free bridge goes where it is put", func() bool { return f.zone("free") == "drop" })
	must.Until(t, "it is seen", func() bool { return strings.Count(nstest.ReadIf(t, m.log), "left in the zone") == 3 })
	for bridge, want := range map[string]string{"running": "drop", "permanent": "block", "managed": "block", "free": "drop"} {
		expect.Equal(t, f.zone(bridge), want, "%s is in zone", bridge)
	}
}

// What firewalld closes to a bridge in no zone it closes to one that tombolod put into the zone trusted, and to no other.
func TestTheZoneTrustedOpensNoBridgeOfOthers(t *testing.T) {
	t.Parallel()
	for kind, lines := range map[string]string{
		"bridge": "ip link add virbr1 up type bridge; ip link set wire1 master virbr1; ip address add 172.17.0.1/16 dev virbr1; ip address add fd17::1/64 dev virbr1 nodad",
		"veth": `ip link set wire1 down name virbr1; ip link set virbr1 up; ip address add 172.17.0.1/32 dev virbr1; ip address add fd17::1/128 dev virbr1 nodad
			ip route add 172.17.0.2 dev virbr1; ip route add fd17::2 dev virbr1`,
	} {
		nstest.RunParallel(t, kind, func(t *testing.T) {
			n := newNode(t)
			n.outside()
			machine, stranger := nstest.New(t), nstest.New(t)
			nstest.Veth(t, n.ns, "wire1", machine, "eth0")
			nstest.Veth(t, n.ns, "wire2", stranger, "eth0")
			n.run("sh", "-ec", lines+`
				ip link add other up type bridge; ip link set wire2 master other; ip address add 172.18.0.1/16 dev other; ip address add fd18::1/64 dev other nodad
				echo 1 >/proc/sys/net/ipv4/ip_forward; echo 1 >/proc/sys/net/ipv6/conf/all/forwarding`)
			for ns, subnet := range map[*netns.NS]string{machine: "17", stranger: "18"} {
				nstest.Run(t, ns, "sh", "-ec", strings.ReplaceAll(`ip address add 172.NN.0.2/16 dev eth0; ip address add fdNN::2/64 dev eth0 nodad
					ip route add default via 172.NN.0.1; ip route add default via fdNN::1`, "NN", subnet))
			}
			const theirs4, theirs6 = "172.17.0.2", "fd17::2"
			f := n.firewalld(t)
			f.do("firewall-cmd --permanent --zone=internal --add-interface=virbr1 && firewall-cmd --reload")
			w := n.portnet(conf{"ipMasq": true})
			m := n.mindOn(t, f.bus, nil)
			must.Until(t, "firewalld is attended to", n.attendsFirewalld)
			a := w.addPod("a", publish(t, "8080:80/tcp"))
			f.inTrusted(t, "cbr0")

			closed := func(when string) {
				t.Helper()
				t.Log(when)
				wantNoPing(t, a.NS, theirs4, theirs6)
				wantNoPing(t, stranger, theirs4, theirs6)
				wantPing(t, a.NS, outside4, outside6)
				wantPing(t, machine, "172.17.0.1", "fd17::1")
			}
			open := func(when string) {
				t.Helper()
				must.Until(t, when+": the way is open", func() bool {
					return nstest.Ping(t, a.NS, nstest.Addr(theirs4)) == nil && nstest.Ping(t, a.NS, nstest.Addr(theirs6)) == nil
				})
			}
			closed("after the ADD")
			// What the owner of a machine publishes is reached.
			at := nstest.Serve(t, machine, "tcp", netip.AddrPortFrom(nstest.Addr(theirs4), 0))
			n.run("iptables-nft", "-t", "nat", "-A", "PREROUTING", "-d", uplink4, "-p", "tcp", "--dport", "81", "-j", "DNAT", "--to-destination", at.String())
			_, err := nstest.AskWithin(t, a.NS, "tcp", netip.AddrPortFrom(nstest.Addr(uplink4), 81), time.Minute)
			expect.Success(t, err, "a port that the machine's owner publishes")

			f.do("firewall-cmd --reload")
			f.inTrusted(t, "cbr0")
			closed("after a reload")
			n.nft("delete table inet tombolo")
			must.Until(t, "the rules are back", func() bool { return w.check(a) == nil })
			closed("after a flush")
			m.end(t)
			n.nft("delete table inet tombolo")
			must.Succeed(t, n.operate("repair", "--state", n.state).err(), "repair")
			closed("after a repair without tombolod")
			f.end(t)
			n.mindOn(t, f.bus, nil)
			open("without firewalld")
			f.begin(t)
			f.inTrusted(t, "cbr0")
			closed("with a firewalld that began anew")
			// The operator's choice.
			f.do("firewall-cmd --permanent --zone=trusted --add-interface=cbr0 && firewall-cmd --reload")
			open("in a zone that the operator chose")
		})
	}
}

// attendsFirewalld says whether a tombolod says so to ADDs.
func (n *node) attendsFirewalld() bool {
	for _, name := range n.files(n.state) {
		if filepath.Base(name) == "firewalld.lock" {
			return true
		}
	}
	return false
}

// A node in a container may have got its host's bus.
func TestAFirewalldOfAnotherNetworkNamespaceIsLeftAlone(t *testing.T) {
	t.Parallel()
	host, n := newNode(t), newNode(t)
	f := host.firewalld(t)
	n.mindOn(t, f.bus, nil)
	host.mindOn(t, f.bus, nil)
	w := n.podnet(conf{"bridge": "inner"})
	w.add(n.pod("a"))
	host.podnet(nil).add(host.pod("b"))
	f.inTrusted(t, "cbr0")
	expect.Equal(t, f.zone("inner"), "", "the other node's bridge is in zone")
}

// A bus that accepts connections and never answers keeps tombolod from nothing.
func TestABusThatNeverAnswersIsInNobodysWay(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	n.run("iptables", "-P", "FORWARD", "DROP")
	f := n.firewalldToBe(t)
	listener := must.Of(net.Listen("unix", strings.TrimPrefix(f.bus, "unix:path="))).Get(t)
	defer listener.Close()
	w := n.podnet(nil)
	a := n.pod("a")
	m := n.mindOn(t, f.bus, nil)
	conn, err := listener.Accept() // it waits for an answer from here on
	must.Succeed(t, err)
	defer conn.Close()
	w.add(a)
	n.nft("flush table inet tombolo")
	must.Until(t, "the firewall is put right", func() bool { return m.metric("firewall_mends_total") > 0 })
	must.Until(t, "CHECK succeeds", func() bool { return w.check(a) == nil })
	wantPing(t, a.NS, outside4)
	m.end(t)
}

// The name firewall has no part in it: the bridge is in the zone, and no pod's address is. Another zone is the
// operator's to put the bridge into.
func TestFirewallByNameLeavesFirewalldToTheBridge(t *testing.T) {
	t.Parallel()
	s := newSide(t, referenceDir(t), byName())
	s.outside()
	f := s.firewalld(t)
	s.bus = f.bus
	s.mindOn(t, f.bus, nil)
	must.Until(t, "firewalld is attended to", s.attendsFirewalld)
	list := []string{`{"type":"bridge","bridge":"cni0","isGateway":true,"ipMasq":true,"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.1.0/24","routes":[{"dst":"0.0.0.0/0"}]}}`, `{"type":"firewall","backend":"firewalld"}`}
	s.chain("ADD", "a", list)
	for range 2 {
		f.inTrusted(t, "cni0")
		wantPing(t, s.of("a").NS, outside4)
		sources := f.ask(firewalldName+".zone.getSources", "trusted")
		expect.That(t, len(sources) == 0, "sources: %q", sources)
		s.chain("CHECK", "a", list)
		f.do("firewall-cmd --reload")
	}
	conf := `{"cniVersion":"1.0.0","name":"net","stateDir":"STATE","prevResult":` + s.results["a"] + `,"type":"firewall","firewalldZone":"internal"}`
	o := s.call(verb{plugin: "firewall", verb: "ADD", id: "a", conf: conf})
	if e := failure(o.stdout); e == nil || e.Code != 7 || !strings.Contains(e.Msg, "firewall-cmd --permanent --zone=ZONE --change-interface=BRIDGE") {
		t.Errorf("ADD with another zone: %+v", o)
	}
	s.chain("DEL", "a", list)
}
