package cni

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// tag is one of a frame's: its type, and its VLAN.
type tag struct{ typ, id int }

func hexMAC(t testing.TB, ns *netns.NS, link string) net.HardwareAddr {
	t.Helper()
	return must.Of(net.ParseMAC(nstest.MAC(t, ns, link))).Get(t)
}

// tagged is a frame to all, behind some tags.
func tagged(from net.HardwareAddr, token string, tags ...tag) []byte {
	frame := slices.Concat([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, from)
	for _, one := range tags {
		frame = slices.Concat(frame, be16(one.typ), be16(one.id))
	}
	return slices.Concat(frame, be16(testProtocol), []byte(token), make([]byte, 46))
}

// datagram is a broadcast from an address of IPv4, by an experimental protocol (RFC 3692), behind some tags.
func datagram(from net.HardwareAddr, own netip.Addr, token string, tags ...tag) []byte {
	ip := slices.Concat([]byte{0x45, 0}, be16(20+len(token)), []byte{0, 0, 0, 0, 1, 253, 0, 0}, own.AsSlice(), []byte{255, 255, 255, 255})
	copy(ip[10:], sum16(ip))
	frame := tagged(from, "", tags...)[:14+4*len(tags)]
	copy(frame[len(frame)-2:], be16(unix.ETH_P_IP))
	return slices.Concat(frame, ip, []byte(token), make([]byte, 46))
}

// Neighbours that are in VLANs by their own interfaces would take what is behind the tag.
func TestAGuardedPodSendsNoVLANTags(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(conf{"guard": true})
	a, b := n.pod("a"), n.pod("b")
	own := ip4(w.add(a))
	w.add(b)
	ear, out, mac := rawSocket(t, b.NS, "eth0"), rawSocket(t, a.NS, "eth0"), hexMAC(t, a.NS, "eth0")
	for i, tags := range [][]tag{{{unix.ETH_P_8021Q, 20}}, {{unix.ETH_P_8021AD, 20}}} {
		token, last := fmt.Sprintf("token-%03d.", i), fmt.Sprintf("last--%03d.", i)
		must.Succeed(t, expect.Err(unix.Write(out, datagram(mac, own, token, tags...))))
		must.Succeed(t, expect.Err(unix.Write(out, datagram(mac, own, last))))
		expect.That(t, !hears(t, ear, token, last), "another pod hears what a guarded one sends with the tag %x", tags)
	}
}

// hears says whether a socket gets a frame with the token, before that with the last one.
func hears(t testing.TB, fd int, token, last string) bool {
	t.Helper()
	buf, heard := make([]byte, 2048), false
	for {
		got := must.Of(unix.Read(fd, buf)).Get(t, "%s: wait for the frame behind it", token)
		if bytes.Contains(buf[:got], []byte(last)) {
			return heard
		}
		heard = heard || bytes.Contains(buf[:got], []byte(token))
	}
}

// A pod may send any frame: none comes into a VLAN that its port is not in, neither to a pod, nor by a trunk to the LAN
// or to a pod.
func TestVLANIsNotEnteredByTagsOfAPod(t *testing.T) {
	t.Parallel()
	needVLANs(t)
	n, lan := newNode(t), nstest.New(t)
	l2 := conf{"mode": "l2", "bridge": "br0", "ipam": nil}
	plain, hundred := n.network("plain", l2), n.network("hundred", l2).with(conf{"vlan": 100})
	from := map[string]*pod{"no VLAN": n.pod("plain"), "VLAN 100": n.pod("hundred")}
	plain.add(from["no VLAN"])
	nstest.Veth(t, n.ns, "up0", lan, "eth0")
	n.ip("link set up0 master br0 up")
	hundred.add(from["VLAN 100"])
	inside, trunk := n.pod("inside"), n.pod("trunk")
	n.network("twenty", l2).with(conf{"vlan": 20}).add(inside)
	n.network("trunk", l2).with(conf{"vlanTrunk": []conf{{"minID": 20, "maxID": 21}}}).add(trunk)
	n.run("bridge", "vlan", "add", "vid", "20", "dev", "up0")
	n.run("bridge", "vlan", "add", "vid", "100", "dev", "up0")
	ears := map[string]int{"a pod in the VLAN": rawSocket(t, inside.NS, "eth0")}
	for name, ns := range map[string]*netns.NS{"a machine of the LAN": lan, "a pod with a trunk": trunk.NS} {
		nstest.Run(t, ns, "sh", "-ec", "ip link set eth0 up; ip link add link eth0 name eth0.20 type vlan id 20; ip link set eth0.20 up")
		ears[name] = rawSocket(t, ns, "eth0.20")
	}
	const q, ad = unix.ETH_P_8021Q, unix.ETH_P_8021AD
	legit, mac := rawSocket(t, inside.NS, "eth0"), hexMAC(t, inside.NS, "eth0")
	number := 0
	for name, p := range from {
		own := map[string]int{"no VLAN": 1, "VLAN 100": 100}[name]
		out := rawSocket(t, p.NS, "eth0")
		for _, tags := range [][]tag{
			{}, {{q, 20}}, {{q, 0}, {q, 20}}, {{q, own}, {q, 20}}, {{q, own}, {q, 0}, {q, 20}}, {{ad, 20}}, {{ad, 0}, {q, 20}},
			{{ad, own}, {q, 20}}, {{q, own}, {ad, own}, {q, 20}}, {{q, 4095}}, {{q, 4095}, {q, 20}}, {{q, 0xe000 | own}, {q, 20}},
		} {
			number++
			token, last := fmt.Sprintf("token-%03d.", number), fmt.Sprintf("last--%03d.", number)
			must.Succeed(t, expect.Err(unix.Write(out, tagged(hexMAC(t, p.NS, "eth0"), token, tags...))))
			must.Succeed(t, expect.Err(unix.Write(legit, tagged(mac, last))))
			for who, ear := range ears {
				expect.That(t, who == "a pod in the VLAN" || !hears(t, ear, token, last),
					"from %s, with the tags %x: %s hears it in VLAN 20", name, tags, who)
			}
			if buf := make([]byte, 2048); true {
				// What it says itself it hears too.
				for {
					got := must.Of(unix.Read(ears["a pod in the VLAN"], buf)).Get(t)
					expect.That(t, !bytes.Contains(buf[:got], []byte(token)),
						"from %s, with the tags %x: a pod in VLAN 20 hears it", name, tags)
					if bytes.Contains(buf[:got], []byte(last)) {
						break
					}
				}
			}
		}
	}
}

// The networks are those of a LAN each, with the same addresses, by one NIC.
func TestVLANsOfTheLANMayHaveTheSameAddresses(t *testing.T) {
	t.Parallel()
	needVLANs(t)
	nstest.Need(t, "dnsmasq")
	n := newNode(t)
	routers := map[int]*lan{}
	router := nstest.New(t)
	nstest.Veth(t, n.ns, "eth0", router, "eth0")
	n.bridgeOfTheSystem()
	nstest.Run(t, router, "sh", "-ec", "ip link set lo up; ip address add 192.168.1.1/24 dev eth0; ip link set eth0 up")
	var nets []*network
	for _, id := range []int{20, 30} {
		link := fmt.Sprintf("eth0.%d", id)
		l := &lan{node: n, router: nstest.New(t)}
		nstest.Run(t, router, "ip", "link", "add", "link", "eth0", "name", link, "type", "vlan", "id", fmt.Sprint(id))
		nstest.Run(t, router, "ip", "link", "set", link, "name", "eth0", "netns", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), l.router.FD()))
		nstest.Run(t, l.router, "sh", "-ec", "ip link set lo up; ip link set eth0 up; ip address add "+router4+"/24 dev eth0")
		l.serve(t, "--dhcp-sequential-ip")
		routers[id] = l
		w := l.network(conf{"mode": "lan", "uplink": "eth0", "vlan": id})
		w.name = fmt.Sprintf("lan%d", id)
		nets = append(nets, w)
	}
	var all []*pod
	for _, w := range nets {
		for range 2 {
			p := n.pod(fmt.Sprintf("p%d", len(all)))
			all = append(all, p)
			w.add(p)
			wantPing(t, p.NS, router4)
			expect.Success(t, w.check(p))
		}
	}
	a, b := globals(t, all[0].NS, "eth0"), globals(t, all[2].NS, "eth0")
	expect.That(t, slices.Equal(a, b), "%s and %s: this tests nothing", a, b)
	for i, p := range all {
		nets[i/2].del(p)
	}
	nets[0].lanIsClean(t, routers)
}

func (w *network) lanIsClean(t *testing.T, routers map[int]*lan) {
	t.Helper()
	for _, l := range routers {
		l.wantNoLeaseRecords()
	}
}

// What others do to the links is found, and mended.
func TestVLANsFaultsOfOthersAreMended(t *testing.T) {
	t.Parallel()
	needVLANs(t)
	n := newNode(t)
	n.outside()
	plain := n.network("plain", conf{"ipam": hostLocal("10.79.0.0/24", "fd79::/64"), "bridgeNFCall": false})
	w := n.podnet(conf{"vlan": 100, "preserveDefaultVlan": true, "bridgeNFCall": false})
	a, b := n.pod("a"), n.pod("b")
	ra := plain.add(a)
	rb := w.add(b)
	works := func(when string) {
		t.Helper()
		expect.Success(t, n.operate("check", "--state", n.state).err(), "%s: check", when)
		for _, one := range []struct {
			*network
			*pod
		}{{plain, a}, {w, b}} {
			expect.Success(t, one.check(one.pod), "%s", when)
		}
		wantPing(t, a.NS, "10.79.0.1", "fd79::1", outside4, outside6)
		wantPing(t, b.NS, gateway4, gateway6, outside4, outside6)
		wantPing(t, n.ns, ip4(ra).String(), ip6(rb).String())
	}
	works("at first")
	for _, tt := range []struct {
		name, command string
	}{
		{"the pod's only VLAN", "bridge vlan del vid 1 dev " + plain.port(a)},
		{"another VLAN for the pod", "bridge vlan add vid 5 pvid untagged dev " + plain.port(a)},
		{"another pvid of a port that keeps others", "bridge vlan add vid 5 pvid untagged dev " + w.port(b)},
		{"tags for the pod", "bridge vlan add vid 100 dev " + w.port(b)},
		{"the bridge's own VLAN", "bridge vlan del vid 1 dev cbr0 self"},
		{"the default VLAN", "ip link set cbr0 type bridge vlan_default_pvid 0"},
		{"another default VLAN", "ip link set cbr0 type bridge vlan_default_pvid 7"},
		{"the VLANs' protocol", "ip link set cbr0 type bridge vlan_protocol 802.1ad"},
		{"the link's name", "sh -c ip#link#set#cbr0.100#down;ip#link#set#cbr0.100#name#theirs#up"},
		{"the link's MAC", "ip link set cbr0.100 address 02:00:00:00:00:77"},
		{"the bridge down", "ip link set cbr0 down"},
		{"no IPv6 on the link", "sysctl -qw net.ipv6.conf.cbr0/100.disable_ipv6=1"},
		{"filtering", "ip link set cbr0 type bridge vlan_filtering 0"},
	} {
		args := strings.Fields(tt.command)
		args[len(args)-1] = strings.ReplaceAll(args[len(args)-1], "#", " ")
		n.run(args[0], args[1:]...)
		o := n.operate("check", "--state", n.state)
		expect.That(t, o.status != 0, "%s: check: %+v", tt.name, o)
		expect.Success(t, n.operate("repair", "--state", n.state).err(), "%s: repair", tt.name)
		works(tt.name)
		if t.Failed() {
			t.Fatal(n.run("bridge", "vlan", "show"), n.run("ip", "-d", "link"))
		}
	}
}

// kill starts a verb and kills its process after a while, 0 being at once, unless it
// ended before. It says which.
func (n *node) kill(c call, after time.Duration) (killed bool) {
	n.Helper()
	cmd := exec.Command(plugin())
	cmd.Env, cmd.Stdin = c.environ(), bytes.NewReader(c.stdin)
	must.Succeed(n, n.ns.Do(cmd.Start))
	if after <= 0 {
		_ = cmd.Process.Kill()
	} else {
		timer := time.AfterFunc(after, func() { _ = cmd.Process.Kill() })
		defer timer.Stop()
	}
	_ = cmd.Wait()
	status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
}

// duration is how long a verb takes here and now: what the delays of a sweep are a
// part of.
func (n *node) duration(c call) time.Duration {
	n.Helper()
	start := time.Now()
	n.callOK(c)
	return time.Since(start)
}

// delays go from none to as long as a verb takes, in so many rounds, and over again. All
// but the first are others in each run, of which test-long makes several.
type delays struct {
	whole  time.Duration
	rounds int
}

func (d *delays) at(round int) time.Duration {
	part := max(d.whole/time.Duration(d.rounds), 1)
	if round %= d.rounds; round == 0 {
		return 0
	}
	return part*time.Duration(round-1) + rand.N(part)
}

// most is how many sweeps are made at most, to meet what a test is for.
const most = 20

func TestVLANsFirstADDMayBeKilled(t *testing.T) {
	t.Parallel()
	needVLANs(t)
	const rounds = 12
	n := newNode(t)
	w := n.podnet(conf{"vlan": 100, "vlanTrunk": []conf{{"id": 7}}})
	add := func(p *pod) call {
		return call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(nil)}
	}
	sweep := delays{whole: n.duration(add(n.pod("first"))), rounds: rounds}
	kills := 0
	for i := 0; i < rounds || kills == 0 && i < most*rounds; i++ {
		w.gc()
		must.Succeed(t, n.remove("podnet").err())
		must.Succeed(t, os.RemoveAll(n.state))
		killed := n.pod(fmt.Sprintf("killed-%d", i))
		if n.kill(add(killed), sweep.at(i)) {
			kills++
		}
		// Where its port is, it is in no other VLAN once it is up.
		if l := links(t, n.ns)[w.port(killed)]; slices.Contains(l.Flags, "UP") && n.vlansOf(w.port(killed)) != "7, 100 pvid egress untagged" {
			t.Errorf("a port that is up is in the VLANs %s", n.vlansOf(w.port(killed)))
		}
		next := n.pod(fmt.Sprintf("next-%d", i))
		w.add(next)
		must.Succeed(t, w.check(next), "after an ADD that was killed")
		wantPing(t, next.NS, gateway4, gateway6)
		o := n.operate("check", "--state", n.state)
		expect.That(t, o.status == 0 || strings.Contains(o.stdout, "killed"), "check: %+v", o)
		w.gc(next)
		expect.Success(t, n.operate("check", "--state", n.state).err(), "check")
	}
	expect.That(t, kills != 0, "no ADD was killed")
	w.gc()
	n.wantNothing()
	if o := n.remove("podnet"); o.status != 0 || len(links(t, n.ns)) != 1 {
		t.Errorf("remove: %+v, and %v is left", o, links(t, n.ns))
	}
}

func TestVLANHasPolicies(t *testing.T) {
	t.Parallel()
	needVLANs(t)
	for policy, reached := range map[string][]bool{"open": {true, true}, "same-bridge": {true, false}, "isolated": {false, false}} {
		n := newNode(t)
		n.outside()
		w := n.podnet(conf{"ingressPolicy": policy, "vlan": 100})
		other := n.network("othernet", conf{"ipam": hostLocal("10.78.0.0/24", "fd78::/64"), "ingressPolicy": policy, "vlan": 200})
		a, b, c := n.pod("a"), n.pod("b"), n.pod("c")
		w.add(a)
		for i, r := range []interface{ String() string }{ip4(w.add(b)), ip4(other.add(c))} {
			if reached[i] {
				wantPing(t, a.NS, r.String())
			} else {
				wantNoPing(t, a.NS, r.String())
			}
		}
		wantPing(t, a.NS, gateway4, outside4, outside6)
		expect.Success(t, w.check(a))
	}
}

// In a VLAN, a chain by names leads where the reference's does.
func TestVLANsHostPortsByNameLeadWhereTheReferencesDo(t *testing.T) {
	t.Parallel()
	needVLANs(t)
	chain := []string{
		`{"type":"bridge","isGateway":true,"vlan":100,"ipam":{"type":"host-local","dataDir":"DATA/n","ranges":[[{"subnet":"10.5.0.0/24"}],[{"subnet":"fd05::/64"}]],"routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0"}]}}`,
		`{"type":"portmap","runtimeConfig":{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"},{"hostPort":5300,"containerPort":53,"protocol":"udp"}]}}`,
		`{"type":"firewall"}`,
	}
	without := []string{chain[0], `{"type":"portmap","runtimeConfig":{"portMappings":[]}}`, chain[2]}
	want := ""
	for _, ours := range [][]string{nil, byName()} {
		s := newSide(t, referenceDir(t), ours)
		nstest.Sysctl(t, s.ns, "net/bridge/bridge-nf-call-iptables", "0")
		nstest.Sysctl(t, s.ns, "net/bridge/bridge-nf-call-ip6tables", "0")
		nstest.Sysctl(t, s.ns, "net/ipv6/conf/default/accept_dad", "0")
		nstest.Sysctl(t, s.ns, "net/ipv4/ip_forward", "1")
		nstest.Sysctl(t, s.ns, "net/ipv6/conf/all/forwarding", "1")
		out := s.outside()
		s.chain("ADD", "a", chain)
		s.chain("ADD", "b", without)
		s.of("a").serve(t, "tcp", 80)
		s.of("a").serve(t, "udp", 53)
		got := s.fates(out, s.of("a"), s.of("b"))
		got, _, _ = strings.Cut(got, "another pod")
		if want == "" {
			want = got
			must.That(t, strings.Count(got, "seen as") >= 8, "the reference's leads to little:\n%s", got)
		}
		expect.Equal(t, cmp.Diff(want, got), "", "with %q, the reference's (-) and this one's (+)", ours)
		if ours != nil { // the reference's takes the bridge's MAC to be what it was before there was a port
			s.chain("CHECK", "a", chain)
		}
		s.chain("DEL", "a", chain)
		expect.Failure(t, expect.Err(askPort(t, out, "tcp", uplink4, 8080)), "with %q, a port leads somewhere after the DEL", ours)
		s.chain("DEL", "b", without)
	}
}

// A promiscuous bridge whose packets pass the firewall gives each packet to the host too.
func TestVLANGetsEachPacketOnce(t *testing.T) {
	t.Parallel()
	needVLANs(t)
	n := newNode(t)
	w := n.podnet(conf{"promiscMode": true, "vlan": 100, "bridgeNFCall": true})
	a, b := n.pod("a"), n.pod("b")
	w.add(a)
	rb := w.add(b)
	w.add(n.pod("c"))
	wantPing(t, a.NS, ip4(rb).String())
	ear := rawSocket(t, b.NS, "eth0")
	for _, token := range []string{"once----", "the-last"} {
		nstest.Run(t, a.NS, "bash", "-c", "echo "+token+" >/dev/udp/"+ip4(rb).String()+"/9")
		time.Sleep(20 * time.Millisecond)
	}
	buf, count := make([]byte, 2048), 0
	for {
		got := must.Of(unix.Read(ear, buf)).Get(t)
		if bytes.Contains(buf[:got], []byte("once----")) && buf[23] == unix.IPPROTO_UDP {
			count++
		}
		if bytes.Contains(buf[:got], []byte("the-last")) {
			break
		}
	}
	expect.Equal(t, count, 1, "a packet comes %d times", count)
}
