package ruleset

import (
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

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
	list.add("of ports behind which the host may have a server", func(x expressions) {
		x.Meta(unix.NFT_META_IIFGROUP, nftnl.First)
		x.Compare(expr.CmpOpNeq, group(GatewayGroup))
		x.Leave()
	})
	list.add("TCP to the host", func(x expressions) { x.isL4(unix.IPPROTO_TCP); x.Leave() })

	// A later fragment has no UDP or ICMP header to match, and is useless without the first fragment, so let it pass.
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
			// In the reverse order nft would read the byte as the field of that name, and would add, to a copy that
			// is loaded, a check of the Ethernet type, which is a tag's type on a bridge with VLANs.
			x.firstByte(message.typ, message.typ)
			x.isL4(message.protocol)
			x.Drop()
		})
	}

	// A packet socket may read packets that the kernel refuses: a DHCP client has one for IPv4.
	list.add("protocols that can be read", func(x expressions) {
		x.Meta(expr.MetaKeyL4PROTO, nftnl.First)
		x.Compare(expr.CmpOpNeq, []byte{unix.IPPROTO_RAW})
		x.Leave()
	})
	list.add("IPv4 that cannot be read", func(x expressions) { x.isProtocol(unix.ETH_P_IP); x.Drop() })
}
