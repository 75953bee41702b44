package cni

import (
	"fmt"
	"net/netip"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// marks are those that other programs give packets, and single bits: ours among them.
func marks() map[int]uint32 {
	list := []uint32{
		0x1bd00, 0x1bd20, 0x1bd21, 0x1bd22, // NetBird
		0x40000, 0x80000, 0xff0000, // Tailscale
		0x4000, 0x8000, 0x2000, // kube-proxy, portmap
		0x100, 0x3f00, 0x80, 0xca6c, 0xffffffff, // mwan3, AWS, wg-quick
	}
	for bit := range 8 {
		list = append(list, 1<<bit)
	}
	ports := map[int]uint32{}
	for i, mark := range list {
		ports[7000+i] = mark
	}
	return ports
}

// A node that routes between a VPN and the world, and whose owner marks packets, does with them the same before the
// first ADD and after it.
func TestForeignPacketsLeaveAsBefore(t *testing.T) {
	n := parallelNode(t)
	world, vpn := n.outside(), nstest.New(t)
	nstest.Veth(t, n.ns, "wt0", vpn, "eth0")
	n.run("sh", "-ec", `ip address add 100.64.0.1/16 dev wt0; ip address add fd64::1/64 dev wt0 nodad
		echo 1 >/proc/sys/net/ipv4/ip_forward; echo 1 >/proc/sys/net/ipv6/conf/all/forwarding`)
	nstest.Run(t, vpn, "sh", "-ec", `ip address add 100.64.0.2/16 dev eth0; ip address add fd64::2/64 dev eth0 nodad
		ip route add default via 100.64.0.1; ip route add default via fd64::1`)
	nstest.Run(t, world, "sh", "-ec", "ip route add 100.64.0.0/16 via "+uplink4+"; ip route add fd64::/64 via "+uplink6)

	// By the port, each packet gets its mark: forwarded ones from a rule, the host's own from the socket. What the
	// rules of others see of it, exactly and by bit, is counted in each hook.
	var counters, before, rules strings.Builder
	for port, mark := range marks() {
		at := fmt.Sprintf("th dport %d", port)
		fmt.Fprintf(&before, "meta l4proto udp %s meta mark set 0x%x\n", at, mark)
		for _, hook := range []string{"forward", "postrouting"} {
			fmt.Fprintf(&counters, "counter exact%s%d {}\ncounter masked%s%d {}\n", hook, port, hook, port)
		}
		fmt.Fprintf(&counters, "counter nat%d {}\n", port)
	}
	for _, hook := range []string{"forward", "postrouting"} {
		for _, chain := range []struct{ name, priority string }{{"exact", "10"}, {"masked", "400"}} {
			fmt.Fprintf(&rules, "chain %s%s { type filter hook %s priority %s;\n", chain.name, hook, hook, chain.priority)
			for port, mark := range marks() {
				match := fmt.Sprintf("meta mark 0x%x", mark)
				if chain.name == "masked" {
					match = fmt.Sprintf("meta mark & 0x%x == 0x%x", mark, mark)
				}
				fmt.Fprintf(&rules, "meta l4proto udp th dport %d %s counter name %s%s%d\n", port, match, chain.name, hook, port)
			}
			rules.WriteString("}\n")
		}
	}
	rules.WriteString("chain nat { type nat hook postrouting priority srcnat;\n")
	for port, mark := range marks() {
		fmt.Fprintf(&rules, "meta l4proto udp th dport %d meta mark 0x%x counter name nat%d masquerade\n", port, mark, port)
	}
	rules.WriteString("}\n")
	n.nft("table inet owner { " + counters.String() + " chain before { type filter hook prerouting priority mangle;\n" + before.String() + "}\n" + rules.String() + "}")

	send := func(from *netns.NS, to string, marked bool) {
		for port, mark := range marks() {
			must.Succeed(t, from.Do(func() error { return sendMarked(netip.AddrPortFrom(nstest.Addr(to), uint16(port)), mark, marked) }))
		}
	}
	look := func() string {
		n.run("sh", "-c", "conntrack -F 2>/dev/null || true")
		n.run("nft", "reset", "counters")
		for _, to := range []string{outside4, outside6} {
			send(vpn, to, false)
			send(n.ns, to, true)
		}
		for _, to := range []string{"100.64.0.2", "fd64::2"} {
			send(world, to, false)
			send(n.ns, to, true)
		}
		wantPing(t, vpn, outside4, outside6) // the datagrams have passed
		wantPing(t, world, "100.64.0.2", "fd64::2")
		return regexp.MustCompile(` bytes \d+`).ReplaceAllString(n.run("nft", "list", "counters"), "")
	}
	look() // neighbours are known from here on
	want := look()
	must.That(t, strings.Count(want, "packets 8") > 0 && !strings.Contains(want, "packets 0"), "the rules see\n%s", want)

	w := n.podnet(conf{"ipMasq": true})
	w.add(n.pod("a"))
	expect.NoDiff(t, cmp.Diff(want, look()), "after the first ADD")

	// check names the rules that set our bit.
	o := n.operate("check", "--state", n.state)
	for _, mark := range []string{"0xff0000", "0x1bd21"} {
		expect.That(t, !strings.Contains(o.stdout, mark), "%s is named:\n%s", mark, o.stdout)
	}
	expect.Contains(t, o.stdout, "chain before of table inet owner sets bit 0x10 of the mark", "not named")
}

func sendMarked(to netip.AddrPort, mark uint32, marked bool) error {
	domain, dst := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()})
	if to.Addr().Is4() {
		domain, dst = unix.AF_INET, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if marked {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark)); err != nil {
			return err
		}
	}
	return unix.Sendto(fd, []byte("?"), 0, dst)
}

// C01: NetBird masquerades what its peers send by an exact mark.
func TestAPeerOfNetBirdKeepsItsWay(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	peer := nstest.New(t)
	nstest.Veth(t, n.ns, "wt0", peer, "eth0")
	n.run("sh", "-ec", "ip address add 100.64.0.1/16 dev wt0; echo 1 >/proc/sys/net/ipv4/ip_forward")
	nstest.Run(t, peer, "sh", "-ec", "ip address add 100.64.0.2/16 dev eth0; ip route add default via 100.64.0.1")
	n.nft(`table ip netbird {
		chain pre { type filter hook prerouting priority mangle; iifname "wt0" ct state new meta mark set 0x1bd21; }
		chain rtfwd { type filter hook forward priority filter; meta mark 0x1bd20 accept; iifname "wt0" ip protocol icmp accept; iifname "wt0" drop; }
		chain post { type nat hook postrouting priority srcnat; meta mark 0x1bd21 oifname != "lo" masquerade; }
	}`)
	for _, when := range []string{"before", "after"} {
		if when == "after" {
			n.podnet(conf{"ipMasq": true}).add(n.pod("a"))
		}
		err := nstest.PingWith(t, peer, nstest.Addr(outside4), nstest.Echo{Wait: time.Minute})
		expect.Success(t, err, "%s the first ADD", when)
	}
}

// programs lists what other programs do to close a link to a subnet of theirs, in lines for each family.
func programs() map[string]string {
	return map[string]string{
		"Docker": `TABLES -P FORWARD DROP
			TABLES -A FORWARD -o LINK -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
			TABLES -A FORWARD -i LINK ! -o LINK -j ACCEPT`,
		"Docker 28": `TABLES -P FORWARD DROP; TABLES -N DOCKER
			TABLES -A FORWARD -o LINK -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
			TABLES -A FORWARD -o LINK -j DOCKER; TABLES -A DOCKER ! -i LINK -o LINK -j DROP
			TABLES -A FORWARD -i LINK -j ACCEPT`,
		"podman, beside a policy": `TABLES -P FORWARD DROP; TABLES -N NETAVARK_FORWARD; TABLES -A FORWARD -j NETAVARK_FORWARD
			TABLES -A NETAVARK_FORWARD -d NET -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
			TABLES -A NETAVARK_FORWARD -s NET -j ACCEPT`,
		"libvirt": `TABLES -P FORWARD DROP; TABLES -N LIBVIRT_FWI; TABLES -N LIBVIRT_FWO
			TABLES -A FORWARD -j LIBVIRT_FWI; TABLES -A FORWARD -j LIBVIRT_FWO
			TABLES -A LIBVIRT_FWO -s NET -i LINK -j ACCEPT; TABLES -A LIBVIRT_FWO -i LINK -j REJECT
			TABLES -A LIBVIRT_FWI -d NET -o LINK -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT; TABLES -A LIBVIRT_FWI -o LINK -j REJECT`,
		"libvirt 10.4, by nftables": `nft 'table FAMILY libvirt_network {
			chain forward { type filter hook forward priority filter; jump guest_cross; jump guest_input; jump guest_output; }
			chain guest_cross { iif "LINK" oif "LINK" accept; }
			chain guest_input { oif "LINK" FAMILY daddr NET ct state established,related accept; oif "LINK" reject; }
			chain guest_output { FAMILY saddr NET iif "LINK" accept; iif "LINK" reject; }
			}'`,
		"LXD, beside a policy": `TABLES -P FORWARD DROP; TABLES -A FORWARD -i LINK -j ACCEPT
			TABLES -A FORWARD -o LINK -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT`,
		"a firewall that rejects the rest": `TABLES -A FORWARD -i LINK -j ACCEPT
			TABLES -A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT; TABLES -A FORWARD -j REJECT`,
	}
}

// What others closed stays closed for pods, and what pods need stays open.
func TestWhatOthersClosedStaysClosed(t *testing.T) {
	t.Parallel()
	for name, lines := range programs() {
		for _, kind := range []string{"bridge", "veth"} {
			nstest.RunParallel(t, name+", "+kind, func(t *testing.T) {
				n := newNode(t)
				world, container, office := n.outside(), n.closed(t, lines, kind), nstest.New(t)
				n.wantClosed(t, world, container, office)
			})
			nstest.RunParallel(t, name+", "+kind+", pods by the host's own bridge on the LAN", func(t *testing.T) {
				n := newNode(t)
				world, container := n.outside(), n.closed(t, lines, kind)
				n.run("sh", "-ec", "ip link add br0 up type bridge forward_delay 0; ip link set eth0 master br0; "+
					"ip address flush dev eth0 scope global; ip address add "+uplink4+"/24 dev br0; ip address add "+uplink6+"/64 dev br0 nodad; "+
					"ip route add default via "+outside4+"; ip -6 route replace default via "+outside6)
				n.wantClosedOnLAN(t, world, container)
			})
		}
	}
}

// Addresses of a container of another program.
const theirs4, theirs6 = "172.17.0.2", "fd17::2"

// closed gives the node a container behind a link of another program, which closes that link by lines.
func (n *node) closed(t *testing.T, lines, kind string) (container *netns.NS) {
	t.Helper()
	container = nstest.New(t)
	nstest.Veth(t, n.ns, "theirs", container, "eth0")
	link := "theirs"
	if kind == "bridge" {
		link = "docker0"
		n.run("sh", "-ec", "ip link add docker0 up type bridge; ip link set theirs master docker0; "+
			"ip address add 172.17.0.1/16 dev docker0; ip address add fd17::1/64 dev docker0 nodad")
	} else {
		n.run("sh", "-ec", "ip address add 172.17.0.1/32 dev theirs; ip address add fd17::1/128 dev theirs nodad; "+
			"ip route add 172.17.0.2 dev theirs; ip route add fd17::2 dev theirs")
	}
	nstest.Run(t, container, "sh", "-ec", `ip address add 172.17.0.2/16 dev eth0; ip address add fd17::2/64 dev eth0 nodad
		ip route add default via 172.17.0.1; ip route add default via fd17::1`)
	for family, net := range map[string]string{"ip": "172.17.0.0/16", "ip6": "fd17::/64"} {
		n.run("sh", "-ec", strings.NewReplacer("TABLES", family+"tables-nft", "FAMILY", family, "LINK", link, "NET", net).Replace(lines))
	}
	return container
}

// wantClosedOnLAN has the default routes of pods on the LAN lead to the node.
func (n *node) wantClosedOnLAN(t *testing.T, world, container *netns.NS) {
	t.Helper()
	const beyond4, beyond6 = "198.51.100.1", "2001:db8:51::1"
	nstest.Run(t, world, "sh", "-ec", "ip link set lo up; ip address add "+beyond4+"/32 dev lo; ip address add "+beyond6+"/128 dev lo")
	w := n.network("home", conf{
		"mode": "lan", "uplink": "eth0", "bridge": "br0", "defaultRoute": "host", "capabilities": conf{"portMappings": true},
		"ipam": conf{"type": "host-local", "ranges": []any{
			[]any{conf{"subnet": "192.0.2.0/24", "rangeStart": "192.0.2.100"}}, []any{conf{"subnet": "2001:db8::/64", "rangeStart": "2001:db8::100"}},
		}},
	})
	a := w.addPod("a", publish(t, "8080:80/tcp"))
	wantNoPing(t, a.NS, theirs4, theirs6)
	for _, at := range []string{theirs4, theirs6} {
		_, err := nstest.AskWithin(t, a.NS, "tcp", nstest.Serve(t, container, "tcp", netip.AddrPortFrom(nstest.Addr(at), 0)), 300*time.Millisecond)
		expect.Failure(t, err, "a port of %s that was never published", at)
	}
	wantPing(t, a.NS, outside4, outside6, beyond4, beyond6)

	// The container reaches a port that the pod publishes, and is answered.
	nstest.Serve(t, a.NS, "tcp", netip.MustParseAddrPort("0.0.0.0:80"))
	for from, at := range map[*netns.NS]string{world: uplink4, container: "172.17.0.1"} {
		_, err := nstest.AskWithin(t, from, "tcp", netip.AddrPortFrom(nstest.Addr(at), 8080), time.Minute)
		expect.Success(t, err, "a published port at %s", at)
	}
}

func (n *node) wantClosed(t *testing.T, world, container, office *netns.NS) {
	t.Helper()
	// An uplink that is a bridge leads to an office.
	nstest.Veth(t, n.ns, "wire", office, "eth0")
	n.run("sh", "-ec", `ip link add br-up up type bridge; ip link set wire master br-up; ip address add 10.99.0.1/24 dev br-up
		ip route add default via 10.99.0.2 metric 100; ip route add 10.98.0.1 via 10.99.0.2`)
	nstest.Run(t, office, "sh", "-ec", "ip address add 10.99.0.2/24 dev eth0; ip link set lo up; ip address add 10.98.0.1/32 dev lo")

	w := n.portnet(conf{"ipMasq": true})
	a, b := n.pod("a"), n.pod("b")
	w.add(a, publish(t, "8080:80/tcp"))
	n.network("othernet", conf{"bridge": "cbr1", "ipam": hostLocal("10.78.0.0/24", "fd78::/64")}).add(b)
	for _, p := range []*pod{a, b} {
		wantNoPing(t, p.NS, theirs4, theirs6)
		_, err := nstest.AskWithin(t, p.NS, "tcp", nstest.Serve(t, container, "tcp", netip.AddrPortFrom(nstest.Addr(theirs4), 0)), 300*time.Millisecond)
		expect.Failure(t, err, "a port that was never published")
	}
	wantPing(t, a.NS, outside4, outside6, "10.98.0.1", "10.78.0.2", "fd78::2")

	// The container reaches a port that a pod publishes, and is answered.
	nstest.Serve(t, a.NS, "tcp", netip.MustParseAddrPort("0.0.0.0:80"))
	for from, at := range map[*netns.NS]string{world: uplink4, container: "172.17.0.1"} {
		_, err := nstest.AskWithin(t, from, "tcp", netip.AddrPortFrom(nstest.Addr(at), 8080), time.Minute)
		expect.Success(t, err, "a published port at %s", at)
	}
}

// An accept in the host's nat chain keeps an address from portmap's rules, which come behind it. Host ports are in a chain
// of their own, so check says that they take it.
func TestCheckNamesWhatTheHostsNATChainKeeps(t *testing.T) {
	n := parallelNode(t)
	out := n.outside()
	w := n.portnet(nil)
	p := n.pod("a")
	p.serve(t, "tcp", 80)
	n.run("iptables", "-t", "nat", "-A", "PREROUTING", "-d", uplink4, "-j", "ACCEPT")
	check := func() string { return n.operate("check", "--state", n.state).stdout }
	const says = "chain PREROUTING of table ip nat accepts what goes to " + uplink4
	w.add(p)
	expect.That(t, !strings.Contains(check(), says), "check without host ports says it: %s", check())
	w.del(p)
	w.add(p, publish(t, "8080:80/tcp"))
	expect.Contains(t, check(), says)
	expect.Success(t, expect.Err(askPort(t, out, "tcp", uplink4, 8080)), "the port, which takes it all the same")
	n.run("iptables", "-t", "nat", "-F", "PREROUTING")
	expect.That(t, !strings.Contains(check(), says), "check without the rule says it: %s", check())
}
