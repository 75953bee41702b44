package share_test

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/share"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// lab is a LAN: a switch with a laptop and a host, whose NIC eth0 is shared by lan0 with two pods.
type lab struct {
	wire, laptop, host *netns.NS
	pods               []*netns.NS
	links              *bridge.Conn
	conn               *share.Conn
	firewall           *nft.Conn
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
	n.firewall = must.Of(nft.Dial(&nft.Config{NetNS: n.host})).Get(t)
	t.Cleanup(func() { n.firewall.Close() })
	return n
}

func (n *lab) address(t *testing.T, ns *netns.NS, host int) {
	t.Helper()
	nstest.Run(t, ns, "ip", "addr", "add", fmt.Sprintf("192.168.50.%d/24", host), "dev", "eth0")
	nstest.Run(t, ns, "ip", "addr", "add", fmt.Sprintf("fd50::%d/64", host), "dev", "eth0", "nodad")
}

// connect adds the pods and the rules at the NIC's hooks.
func (n *lab) connect(t *testing.T) {
	t.Helper()
	outer, port := share.Pair("lan0")
	pair := must.Of(n.links.Link(t.Context(), outer)).Get(t)
	nic := must.Of(n.links.Link(t.Context(), n.share.NIC)).Get(t)
	must.Of(n.firewall.Ensure(t.Context(), nft.Network{
		Name: "home", Bridge: "lan0", Share: &nft.Share{NIC: n.share.NIC, MAC: nic.MAC, Outer: pair.Index, Port: port},
	})).Get(t)
	for i, ns := range n.pods {
		pod := fmt.Sprint("pod", i)
		if _, err := n.links.Attach(t.Context(), ns, bridge.Port{Bridge: "lan0", Name: pod, Peer: "eth0"}); !errors.Is(err, fs.ErrExist) {
			must.Succeed(t, err)
			n.address(t, ns, 101+i)
		}
		mac := must.Of(net.ParseMAC(nstest.MAC(t, ns, "eth0"))).Get(t)
		must.Succeed(t, n.firewall.Replace(t.Context(), nft.Endpoint{
			Owner: nft.OwnerOf("home", pod, "eth0"), Network: "home", Bridge: "lan0", NIC: n.share.NIC, MAC: mac,
			Addrs: nstest.Addrs(fmt.Sprintf("192.168.50.%d", 101+i)),
		}))
	}
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
	expect.Equal(t, nstest.Run(t, n.host, "ip", "-o", "addr", "show", "dev", "lan0"), "", "addresses of the bridge")
	nic := must.Of(n.conn.Find(t.Context(), n.share)).Get(t)
	expect.That(t, must.Of(n.conn.Ready(t.Context(), n.share, nic)).Get(t) > 0, "it is not ready")

	must.Succeed(t, n.conn.Remove(t.Context(), n.share))
	must.Succeed(t, n.conn.Remove(t.Context(), n.share))
	must.Succeed(t, n.firewall.RemoveShare(t.Context(), "lan0"))
	expect.Equal(t, nstest.Run(t, n.host, "nft", "list tables netdev"), "", "tables of family netdev after RemoveShare")
	expect.Equal(t, nstest.Run(t, n.host, "ip", "addr", "show", "dev", "eth0"), before, "the NIC of the host after Remove")
	expect.Success(t, nstest.Ping(t, n.laptop, netip.MustParseAddr("192.168.50.2")), "from the laptop to the host")
}

func TestHostAndPodsGoOnWithoutACable(t *testing.T) {
	t.Parallel()
	n := newLab(t)
	must.Of(n.conn.Ensure(t.Context(), n.share)).Get(t)
	n.connect(t)
	nstest.Run(t, n.wire, "ip", "link", "set", "p1", "down")
	nstest.Reaches(t, n.laptop, "192.168.50.2", false) // the cable is out
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
		{"ip link set eth0 promisc off", "link eth0: promiscuous mode is off, should be on"},
		{"ip link set " + port + " nomaster", "link " + port + ": bridge is 0"},
		{"ip link set " + outer + " down", "link " + outer + ": link is down, should be up"},
		{"ip link set " + port + " group 0", "link " + port + ": group is 0"},
		{"ip link set " + port + " down", "link " + port + ": link is down, should be up"},
		{"ip link set " + outer + " mtu 1400", "link " + outer + ": MTU is 1400, should be 1500"},
		{"ip link set eth0 mtu 1420", "link " + port + ": MTU is 1500, should be 1420"},
		{"tc qdisc del dev " + port + " clsact", "program share"},
		{"ip link set eth0 address 02:00:00:00:00:77", "program is share"},
		{"ip link set lan0 arp on", "link lan0: ARP is on, should be off"},
	} {
		nstest.Run(t, n.host, "sh", "-c", change.command)
		found := fmt.Sprint(must.Of(n.conn.Check(t.Context(), n.share)).Get(t))
		expect.That(t, strings.Contains(found, change.want), "%s: Check finds %s", change.command, found)
		if !strings.Contains(change.command, "clsact") && !strings.Contains(change.command, "arp") {
			nic := must.Of(n.conn.Find(t.Context(), n.share)).Get(t)
			expect.Of(n.conn.Ready(t.Context(), n.share, nic)).Is(t, 0, change.command)
		}
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

func TestARenamedNICIsStillTheOne(t *testing.T) {
	t.Parallel()
	n := newLab(t)
	must.Of(n.conn.Ensure(t.Context(), n.share)).Get(t)
	nstest.Run(t, n.host, "sh", "-c", "ip link set eth0 down; ip link set eth0 name lan7 promisc off; ip link set lan7 up")
	expect.Of(n.conn.Ensure(t.Context(), n.share)).Is(t, true, "Ensure")
	nic := must.Of(n.conn.Find(t.Context(), n.share)).Get(t)
	expect.That(t, nic.Name == "lan7" && nic.Promiscuous, "the NIC is %+v", nic)
	must.Succeed(t, n.conn.Remove(t.Context(), n.share))
	nic = must.Of(n.links.Link(t.Context(), "lan7")).Get(t)
	expect.That(t, !nic.Promiscuous, "it is promiscuous after Remove")
}
