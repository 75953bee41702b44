package lan

import (
	"slices"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// Routes that cannot move, and whatever would cut the host off, are refused.
func TestPlanNamesWhatStaysOnTheNIC(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	n := l.network(nil)
	before := l.moved(nic)
	ip(t, l.host.ns, "nexthop add id 9 via "+otherIP4+" dev "+nic, "route add 203.0.113.0/24 nhid 9")
	n.wantRefused("the route to 203.0.113.0/24 goes by nexthop object 9, which stays on " + nic)
	ip(t, l.host.ns, "route del 203.0.113.0/24")
	ip(t, l.host.ns, "nexthop add id 10 via "+routerIP4+" dev "+nic, "route replace default nhid 10")
	n.wantRefused("the route to everywhere goes by nexthop object 10")
	ip(t, l.host.ns, "route replace default via "+routerIP4, "nexthop flush",
		"link add flannel.1 type vxlan id 1 local "+hostIP4+" dev "+nic+" dstport 8472 nolearning")
	n.wantRefused("flannel.1")
	ip(t, l.host.ns, "link delete flannel.1")
	wantSame(t, "the host", before, l.moved(nic))
}

// wantRefused fails the test unless plan and take refuse, with such words.
func (n *network) wantRefused(says ...string) {
	n.Helper()
	for _, command := range [][]string{{"plan", "--take"}, {"take"}} {
		_, err := n.exec("tombolo", nil, nil, slices.Concat([]string{"uplink"}, command, []string{"--state", n.state, nic, bridge})...)
		for _, text := range says {
			expect.That(n, err != nil && strings.Contains(err.Error(), text),
				"uplink %v: %v, want it refused, with %q", command, err, text)
		}
	}
	n.wantNoLink(bridge)
}

func TestRestoreNamesTheAddressThatTheBridgeHasNoMore(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	n := l.network(nil)
	n.operate("uplink take", nic, bridge)
	ip(t, l.host.ns, "address del "+hostIP4+"/24 dev "+bridge)
	_, err := n.exec("tombolo", nil, nil, "uplink", "restore", "--state", n.state, "--leases", n.leases, nic)
	want := "ip address add " + hostIP4 + "/24 dev " + nic
	expect.That(t, err != nil && strings.Contains(err.Error(), want), "restore: %v, want an error with %q", err, want)
	l.wantNoLink(bridge)
	expect.Success(t, nstest.Ping(t, l.other.ns, l.host.ip6), "the host's other address")
}

// A virtual machine's tap would be on a bridge that leads nowhere.
func TestABridgeKeepsItsUplinkForPortsOfOthers(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	n := l.network(plain(t, nil))
	tap := func() { ip(t, l.host.ns, "tuntap add vnet0 mode tap", "link set vnet0 master "+bridge+" up") }
	refused := func(command ...string) {
		t.Helper()
		_, err := n.exec("tombolo", nil, nil, append(command, "--state", n.state, "--leases", n.leases)...)
		const text = "bridge br0 has ports of other programs, which would no longer reach the LAN of eth0: vnet0: take them off first (ip link set vnet0 nomaster)"
		expect.That(t, err != nil && strings.Contains(err.Error(), text), "%v: %v", command, err)
		ip(t, l.host.ns, "link set vnet0 nomaster")
	}
	p := n.add(l.newPod("a"))
	tap()
	n.del(p)
	refused("remove", "home")
	n.operate("remove", "home")
	l.wantNoLink(bridge)

	n.operate("uplink take", nic, bridge)
	ip(t, l.host.ns, "link set vnet0 master "+bridge)
	refused("uplink", "restore", nic)
	n.operate("uplink restore", nic)
	expect.Success(t, nstest.Ping(t, l.other.ns, l.host.ip4), "the host")
}

// The plan of a share tries what the kernel has, and leaves nothing behind.
func TestPlanOfAShareSaysWhatIsMadeAndWhatCannotWork(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	n := l.network(nil)
	nstest.Sysctl(t, l.host.ns, "net/ipv4/ip_forward", "0")
	first := l.state()
	plan := func(nic string) (string, error) {
		return n.exec("tombolo", nil, nil, "uplink", "plan", "--state", n.state, nic, bridge)
	}
	said, err := plan(nic)
	expect.That(t, err == nil && strings.HasPrefix(said, "OK: ") && strings.Contains(said, "promiscuous") && strings.Contains(said, "net.ipv4.conf.*.forwarding"),
		"the plan: %s %v", said, err)
	for _, sysctl := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		nstest.Sysctl(t, l.host.ns, sysctl, "1")
	}
	_, err = n.exec("tombolo", nil, nil, "uplink", "plan", "--state", n.state, nic, nic)
	expect.That(t, err != nil && strings.Contains(err.Error(), "eth0 is no bridge"), "the plan with the NIC for a bridge: %v", err)
	said, err = plan(nic)
	expect.That(t, err == nil && !strings.Contains(said, "forwarding"), "the plan of a router: %s %v", said, err)
	for _, sysctl := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		nstest.Sysctl(t, l.host.ns, sysctl, "0")
	}
	wantSame(t, "the host after two plans", first, l.state())
	l.wantNoLink(bridge)
	expect.Equal(t, l.hostRun("nft", "list", "ruleset"), "", "rules after two plans")

	ip(t, l.host.ns, "link add link "+nic+" name mac0 type macvlan mode bridge")
	said, err = plan(nic)
	expect.That(t, err == nil && strings.Contains(said, "OK, but") && strings.Contains(said, "macvlan mac0 rests on "+nic), "the plan beside a macvlan: %s %v", said, err)
	for _, c := range []struct{ setUp, nic, says string }{
		{"", "mac0", "cannot carry other MACs"},
		{"link add other0 type bridge", "other0", "it is a bridge"},
		{"link add a0 type veth peer name a1\nlink set a0 master other0", "a0", `name that one ("bridge": "other0")`},
		{"tuntap add tun0 mode tun", "tun0", "it is no Ethernet link"},
		{"", "lo", "it is no Ethernet link"},
	} {
		ip(t, l.host.ns, strings.Split(c.setUp, "\n")...)
		_, err := plan(c.nic)
		expect.That(t, err != nil && strings.Contains(err.Error(), c.says), "the plan of %s: %v, want it refused, with %q", c.nic, err, c.says)
	}
	n.by = []string{"setpriv", "--bounding-set", "-bpf,-sys_admin"}
	_, err = plan(nic)
	expect.That(t, err != nil && strings.Contains(err.Error(), "CAP_BPF"), "the plan without bpf(2): %v", err)
}

// The bridge of a takeover has the host's addresses. Nothing may share the NIC with it, or delete it, before they are
// given back.
func TestATakenNICThatLeftItsBridgeIsOnlyGivenBack(t *testing.T) {
	t.Parallel()
	for name, harm := range map[string]string{"the NIC is no port": "link set " + nic + " nomaster", "the bridge is gone": "link del " + bridge} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newHost(t)
			n := l.network(plain(t, nil))
			n.operate("uplink take", nic, bridge)
			p := n.add(l.newPod("before"))
			ip(t, l.host.ns, harm)
			for what, err := range map[string]error{
				"ADD":  expect.Err(n.verb("ADD", l.newPod("meanwhile"))),
				"take": expect.Err(n.exec("tombolo", nil, nil, "uplink", "take", "--state", n.state, nic, bridge)),
			} {
				expect.That(t, err != nil && strings.Contains(err.Error(), "tombolo uplink restore "+nic), "%s: %v", what, err)
			}
			n.operate("uplink restore", nic)
			expect.Success(t, nstest.Ping(t, l.other.ns, l.host.ip4), "the host")
			n.del(p)
			after := n.add(l.newPod("after"))
			expect.Success(t, nstest.Ping(t, l.other.ns, after.ip4), "a pod that shares the NIC")
		})
	}
}
