package nft

import (
	"fmt"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// The host listens with a packet socket on the bridge, as DHCP clients do. Another pod gets the same broadcasts from any
// port, and so does the host from one that is not in GatewayGroup.
func TestGatewaysTakeNothingFromServersAmongPods(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	ipv4 := func(to string, packet []byte) []byte { return ether(to, podMAC, unix.ETH_P_IP, packet) }
	ipv6 := func(to string, packet []byte) []byte { return ether(to, podMAC, unix.ETH_P_IPV6, packet) }
	offer := packet4(pod4, "255.255.255.255", 0, unix.IPPROTO_UDP, datagram(67, 68))
	reply6 := packet6(podLocal, allNodes, unix.IPPROTO_UDP, udp(podLocal, allNodes, 546, "reply"))
	redirect := join([]byte{5, 1}, checksum(join([]byte{5, 1, 0, 0}, ip(pod4), offer[:28]), 0), ip(pod4), offer[:28])
	servers := []namedFrame{
		{"DHCP", ipv4(broadcastMAC, offer)},
		{"DHCP to the host", ipv4(bridgeMAC, packet4(pod4, bridge4, 0, unix.IPPROTO_UDP, datagram(67, 68)))},
		{"DHCP from another port", ipv4(broadcastMAC, packet4(pod4, "255.255.255.255", 0, unix.IPPROTO_UDP, datagram(4000, 68)))},
		{"DHCP, a first fragment", ipv4(broadcastMAC, packet4(pod4, "255.255.255.255", 0x2000, unix.IPPROTO_UDP, datagram(67, 68)))},
		{"DHCP in a VLAN", ether(broadcastMAC, podMAC, unix.ETH_P_8021Q, be16(5), be16(unix.ETH_P_IP), offer)},
		{"DHCP of a false length", ipv4(broadcastMAC, with(offer, 2, be16(1000)...))},
		{"DHCPv6", ipv6(allNodesMAC, reply6)},
		{"a router advertisement", ipv6(allNodesMAC, advertisement(podLocal))},
		{"a router advertisement in a VLAN", ether(allNodesMAC, podMAC, unix.ETH_P_8021Q, be16(5), be16(unix.ETH_P_IPV6), advertisement(podLocal))},
		{"a redirect", ipv4(broadcastMAC, packet4(pod4, bridge4, 0, unix.IPPROTO_ICMP, redirect))},
		{"an advertisement of ICMP", ipv4(broadcastMAC, packet4(pod4, bridge4, 0, unix.IPPROTO_ICMP, with(redirect, 0, 9)))},
		{"an IPv6 redirect", ipv6(allNodesMAC, packet6(podLocal, allNodes, unix.IPPROTO_ICMPV6, icmp6(podLocal, allNodes, redirectMessage, make([]byte, 36))))},
	}
	others := []namedFrame{
		{"DHCP of a client", ipv4(broadcastMAC, packet4(pod4, "255.255.255.255", 0, unix.IPPROTO_UDP, datagram(68, 67)))},
		{"a datagram", ipv4(broadcastMAC, packet4(pod4, bridge4, 0, unix.IPPROTO_UDP, datagram(1280, 53)))},
		{"a later fragment", ipv4(broadcastMAC, packet4(pod4, bridge4, 1, unix.IPPROTO_UDP, datagram(67, 68)))},
		{"a later fragment of IPv6", ipv6(allNodesMAC, packet6(podLocal, allNodes, unix.IPPROTO_FRAGMENT, []byte{unix.IPPROTO_UDP, 0, 0, 8, 0, 0, 0, 7}, udp(podLocal, allNodes, 546, "reply")))},
		{"a solicitation", ipv6(allNodesMAC, solicit6(podLocal, allNodes, bridge6))},
		{"ARP", ether(broadcastMAC, podMAC, unix.ETH_P_ARP, arpMessage(1, podMAC, pod4, bridge4))},
	}
	for _, group := range []int{GatewayGroup, PodGroup, 0} {
		nstest.Run(t, s.host, "ip", "link", "set", "veth1", "group", strconv.Itoa(group))
		for i, f := range append(servers, others...) {
			s.frames++
			token, last := fmt.Appendf(nil, "token%07d", s.frames), fmt.Appendf(nil, "last%08d", s.frames)
			s.pod1.send(join(f.frame, token), join(leasingFrames()[0].frame, last))
			host, pod := s.bridge.seenBefore(token, last), s.pod2.seenBefore(token, last)
			want := 1
			if group == GatewayGroup && i < len(servers) {
				want = 0
			}
			expect.Equal(t, host, want, "group %#x: %s to the host", group, f.name)
			if f.name != "DHCP to the host" {
				expect.Equal(t, pod, 1, "group %#x: %s to a pod", group, f.name)
			}
		}
	}
}
