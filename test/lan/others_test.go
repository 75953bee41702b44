package lan

import (
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// A bridge that the system makes, with the NIC as its port, is used as it is.
func TestTheSystemsBridgeIsUsedAsItIs(t *testing.T) {
	t.Parallel()
	l, _ := newLab(t)
	n := l.network(nil)
	ip(t, l.host.ns, "link add "+bridge+" type bridge forward_delay 0")
	before := l.moved(nic)
	_, err := n.exec("tombolo", nil, nil, "uplink", "take", "--state", n.state, "--leases", n.leases, nic, bridge)
	wantError(t, "an empty bridge: take", err, "ip link delete "+bridge)
	ip(t, l.host.ns, "address add 10.77.0.1/24 dev "+bridge)
	_, err = n.verb("ADD", l.newPod("refused"))
	wantError(t, "a bridge of the host's: ADD", err, "has the host's address 10.77.0.1/24", "name another bridge")
	ip(t, l.host.ns, "address del 10.77.0.1/24 dev "+bridge)
	wantSame(t, "the host", before, l.moved(nic))

	l.moveToBridge()
	before = l.moved(bridge)
	n.wantStatus("")
	_, err = n.exec("tombolo", nil, nil, "uplink", "take", "--state", n.state, nic, bridge)
	wantError(t, "take", err, "networks use as it is")
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
	expect.That(t, n.isShared(), "tombolo uplink status says something else")
	l.hostTalks()
	n.check(a)
	l.ask(a.place, l.internet.ip4, servicePort, a.ip4)
}
