package ruleset

import "golang.org/x/sys/unix"

// In a network of mode gateway the host is the pods' router, and needs nothing from a DHCP server or router among
// them. But a program of the host may ask for it: a network manager whose configuration matches every link runs a
// DHCP client on the bridge and listens for routers there. It reads frames with a packet socket, which no rule of
// family inet applies to. So these rules are in the bridge's input, before the bridge passes a frame to any socket.
// Frames that the bridge forwards do not pass there, so pods may serve each other.

// GatewayGroup is the link group of a pod's port, instead of PodGroup, in a network with the host as gateway.
const GatewayGroup = PodGroup - 1

// addTowardHost appends the rules for frames that a bridge passes to the host.
func (list *rules) addTowardHost() {
	list.addGroups()
	list.rule("of ports behind which the host may have a server").
		isNotMeta(unix.NFT_META_IIFGROUP, group(GatewayGroup)).Leave()
	list.rule("TCP to the host").isL4(unix.IPPROTO_TCP).Leave()

	// A later fragment has no UDP or ICMP header to match, and is useless without the first fragment, so let it pass.
	list.rule("later fragments of IPv4 to the host").fragment4(0x1fff).Leave()
	list.rule("later fragments of IPv6 to the host").isLaterFragment().Leave()
	list.rule("DHCP answers to the host").isUDP(udpTarget, dhcpClient).Drop()
	list.rule("DHCPv6 answers to the host").isUDP(udpTarget, dhcp6Client).Drop()
	for _, message := range []struct {
		comment       string
		protocol, typ byte
	}{
		{"ICMP redirects to the host", unix.IPPROTO_ICMP, icmpRedirect},
		{"ICMP router advertisements to the host", unix.IPPROTO_ICMP, icmpRouterAdvert},
		{"ICMPv6 redirects to the host", unix.IPPROTO_ICMPV6, redirectMessage},
		{"ICMPv6 router advertisements to the host", unix.IPPROTO_ICMPV6, routerAdvert},
	} {
		// In the reverse order nft would read the byte as the field of that name, and would add, to a copy that is
		// loaded, a check of the Ethernet type, which is a tag's type on a bridge with VLANs.
		list.rule(message.comment).firstByte(message.typ, message.typ).isL4(message.protocol).Drop()
	}

	// A packet socket may read packets that the kernel refuses: a DHCP client has one for IPv4.
	list.rule("protocols that can be read").isNotL4(unix.IPPROTO_RAW).Leave()
	list.rule("IPv4 that cannot be read").isProtocol(unix.ETH_P_IP).Drop()
}
