package lan

import (
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// A second NIC of the host's on the same LAN, as a laptop's Wi-Fi, is tried after the bridge as it was after the NIC.
func TestSecondNICOnTheLANStaysSecond(t *testing.T) {
	for name, older := range map[string]bool{"older": true, "newer": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLAN(t)
			l.dnsmasq()
			l.serve(l.internet, servicePort, 4)
			second := func() {
				ip(t, l.host.ns, "address add "+second4+"/24 brd + dev eth1 valid_lft 3600 preferred_lft 3600 metric 600",
					"route add default via "+routerIP4+" dev eth1 proto dhcp src "+second4+" metric 600")
			}
			l.plugAs("eth1", l.host.ns)
			if older {
				second()
			}
			l.plug(l.host.ns)
			l.followsRouter()
			l.udhcpc()
			// As systemd-networkd and NetworkManager give it.
			first := l.host.ip4.String()
			ip(t, l.host.ns, "address flush dev "+nic+" scope global", "address add "+first+"/24 brd + dev "+nic+" valid_lft 3600 preferred_lft 3600 metric 100",
				"route add default via "+routerIP4+" dev "+nic+" proto dhcp src "+first+" metric 100")
			if !older {
				second()
			}
			before := l.hostRun("ip", "-4", "route")
			n := l.network(nil)
			want := func(when, link string) {
				t.Helper()
				want := strings.ReplaceAll(before, "dev "+nic, "dev "+link)
				expect.Equal(t, l.hostRun("ip", "-4", "route"), want, "%s: routes", when)
				l.ask(l.host, l.internet.ip4, servicePort, l.host.ip4)
			}
			want("before", nic)
			n.wantPlan("default via " + routerIP4 + " dev " + bridge)
			n.operate("uplink take", nic, bridge)
			want("taken", bridge)
			a := n.add(l.newPod("a"))
			l.ask(a.place, l.internet.ip4, servicePort, a.ip4)
			n.del(a)
			n.operate("uplink restore", nic)
			want("given back", nic)

			ip(t, l.host.ns, "address flush dev eth1 scope global", "address add "+second4+"/24 dev eth1 metric 100")
			n.wantRefused("give one of the two another metric")
		})
	}
}

// A bridge that the system makes, with the NIC as its port, is used as it is.
func TestTheSystemsBridgeIsUsedAsItIs(t *testing.T) {
	t.Parallel()
	l, _ := newLab(t)
	n := l.network(nil)
	ip(t, l.host.ns, "link add "+bridge+" type bridge forward_delay 0")
	before := l.moved(nic)
	for _, command := range []string{"plan", "take"} {
		_, err := n.exec("tombolo", nil, nil, "uplink", command, "--state", n.state, "--leases", n.leases, nic, bridge)
		wantError(t, "an empty bridge: "+command, err, "ip link delete "+bridge)
	}
	_, err := n.verb("ADD", l.newPod("refused"))
	wantError(t, "an empty bridge: ADD", err, "ip link delete "+bridge)
	wantSame(t, "the host", before, l.moved(nic))

	l.moveToBridge()
	before = l.moved(bridge)
	n.wantStatus("")
	_, err = n.exec("tombolo", nil, nil, "uplink", "plan", "--state", n.state, nic, bridge)
	wantError(t, "plan", err, "networks use as it is")
	n.operate("uplink take", nic, bridge)
	a := n.add(l.newPod("a"))
	l.ask(a.place, l.internet.ip4, servicePort, a.ip4)
	l.hostTalks()
	n.check(a)
	n.del(a)
	n.wantNoFile("uplinks/" + nic + ".json")
	n.operate("remove", "home")
	wantSame(t, "the bridge", before, l.moved(bridge))
	l.hostTalks()
	_, err = l.network(object{"bridge": "br1"}).verb("ADD", l.newPod("b"))
	wantError(t, "another bridge", err, "a port of bridge "+bridge+" already", "name that one")
}

// moveToBridge has the host on the LAN by a bridge of its own, whose port is the NIC.
func (l *lan) moveToBridge() {
	l.Helper()
	nstest.Sysctl(l, l.host.ns, "net/ipv6/conf/"+bridge+"/accept_ra", "0")
	ip(l, l.host.ns, "link set "+nic+" master "+bridge, "address flush dev "+nic+" scope global", "-6 route del default dev "+nic, "link set "+bridge+" up",
		"address add "+hostIP4+"/24 brd + dev "+bridge, "address add "+hostIP6+"/64 dev "+bridge)
	defaultRoutes(l, l.host.ns)
	l.ready(l.host.ns)
}

func wantError(t testing.TB, what string, err error, says ...string) {
	t.Helper()
	for _, text := range says {
		expect.That(t, err != nil && strings.Contains(err.Error(), text),
			"%s: %v, want an error with %q", what, err, text)
	}
}

// A bridge that somebody renamed still has the host's addresses: another beside it would cut the host off.
func TestBridgeThatWasRenamedIsToBeNamedBack(t *testing.T) {
	t.Parallel()
	l, _ := newLab(t)
	n := l.network(nil)
	a := n.add(l.newPod("a"))
	rename := func(from, to string) {
		ip(t, l.host.ns, "link set "+from+" down", "link set "+from+" name "+to, "link set "+to+" up")
	}
	repair := func() error {
		_, err := n.exec("tombolo", nil, nil, "repair", "--state", n.state, "--leases", n.leases)
		return err
	}
	rename(bridge, "lan0")
	const says = "ip link set lan0 name " + bridge
	wantError(t, "repair", repair(), says)
	_, err := n.verb("ADD", l.newPod("b"))
	wantError(t, "ADD", err, says)
	rename("lan0", bridge)
	if err := repair(); err != nil && !strings.Contains(err.Error(), "start tombolod") {
		t.Error(err)
	}
	out, fine := n.uplinkStatus()
	expect.That(t, fine, "%v", out)
	l.hostTalks()
	n.check(a)
	l.ask(a.place, l.internet.ip4, servicePort, a.ip4)
}
