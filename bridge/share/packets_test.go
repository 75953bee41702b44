package share_test

import (
	"encoding/binary"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// internet is an address that the host reaches by the laptop.
const internet = "203.0.113.1"

// routed makes the host the pods' router: with a bridge of another program, whose firewall drops what no rule accepts.
func (n *lab) routed(t *testing.T) (container *netns.NS) {
	t.Helper()
	container = nstest.New(t)
	nstest.Sysctl(t, n.host, "net/ipv4/ip_forward", "1")
	nstest.Run(t, n.laptop, "ip", "addr", "add", internet+"/32", "dev", "lo")
	nstest.Veth(t, n.host, "c1", container, "eth0")
	script(t, n.host,
		"ip link add docker0 type bridge", "ip addr add 172.17.0.1/16 dev docker0", "ip link set docker0 up", "ip link set c1 master docker0",
		"ip route add "+internet+" via 192.168.50.9",
		`nft 'table inet others {
			chain forward { type filter hook forward priority 0; policy drop; meta mark & 0x10 != 0 accept; ip saddr 172.17.0.2 accept; };
			chain last { type filter hook postrouting priority 400;
				ip saddr { 192.168.50.101, 192.168.50.102 } counter comment "of pods"
				ip saddr { 192.168.50.101, 192.168.50.102 } meta mark & 0x10 != 0 counter comment "of pods with a mark"
				ip saddr 192.168.50.9 meta mark & 0x10 != 0 counter comment "of others with a mark"
			};
		}'`)
	script(t, container, "ip addr add 172.17.0.2/16 dev eth0", "ip route add default via 172.17.0.1")
	nstest.Run(t, n.laptop, "ip", "route", "add", "172.17.0.0/16", "via", "192.168.50.2")
	for _, pod := range n.pods {
		script(t, pod, "ip neigh add 169.254.1.1 lladdr "+nstest.MAC(t, n.host, "eth0")+" dev eth0 nud permanent",
			"ip route add default via 169.254.1.1 dev eth0 onlink")
		nstest.Run(t, pod, "nft", `table inet heard { chain input { type filter hook input priority 0; icmp type redirect counter comment "redirects"; }; }`)
	}
	return container
}

func script(t *testing.T, ns *netns.NS, lines ...string) {
	t.Helper()
	nstest.Run(t, ns, "sh", "-ec", strings.Join(lines, "\n"))
}

// counted returns the packets of the counter with a comment.
func counted(t *testing.T, ns *netns.NS, comment string) int {
	t.Helper()
	found := regexp.MustCompile(`counter packets (\d+) bytes \d+ comment "` + comment + `"`).FindStringSubmatch(nstest.Run(t, ns, "nft", "list ruleset"))
	must.That(t, found != nil, "no counter of %q", comment)
	return must.Of(strconv.Atoi(found[1])).Get(t)
}

func TestHostRoutesForPodsByTheNICItShares(t *testing.T) {
	t.Parallel()
	n := newLab(t)
	must.Of(n.conn.Ensure(t.Context(), n.share)).Get(t)
	n.connect(t)
	n.routed(t)

	nstest.Reaches(t, n.pods[0], internet, true)
	expect.That(t, counted(t, n.host, "of pods") > 0, "the host has routed nothing for pods")
	expect.Equal(t, counted(t, n.host, "of pods with a mark"), 0, "packets that left with our bit")
	for _, ns := range []*netns.NS{n.pods[0], n.laptop} { // its owner has closed it
		nstest.Reaches(t, ns, "172.17.0.2", false)
	}

	// A packet of others keeps a bit that others set, and passes by it.
	nstest.Run(t, n.host, "nft", "add chain inet others first { type filter hook prerouting priority -150; }; add rule inet others first ip saddr 192.168.50.9 meta mark set 0x10")
	nstest.Reaches(t, n.laptop, "172.17.0.2", true)
	expect.That(t, counted(t, n.host, "of others with a mark") > 0, "another program's bit was cleared")

	// Of a connection's first packet the host sends no redirect, and of others few.
	nstest.Run(t, n.host, "nft", `table inet told { chain output { type filter hook output priority 0; icmp type redirect counter comment "redirects"; }; }`)
	server := netip.AddrPortFrom(netip.MustParseAddr(internet), 7)
	talk := nstest.NewTalk(t, "udp", n.laptop, server, n.pods[0], server)
	must.Until(t, "the host has sent redirects", func() bool { return counted(t, n.host, "redirects") > 1 })
	talk.Check(t)
	expect.Equal(t, counted(t, n.pods[0], "redirects"), 0, "redirects that reached the pod")
}

// A frame with the tag of a VLAN is the host's alone, and one with a priority alone reaches its addressee.
func TestTaggedFramesStayTheHosts(t *testing.T) {
	t.Parallel()
	n := newLab(t)
	must.Of(n.conn.Ensure(t.Context(), n.share)).Get(t)
	n.connect(t)
	for _, ns := range []*netns.NS{n.pods[0], n.host} {
		nstest.Run(t, ns, "nft", `table netdev heard { chain in { type filter hook ingress device eth0 priority -10;
			vlan id 10 counter comment "of VLAN 10"
		}; }
		table inet heard { chain input { type filter hook input priority 0; icmp type echo-request icmp id 77 counter comment "of VLAN 0"; }; }`)
	}
	laptop, group := must.Of(net.ParseMAC(nstest.MAC(t, n.laptop, "eth0"))).Get(t), net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	for ns, own := range map[*netns.NS]string{n.pods[0]: "192.168.50.101", n.host: "192.168.50.2"} {
		mac := must.Of(net.ParseMAC(nstest.MAC(t, ns, "eth0"))).Get(t)
		for _, to := range []net.HardwareAddr{mac, group} {
			nstest.SendFrame(t, n.laptop, tagged(to, laptop, 10, echo("192.168.50.9", own)))
		}
		nstest.SendFrame(t, n.laptop, tagged(mac, laptop, 0, echo("192.168.50.9", own)))
	}

	for name, ns := range map[string]*netns.NS{"the pod": n.pods[0], "the host": n.host} {
		must.Until(t, name+" hears the frame with a priority", func() bool { return counted(t, ns, "of VLAN 0") == 1 })
	}
	expect.Equal(t, counted(t, n.pods[0], "of VLAN 10"), 0, "frames of a VLAN in the pod")
	expect.Equal(t, counted(t, n.host, "of VLAN 10"), 4, "frames of a VLAN at the host, whose NIC hears those for others too")
}

func tagged(to, from net.HardwareAddr, id uint16, packet []byte) []byte {
	frame := append(append([]byte{}, to...), from...)
	frame = binary.BigEndian.AppendUint16(frame, unix.ETH_P_8021Q)
	frame = binary.BigEndian.AppendUint16(frame, 3<<13|id) // with a priority
	return append(binary.BigEndian.AppendUint16(frame, unix.ETH_P_IP), packet...)
}

// echo returns an echo request of ID 77.
func echo(from, to string) []byte {
	header := []byte{0x45, 0, 0, 28, 0, 0, 0, 0, 64, unix.IPPROTO_ICMP, 0, 0}
	header = append(append(header, netip.MustParseAddr(from).AsSlice()...), netip.MustParseAddr(to).AsSlice()...)
	message := []byte{8, 0, 0, 0, 0, 77, 0, 1}
	for _, part := range [][]byte{header, message} {
		at := 2
		if len(part) == 20 {
			at = 10
		}
		sum := uint32(0)
		for i := 0; i < len(part); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(part[i:]))
		}
		binary.BigEndian.PutUint16(part[at:], ^uint16(sum+sum>>16))
	}
	return append(header, message...)
}
