package cni

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// surroundings are machines around a node, each on a link of its own of which the node is the router, or would be.
type surroundings struct {
	*node
	lan, vpn, vm *netns.NS // behind eth0, wg0 and the foreign bridge virbr1
}

// The network of each has a number; the machine's address ends in 2, and the node's in 1.
const lanNumber, vpnNumber, vmNumber, lateNumber = 92, 99, 98, 97

func machine4(number int) string { return fmt.Sprintf("10.%d.0.2", number) }
func machine6(number int) string { return fmt.Sprintf("fd%d::2", number) }

func surrounded(t *testing.T) *surroundings {
	t.Helper()
	s := &surroundings{node: newNode(t)}
	// A new namespace has these from the machine's first one, which may be any host.
	for _, path := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		nstest.Sysctl(t, s.ns, "net/"+path, "1")
		nstest.Sysctl(t, s.ns, "net/"+path, "0")
	}
	s.ip("link add virbr1 type bridge")
	s.ip("link set virbr1 up")
	s.lan, s.vpn = s.machine("eth0", lanNumber), s.machine("wg0", vpnNumber)
	s.vm = nstest.New(t)
	nstest.Veth(t, s.ns, "vnet0", s.vm, "eth0")
	s.ip("link set vnet0 master virbr1")
	s.address("virbr1", s.vm, vmNumber)
	return s
}

// machine adds one on a link of its own.
func (s *surroundings) machine(link string, number int) *netns.NS {
	s.Helper()
	ns := nstest.New(s)
	nstest.Veth(s, s.ns, link, ns, "eth0")
	s.address(link, ns, number)
	return ns
}

func (s *surroundings) address(link string, ns *netns.NS, number int) {
	s.Helper()
	s.ip(fmt.Sprintf("address add 10.%d.0.1/24 dev %s", number, link))
	s.ip(fmt.Sprintf("address add fd%d::1/64 dev %s nodad", number, link))
	s.ip(fmt.Sprintf("address add fe80::%d:1/64 dev %s nodad", number, link))
	for _, args := range []string{"address add %s/24 dev eth0", "address add %s/64 dev eth0 nodad", "route add default via 10.%d.0.1", "-6 route add default via fd%d::1"} {
		value := any(number)
		switch {
		case strings.Contains(args, "nodad"):
			value = machine6(number)
		case strings.Contains(args, "%s"):
			value = machine4(number)
		}
		nstest.Run(s, ns, "ip", strings.Fields(fmt.Sprintf(args, value))...)
	}
}

// wantPaths pings, in both families, each pair of machines that the node would have to forward between.
func (s *surroundings) wantPaths(when string, open bool) {
	s.Helper()
	for name, path := range map[string]struct {
		from *netns.NS
		to   int
	}{"LAN to VPN": {s.lan, vpnNumber}, "LAN to another bridge": {s.lan, vmNumber}, "VPN to LAN": {s.vpn, lanNumber}, "another bridge to VPN": {s.vm, vpnNumber}} {
		for _, to := range []string{machine4(path.to), machine6(path.to)} {
			if !open && when != "before" && strings.Contains(to, ":") && !forwardsIPv6ByLink() {
				continue // open to all, as docs/operating.md says
			}
			if !open {
				expect.Failure(s, nstest.PingWith(s, path.from, nstest.Addr(to), nstest.Echo{Wait: 150 * time.Millisecond}), "%s: %s (%s)", when, name, to)
				continue
			}
			expect.Success(s, nstest.PingWith(s, path.from, nstest.Addr(to), nstest.Echo{Wait: patience}), "%s: %s (%s)", when, name, to)
		}
	}
}

// turn does what Docker, libvirt or an operator does.
func (s *surroundings) turn(on string) {
	s.Helper()
	for _, path := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		nstest.Sysctl(s, s.ns, "net/"+path, on)
	}
}

// forwarding lists what the node's links forward.
func (s *surroundings) forwarding() string {
	s.Helper()
	return s.run("sh", "-c", "grep -s . /proc/sys/net/ipv4/conf/*/forwarding /proc/sys/net/ipv6/conf/*/*forwarding")
}

func (s *surroundings) closed() bool {
	return strings.Contains(s.run("nft", "list", "ruleset"), "pods-only")
}

func TestAHostThatIsNoRouterForwardsForPodsOnly(t *testing.T) {
	for name, kept := range map[string]bool{"with tombolod": true, "without": false} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			s := surrounded(t)
			s.wantPaths("before", false)
			before := s.forwarding()
			w, p := s.portnet(nil), s.pod("a")
			r := w.add(p, publish(t, "8080:80/tcp"))
			if kept {
				s.mind(t)
			}
			for _, address := range []netip.Addr{ip4(r), ip6(r)} {
				nstest.Serve(t, p.NS, "tcp", netip.AddrPortFrom(address, 80))
			}
			podsReach := func(when string, numbers ...int) {
				t.Helper()
				for _, number := range append(numbers, lanNumber, vpnNumber, vmNumber) {
					wantPing(t, p.NS, machine4(number), machine6(number))
				}
				// The LAN has a route to pods, as other nodes of a cluster do.
				wantPing(t, s.lan, ip4(r).String(), ip6(r).String())
				for _, address := range []string{"10.92.0.1", "fd92::1"} {
					_, err := nstest.Ask(t, s.lan, "tcp", netip.AddrPortFrom(nstest.Addr(address), 8080))
					expect.Success(t, err, "%s: a published port", when)
				}
			}
			settled := func(when string, open bool) {
				t.Helper()
				if kept {
					must.Until(t, "tombolod notices: "+when, func() bool { return s.closed() != open })
				} else {
					other := s.pod(strings.ReplaceAll(when, " ", "-"))
					w.add(other)
					w.del(other)
				}
				s.wantPaths(when, open)
				podsReach(when)
				said := s.operate("status", "--state", s.state, "--leases", s.state+"-leases").stdout
				expect.That(t, strings.Contains(said, "IPv4: the host is a router") == open && strings.Contains(said, "IPv4: the host forwards for its pods only") != open,
					"%s: status says\n%s", when, said)
			}
			podsReach("at first")
			s.wantPaths("with a pod", false)
			late := s.machine("late0", lateNumber)
			podsReach("by a later link", lateNumber)
			wantNoPing(t, late, machine4(vpnNumber))
			expect.Equal(t, nstest.Sysctl(t, s.ns, "net/ipv4/ip_forward"), "0", "ip_forward is")
			expect.Equal(t, nstest.Sysctl(t, s.ns, "net/ipv6/conf/all/forwarding") == "0", forwardsIPv6ByLink(), "the switch of IPv6 is off")
			s.turn("1")
			settled("turned on", true)
			s.turn("0")
			settled("turned off again", false)
			w.del(p)
			s.ip("link del late0")
			expect.Equal(t, s.remove(w.name).status, 0, "tombolo remove")
			s.wantPaths("after remove", false)
			if forwardsIPv6ByLink() {
				expect.Equal(t, s.forwarding(), before, "the parameters after remove are")
			}
		})
	}
}

// Once the owner makes the host a router, the next call of any kind but DEL opens it, and none blames a pod.
func TestARuleForPodsOnlyDoesNotOutliveItsReason(t *testing.T) {
	type call func(t *testing.T, s *surroundings, w *network, p *pod)
	check := func(t *testing.T, _ *surroundings, w *network, p *pod) { expect.Success(t, w.check(p), "CHECK") }
	repair := func(t *testing.T, s *surroundings, w *network, p *pod) {
		w.del(p)
		s.turn("1")
		wantNoPing(t, s.lan, machine4(vpnNumber))
		expect.Contains(t, s.operate("check", "--state", s.state).stdout, "forwards for others (net.ipv4.ip_forward")
		expect.Success(t, s.operate("repair", "--state", s.state).err(), "repair")
	}
	for name, tt := range map[string]struct {
		turn func(s *surroundings)
		call call
	}{
		"CHECK":                {func(s *surroundings) { s.turn("1") }, check},
		"CHECK, of IPv4 alone": {func(s *surroundings) { nstest.Sysctl(s, s.ns, "net/ipv4/ip_forward", "1") }, check},
		"CHECK, of one link": {func(s *surroundings) {
			s.run("sh", "-ec", "cd /proc/sys/net/ipv4/conf; echo 1 >eth0/forwarding; echo 1 >wg0/forwarding")
		}, check},
		"STATUS":                 {func(s *surroundings) { s.turn("1") }, func(t *testing.T, _ *surroundings, w *network, _ *pod) { expect.Success(t, w.status()) }},
		"repair, without pods":   {func(*surroundings) {}, repair},
		"tombolod, without pods": {func(*surroundings) {}, func(t *testing.T, s *surroundings, w *network, p *pod) { s.mind(t); w.del(p); s.turn("1") }},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			s := surrounded(t)
			w, p := s.portnet(nil), s.pod("a")
			w.add(p)
			wantNoPing(t, s.lan, machine4(vpnNumber))
			tt.turn(s)
			tt.call(t, s, w, p)
			wantPing(t, s.lan, machine4(vpnNumber))
			wantPing(t, s.vpn, machine4(lanNumber))
			if strings.Contains(name, "alone") && forwardsIPv6ByLink() {
				wantNoPing(t, s.lan, machine6(vpnNumber))
			}
		})
	}
}

// Whoever had the host or single links of it forward before finds all as it was.
func TestForwardingOfOthersStaysAsItIs(t *testing.T) {
	for name, tt := range map[string]struct {
		before string // lines for a shell
		open   bool   // all paths are, else only those between LAN and VPN
	}{
		"a router": {"sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1", true},
		"a router of two links": {`cd /proc/sys/net
			echo 1 >ipv4/conf/eth0/forwarding; echo 1 >ipv4/conf/wg0/forwarding
			echo 1 >ipv6/conf/eth0/force_forwarding; echo 1 >ipv6/conf/wg0/force_forwarding`, false},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			s := surrounded(t)
			s.run("sh", "-ec", tt.before)
			paths := func(when string) {
				t.Helper()
				if tt.open {
					s.wantPaths(when, true)
					return
				}
				wantPing(t, s.lan, machine4(vpnNumber), machine6(vpnNumber))
				wantPing(t, s.vpn, machine4(lanNumber), machine6(lanNumber))
				wantNoPing(t, s.vm, machine4(vpnNumber), machine6(vpnNumber))
			}
			paths("before")
			before := s.forwarding()
			w, p := s.podnet(nil), s.pod("a")
			w.add(p)
			for _, then := range []string{"true", "nft flush ruleset"} {
				s.run("sh", "-ec", then)
				s.operate("repair", "--state", s.state)
				paths("after " + then)
				wantPing(t, p.NS, machine4(vpnNumber), machine6(vmNumber))
			}
			expect.Equal(t, s.closed(), !tt.open, "a rule closes the host")
			w.del(p)
			expect.Equal(t, s.remove(w.name).status, 0, "tombolo remove")
			expect.Equal(t, s.forwarding(), before, "the parameters are")
			paths("after remove")
		})
	}
}

// A link that its owner has forward only later does so too.
func TestALinkThatIsMadeARouterLaterBecomesOne(t *testing.T) {
	t.Parallel()
	s := surrounded(t)
	s.podnet(nil).add(s.pod("a"))
	s.mind(t)
	wantNoPing(t, s.lan, machine4(vpnNumber))
	for _, link := range []string{"eth0", "wg0"} {
		nstest.Sysctl(t, s.ns, "net/ipv4/conf/"+link+"/forwarding", "1")
	}
	wantPing(t, s.lan, machine4(vpnNumber))
	wantNoPing(t, s.vm, machine4(vpnNumber))
}

// Frames that another program's bridge forwards pass our rules where br_netfilter shows them to iptables.
func TestBridgesOfOthersGoOnForwardingFrames(t *testing.T) {
	t.Parallel()
	s := surrounded(t)
	for _, family := range []string{"ip", "ip6"} {
		nstest.Sysctl(t, s.ns, "net/bridge/bridge-nf-call-"+family+"tables", "1")
	}
	s.ip("route add default via " + machine4(lanNumber))
	s.ip("-6 route add default via " + machine6(lanNumber))
	s.ip("link add quiet type bridge")
	s.ip("link set quiet up")
	for bridge, addresses := range map[string][]string{"virbr1": {"10.98.0.3/24", "fd98::3/64"}, "quiet": {"10.96.0.2/24", "fd96::2/64"}} {
		ns := nstest.New(t)
		nstest.Veth(t, s.ns, "m-"+bridge, ns, "eth0")
		s.ip("link set m-" + bridge + " master " + bridge)
		for _, a := range addresses {
			nstest.Run(t, ns, "sh", "-c", "ip address add "+a+" dev eth0 nodad 2>/dev/null || ip address add "+a+" dev eth0")
		}
	}
	other := nstest.New(t)
	nstest.Veth(t, s.ns, "m-other", other, "eth0")
	s.ip("link set m-other master quiet")
	nstest.Run(t, other, "ip", "address", "add", "10.96.0.3/24", "dev", "eth0")
	nstest.Run(t, other, "ip", "address", "add", "fd96::3/64", "dev", "eth0", "nodad")
	for _, when := range []string{"before", "after"} {
		wantPing(t, s.vm, "10.98.0.3", "fd98::3")
		wantPing(t, other, "10.96.0.2", "fd96::2")
		if when == "before" {
			s.podnet(nil).add(s.pod("a"))
			must.That(t, s.closed(), "no rule closes the host")
		}
	}
	// The host has a route from one bridge to another, and is no router.
	s.ip("address add 10.96.0.1/24 dev quiet")
	nstest.Run(t, other, "ip", "route", "add", "default", "via", "10.96.0.1")
	wantPing(t, other, "10.96.0.1", "10.98.0.1")
	wantNoPing(t, other, machine4(vmNumber))
}

// readOnly has the node's programs see /proc/sys read-only, as a container's do that is not privileged.
func (n *node) readOnly() {
	n.within("mount --bind /proc/sys /proc/sys && mount -o remount,ro,bind /proc/sys")
}

// within has the node's programs run in a mount namespace of their own, after a script.
func (n *node) within(script string) {
	n.by = []string{"unshare", "-m", "sh", "-ec", script + ` && exec "$@"`, "sh"}
}

// presets are the parameters of the host that an ADD with all features writes.
func presets() []string {
	return []string{"net/ipv4/ip_forward=1", "net/ipv6/conf/all/forwarding=1", "net/ipv6/conf/default/accept_ra=0", "net/ipv6/conf/default/drop_unicast_in_l2_multicast=1", "net/ipv4/conf/default/route_localnet=1"}
}

func TestReadOnlyParametersWithTheRightValuesAreEnough(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	for _, one := range presets() {
		n.run("sysctl", "-qw", one)
	}
	n.readOnly()
	w := n.portnet(nil)
	p, q := n.pod("a"), n.pod("b")
	r := w.add(p, publish(t, "8080:80/tcp"))
	expect.Success(t, w.check(p))
	wantPing(t, p.NS, outside4, outside6)
	p.serve(t, "tcp", 80)
	expect.Success(t, expect.Err(askPort(t, n.ns, "tcp", "127.0.0.1", 8080)))
	expect.Success(t, w.status())
	o := n.operate("check", "--state", n.state)
	expect.That(t, o.status == 0, "check: %+v", o)
	w.add(q)
	wantPing(t, q.NS, ip4(r).String())
	w.del(p)
	w.del(q)
	n.wantNothing()

	// In the chain by the reference's names, tuning sets what is set.
	n.searchAlso(newSide(t, referenceDir(t), []string{"tuning"}).programs)
	tuned := w.with(conf{"capabilities": nil})
	tuned.after = []conf{{"type": "tuning", "stateDir": n.state, "sysctl": conf{"net.ipv4.conf.all.rp_filter": nstest.Sysctl(t, p.NS, "net/ipv4/conf/all/rp_filter")}}}
	tuned.add(p)
	tuned.after[0]["sysctl"] = conf{"net.ipv4.conf.all.log_martians": "1"}
	wantError(t, expect.Err(tuned.tryAdd(q)), 110, "/proc/sys/net/ipv4/conf/all/log_martians: read-only file system: it is 0")
}

// The first pod came while /proc/sys could be written.
func TestAPodIsAddedAfterProcSysBecameReadOnly(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.podnet(nil)
	p, q := n.pod("a"), n.pod("b")
	w.add(p)
	n.readOnly()
	r := w.add(q)
	wantPing(t, p.NS, outside4, ip4(r).String())
	wantPing(t, q.NS, outside4, outside6)
	w.del(p)
	w.del(q)
	n.wantNothing()
}

func TestAReadOnlyParameterIsNamedWithItsRemedy(t *testing.T) {
	t.Parallel()
	written := map[string]string{ // in place of the host's own switches
		"net/ipv4/ip_forward=1":             "net/ipv4/conf/default/forwarding=116",
		"net/ipv6/conf/all/forwarding=1":    "net/ipv6/conf/default/force_forwarding=1",
		"net/ipv6/conf/default/accept_ra=0": "net/ipv6/conf/cbr0/accept_ra=0",
	}
	for _, without := range presets()[:3] {
		nstest.RunParallel(t, without, func(t *testing.T) {
			n := newNode(t)
			for _, one := range presets() {
				if one != without {
					n.run("sysctl", "-qw", one)
				}
			}
			n.readOnly()
			w, p := n.podnet(nil), n.pod("a")
			_, err := w.tryAdd(p)
			path, value, _ := strings.Cut(written[without], "=")
			for _, says := range []string{"write " + value + " to /proc/sys/" + path + ": read-only file system: it is ", "privileged", "ProtectKernelTunables", "conf/default"} {
				wantError(t, err, 110, says)
			}
			n.wantNothing()
			// As the remedy says: the link is made anew.
			n.run("ip", "link", "del", "cbr0")
			n.run("sysctl", "-qw", without)
			w.add(p)
		})
	}
}

// A kernel without IPv6 has no net.ipv6. test/vm/run.sh noipv6 boots one.
func TestARouteOfIPv6NeedsAKernelThatHasIt(t *testing.T) {
	t.Parallel()
	for name, ipam := range map[string]conf{
		"host-local": {"type": "host-local", "subnet": subnet4, "routes": []conf{{"dst": "0.0.0.0/0"}, {"dst": "::/0"}}},
		"static":     {"type": "static", "addresses": []conf{{"address": "10.77.0.9/24", "gateway": gateway4}}, "routes": []conf{{"dst": "fd99::/16", "gw": "fd77::1"}}},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			w := n.podnet(conf{"ipam": hostLocal(subnet4)})
			w.add(n.pod("built"))
			if nstest.HasIPv6() {
				n.within("mount -t tmpfs none /proc/sys/net/ipv6")
			}
			before := n.traces()
			_, err := w.with(conf{"ipam": ipam}).tryAdd(n.pod("a"))
			wantError(t, err, 7, refusal)
			wantError(t, err, 7, `network "podnet" asks for a route to `)
			n.wantTraces(before)
		})
	}
}
