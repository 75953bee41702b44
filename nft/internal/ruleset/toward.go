package ruleset

import (
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// On a network of mode gateway the host is the pods' router, and needs nothing from a DHCP server or router among them.
// A program of the host may ask for it all the same: a network manager whose configuration matches every link runs a
// DHCP client on the bridge and listens for routers there. It reads frames by a packet socket, behind which no rule of
// family inet is asked. So these rules stand in the bridge's input, before the bridge hands a frame to any socket.
// Frames that the bridge forwards do not pass there, so pods may serve each other.

// GatewayGroup is the group of links of a port that is in PodGroup, on a network whose gateway is the host.
const GatewayGroup = PodGroup - 1

// addTowardHost appends the rules for frames that a bridge hands to the host.
func (list *rules) addTowardHost() {
	list.addGroups()
	list.add("of ports behind which the host may have a server", func(x expressions) {
		x.Meta(unix.NFT_META_IIFGROUP, nftnl.First)
		x.Compare(expr.CmpOpNeq, group(GatewayGroup))
		x.Leave()
	})
	list.add("TCP to the host", func(x expressions) { x.isL4(unix.IPPROTO_TCP); x.Leave() })
	// What they begin with is no header, and they are of no use without the first one.
	list.add("later fragments of IPv4 to the host", func(x expressions) {
		const flagsAndOffset = 6
		x.isProtocol(unix.ETH_P_IP)
		x.Payload(expr.PayloadBaseNetworkHeader, flagsAndOffset, 2, nftnl.First)
		x.hasAny(0x1fff)
		x.Leave()
	})
	list.add("later fragments of IPv6 to the host", func(x expressions) { x.isLaterFragment(); x.Leave() })
	list.add("DHCP answers to the host", func(x expressions) { x.isUDP(udpTarget, dhcpClient); x.Drop() })
	list.add("DHCPv6 answers to the host", func(x expressions) { x.isUDP(udpTarget, dhcp6Client); x.Drop() })
	for _, message := range []struct {
		comment       string
		protocol, typ byte
	}{
		{"ICMP redirects to the host", unix.IPPROTO_ICMP, icmpRedirect},
		{"ICMP router advertisements to the host", unix.IPPROTO_ICMP, icmpRouterAdvert},
		{"ICMPv6 redirects to the host", unix.IPPROTO_ICMPV6, redirectMessage},
		{"ICMPv6 router advertisements to the host", unix.IPPROTO_ICMPV6, routerAdvert},
	} {
		list.add(message.comment, func(x expressions) {
			// In the other order nft takes the byte for the field of that name, and adds to a save that is loaded a look
			// at the type of the Ethernet header, which is a tag's on a bridge with VLANs.
			x.firstByte(message.typ, message.typ)
			x.isL4(message.protocol)
			x.Drop()
		})
	}

	// A packet socket may read what the kernel refuses: a DHCP client has one for IPv4.
	list.add("protocols that can be read", func(x expressions) {
		x.Meta(expr.MetaKeyL4PROTO, nftnl.First)
		x.Compare(expr.CmpOpNeq, []byte{unix.IPPROTO_RAW})
		x.Leave()
	})
	list.add("IPv4 that cannot be read", func(x expressions) { x.isProtocol(unix.ETH_P_IP); x.Drop() })
}
