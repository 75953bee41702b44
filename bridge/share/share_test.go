package share_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/share"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// lab is a LAN: a switch with a laptop and a host, whose NIC eth0 is shared by lan0 with two pods.
type lab struct {
	wire, laptop, host *netns.NS
	pods               []*netns.NS
	links              *bridge.Conn
	conn               *share.Conn
	share              share.Share
}

func newLab(t *testing.T) *lab {
	t.Helper()
	n := &lab{
		wire: nstest.New(t), laptop: nstest.New(t), host: nstest.New(t), pods: []*netns.NS{nstest.New(t), nstest.New(t)},
		share: share.Share{NIC: "eth0", Bridge: "lan0", Alias: "test"},
	}
	nstest.Run(t, n.wire, "ip", "link", "add", "sw", "type", "bridge", "mcast_snooping", "0")
	nstest.Run(t, n.wire, "ip", "link", "set", "sw", "up")
	for i, ns := range []*netns.NS{n.laptop, n.host} {
		port := fmt.Sprint("p", i)
		nstest.Veth(t, n.wire, port, ns, "eth0")
		nstest.Run(t, n.wire, "ip", "link", "set", port, "master", "sw")
	}
	n.address(t, n.laptop, 9)
	n.address(t, n.host, 2)

	n.links = must.Of(bridge.Dial(n.host)).Get(t)
	t.Cleanup(func() { n.links.Close() })
	must.Of(n.links.Ensure(t.Context(), bridge.Bridge{Name: "lan0", Alias: "test", NoIPv6: true})).Get(t)
	n.conn = share.On(n.links.Socket())
	return n
}

func (n *lab) address(t *testing.T, ns *netns.NS, host int) {
	t.Helper()
	nstest.Run(t, ns, "ip", "addr", "add", fmt.Sprintf("192.168.50.%d/24", host), "dev", "eth0")
	nstest.Run(t, ns, "ip", "addr", "add", fmt.Sprintf("fd50::%d/64", host), "dev", "eth0", "nodad")
}

// connect adds the pods and the rules at the NIC's hooks, which are another package's.
func (n *lab) connect(t *testing.T) {
	t.Helper()
	var macs []string
	for i, ns := range n.pods {
		_, err := n.links.Attach(t.Context(), ns, bridge.Port{Bridge: "lan0", Name: fmt.Sprint("pod", i), Peer: "eth0"})
		must.Succeed(t, err)
		n.address(t, ns, 101+i)
		macs = append(macs, nstest.MAC(t, ns, "eth0"))
	}
	outer, port := share.Pair("lan0")
	rules := strings.NewReplacer("OUTER", outer, "PORT", port, "MACS", strings.Join(macs, ", ")).Replace(`
table netdev test {
	set pods { type ether_addr; elements = { MACS }; }
	chain in { type filter hook ingress device eth0 priority 0;
		ether saddr @pods accept
		ether daddr @pods fwd to OUTER
		meta pkttype { broadcast, multicast } dup to OUTER
	}
	chain out { type filter hook egress device eth0 priority 0;
		ether saddr @pods accept
		ether daddr @pods fwd to OUTER
		ether daddr & 01:00:00:00:00:00 == 01:00:00:00:00:00 dup to OUTER
	}
	chain guard { type filter hook egress device PORT priority 0;
		ether saddr != @pods ether daddr & 01:00:00:00:00:00 == 01:00:00:00:00:00 drop
	}
	chain mute { type filter hook ingress device lan0 priority 0;
		meta pkttype { broadcast, multicast } drop
	}
}`)
	nstest.Run(t, n.host, "nft", rules)
}

// reach fails for each pair of neighbours of which one does not get the other's answers.
func (n *lab) reach(t *testing.T, when string) {
	t.Helper()
	neighbours := map[*netns.NS]int{n.laptop: 9, n.host: 2, n.pods[0]: 101, n.pods[1]: 102}
	for from, own := range neighbours {
		for _, number := range neighbours {
			for _, to := range []string{fmt.Sprintf("192.168.50.%d", number), fmt.Sprintf("fd50::%d", number)} {
				if number != own {
					expect.Success(t, nstest.Ping(t, from, netip.MustParseAddr(to)), "%s: from %d to %s", when, own, to)
				}
			}
		}
	}
}

func TestHostLaptopAndPodsAreNeighbours(t *testing.T) {
	t.Parallel()
	n := newLab(t)
	before := nstest.Run(t, n.host, "ip", "addr", "show", "dev", "eth0")

	expect.Of(n.conn.Ensure(t.Context(), n.share)).Is(t, true, "the first Ensure")
	expect.Of(n.conn.Ensure(t.Context(), n.share)).Is(t, false, "the second Ensure")
	n.connect(t)
	n.reach(t, "made")

	after := nstest.Run(t, n.host, "ip", "addr", "show", "dev", "eth0")
	expect.Equal(t, strings.Replace(after, ",PROMISC", "", 1), before, "the NIC of the host")
	expect.Equal(t, nstest.Run(t, n.host, "ip", "addr", "show", "dev", "lan0", "scope", "global"), "", "addresses of the bridge")

	must.Succeed(t, n.conn.Remove(t.Context(), n.share))
	must.Succeed(t, n.conn.Remove(t.Context(), n.share))
	nstest.Run(t, n.host, "nft", "delete table netdev test")
	expect.Equal(t, nstest.Run(t, n.host, "ip", "addr", "show", "dev", "eth0"), before, "the NIC of the host after Remove")
	expect.Success(t, nstest.Ping(t, n.laptop, netip.MustParseAddr("192.168.50.2")), "from the laptop to the host")
}

func TestHostAndPodsGoOnWithoutACable(t *testing.T) {
	t.Parallel()
	n := newLab(t)
	must.Of(n.conn.Ensure(t.Context(), n.share)).Get(t)
	n.connect(t)
	nstest.Run(t, n.wire, "ip", "link", "set", "p1", "down")
	expect.Failure(t, nstest.Ping(t, n.laptop, netip.MustParseAddr("192.168.50.2")), "the cable is out")
	for _, to := range []string{"192.168.50.101", "fd50::101"} {
		expect.Success(t, nstest.Ping(t, n.host, netip.MustParseAddr(to)), "from the host to %s", to)
	}
	nstest.Run(t, n.wire, "ip", "link", "set", "p1", "up")
	n.reach(t, "the cable is in again")
}

// Each change is one of others that cuts pods off. Check says so, Ensure mends it, and Check is silent.
func TestWhatOthersChangeIsFoundAndMended(t *testing.T) {
	t.Parallel()
	n := newLab(t)
	must.Of(n.conn.Ensure(t.Context(), n.share)).Get(t)
	n.connect(t)
	outer, port := share.Pair("lan0")
	for _, change := range []struct{ command, want string }{
		{"ip link set eth0 promisc off", "link eth0: promiscuous is false, should be true"},
		{"ip link set " + port + " nomaster", "link " + port + ": bridge is 0"},
		{"ip link set " + outer + " down", "link " + outer + ": up is false"},
		{"ip link set " + port + " down", "link " + port + ": up is false"},
		{"ip link set " + outer + " mtu 1400", "link " + outer + ": MTU is 1400, should be 1500"},
		{"ip link set eth0 mtu 1420", "link " + port + ": MTU is 1500, should be 1420"},
		{"tc qdisc del dev " + outer + " clsact", "program share"},
		{"ip link set eth0 address 02:00:00:00:00:77", "program is share"},
		{"ip link set lan0 arp on", "link lan0: ARP is true"},
	} {
		nstest.Run(t, n.host, "sh", "-c", change.command)
		found := fmt.Sprint(must.Of(n.conn.Check(t.Context(), n.share)).Get(t))
		expect.That(t, strings.Contains(found, change.want), "%s: Check finds %s", change.command, found)
		expect.Of(n.conn.Ensure(t.Context(), n.share)).Is(t, true, "Ensure after %s", change.command)
		left := must.Of(n.conn.Check(t.Context(), n.share)).Get(t)
		expect.That(t, len(left) == 0, "%s: left after Ensure: %v", change.command, left)
		nstest.Run(t, n.host, "ip", "neigh", "flush", "all")
		for _, ns := range append(n.pods, n.laptop) {
			nstest.Run(t, ns, "ip", "neigh", "flush", "all")
		}
		n.reach(t, change.command)
	}
}
