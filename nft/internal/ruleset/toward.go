package ruleset

import "golang.org/x/sys/unix"

// In a network whose gateway is the host, the host needs no DHCP server or router among the pods. But a program of
// the host may listen to such a server or router. For example, a network manager whose configuration matches every
// link runs a DHCP client and accepts router advertisements on the bridge. The DHCP client reads frames with a packet
// socket, which bypasses rules of family inet. So the following rules are at the bridge's input hook, which runs
// before any socket gets the frame. Frames that the bridge forwards do not pass this hook, so pods may serve each
// other.

// GatewayGroup is the link group of pods' ports in networks whose gateway is the host. Other pods' ports have
// PodGroup.
const GatewayGroup = PodGroup - 1

// addTowardHost appends the rules for frames that the bridge passes to the host.
func (list *rules) addTowardHost() {
	list.addGroups()
	list.begin("of ports behind which the host may have a server").
		isNotMeta(unix.NFT_META_IIFGROUP, group(GatewayGroup)).Return()
	list.begin("TCP to the host").isL4(unix.IPPROTO_TCP).Return()

	// A later fragment has no UDP or ICMP header to match. It is useless without the first fragment, so accept it.
	list.begin("later fragments of IPv4 to the host").fragment4(0x1fff).Return()
	list.begin("later fragments of IPv6 to the host").isLaterFragment().Return()
	list.begin("DHCP answers to the host").isUDP(udpTarget, dhcpClient).Drop()
	list.begin("DHCPv6 answers to the host").isUDP(udpTarget, dhcp6Client).Drop()
	for _, message := range []struct {
		comment       string
		protocol, typ byte
	}{
		{"ICMP redirects to the host", unix.IPPROTO_ICMP, icmpRedirect},
		{"ICMP router advertisements to the host", unix.IPPROTO_ICMP, icmpRouterAdvert},
		{"ICMPv6 redirects to the host", unix.IPPROTO_ICMPV6, redirectMessage},
		{"ICMPv6 router advertisements to the host", unix.IPPROTO_ICMPV6, routerAdvert},
	} {
		// Match the byte before the protocol. In the reverse order, nft would print the byte as a field, such as
		// "icmp type". When nft loads such a listing, it adds a check of the EtherType, which differs in frames with
		// a VLAN tag.
		list.begin(message.comment).firstByte(message.typ, message.typ).isL4(message.protocol).Drop()
	}

	// Drop IPv4 packets whose protocol the kernel cannot find. A DHCP client for IPv4 uses a packet socket, which may
	// receive packets that the kernel itself refuses.
	list.begin("protocols that can be read").isNotL4(unix.IPPROTO_RAW).Return()
	list.begin("IPv4 that cannot be read").isProtocol(unix.ETH_P_IP).Drop()
}
