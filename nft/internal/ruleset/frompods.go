package ruleset

import (
	"encoding/binary"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// The chain from-pods drops frames by which a pod, guarded or not, could change the bridge's behaviour, or get past
// the firewall.
//
// A host that gets a frame with a tag of VLAN 0 (IEEE 802.1Q's priority tag), and has no
// link for it, takes the tag off and reads what is behind it, and any number of them in a row
// (__netif_receive_skb_core). A bridge without VLANs passes such a frame on as it is, and
// does not show it to the firewall, since to br_netfilter it is no IP: so between pods it
// would be a way past every rule, policy and connection tracking. A tag in front of
// another protocol is let pass, and so is that of any other VLAN, since its receiver has
// to have a link for it.
//
// A bridge that keeps VLANs apart takes the tag of its default VLAN off frames that leave by a port that has this
// VLAN without tags, as uplinks and trunks have. A tag behind it would then be the first, and have the frame in a
// VLAN that the pod's port is not in.
//
// A multicast query makes the bridge take its sender for the querier, and from then on send no group but to ports
// that have reported it. A pod that asks once, and then so that the answers may take hours (RFC 3810, section
// 5.1.3), makes it forget all reports after some minutes (mcast_membership_interval) all the same: then
// solicitations of neighbours, which are multicast, reach no pod any more, neither from pods nor from the host. The
// rule looks at PodGroup, as those that keep reports from pods do, so that an operator can have a pod that is a
// multicast router.

const (
	igmpQuery     = 0x11 // RFC 3376, section 4
	listenerQuery = 130  // RFC 3810, section 5.1

	vlanTag  = etherType + 2 // behind the type of a tag: its priority and VLAN
	vlanType = vlanTag + 2   // and what is in it

	defaultVLAN = 1
)

func (list *rules) addFromPods() {
	list.add("IGMP queries of pods", func(x expressions) {
		x.isPodGroup(unix.NFT_META_IIFGROUP)
		x.isProtocol(unix.ETH_P_IP)
		x.isL4(unix.IPPROTO_IGMP)
		x.firstByte(igmpQuery, igmpQuery)
		x.Drop()
	})
	// The bridge reads a later one as if it were a whole packet.
	list.add("IGMP fragments of pods", func(x expressions) {
		const flagsAndOffset = 6
		x.isPodGroup(unix.NFT_META_IIFGROUP)
		x.isProtocol(unix.ETH_P_IP)
		x.Payload(expr.PayloadBaseNetworkHeader, flagsAndOffset, 2, nftnl.First)
		x.hasAny(0x3fff)
		x.isL4(unix.IPPROTO_IGMP)
		x.Drop()
	})
	// The bridge reads those alone that have hop-by-hop options.
	list.add("MLD queries of pods", func(x expressions) {
		x.isPodGroup(unix.NFT_META_IIFGROUP)
		x.isProtocol(unix.ETH_P_IPV6)
		x.isAt(expr.PayloadBaseNetworkHeader, ip6NextHeader, []byte{unix.IPPROTO_HOPOPTS})
		x.isICMPv6(listenerQuery, listenerQuery)
		x.Drop()
	})
	list.add("of the LAN", func(x expressions) {
		x.isMeta(unix.NFT_META_IIFGROUP, group(ident.ShareGroup))
		x.Leave()
	})
	list.add("no tag", func(x expressions) {
		x.Payload(expr.PayloadBaseLLHeader, etherType, 2, nftnl.First)
		x.Compare(expr.CmpOpNeq, Number16(unix.ETH_P_8021Q))
		x.Payload(expr.PayloadBaseLLHeader, etherType, 2, nftnl.First)
		x.Compare(expr.CmpOpNeq, Number16(unix.ETH_P_8021AD))
		x.Leave()
	})
	for _, inner := range []struct {
		comment string
		typ     uint16
	}{{"a tag behind one of VLAN 1", unix.ETH_P_8021Q}, {"an outer tag behind one of VLAN 1", unix.ETH_P_8021AD}} {
		list.add(inner.comment, func(x expressions) {
			x.Payload(expr.PayloadBaseLLHeader, vlanTag, 2, nftnl.First)
			x.Mask(Number16(0x0fff), Number16(0))
			x.Compare(expr.CmpOpEq, Number16(defaultVLAN))
			x.dropBehindTag(inner.typ)
		})
	}
	list.add("of a VLAN", func(x expressions) {
		x.Payload(expr.PayloadBaseLLHeader, vlanTag, 2, nftnl.First)
		x.hasAny(0x0fff)
		x.Leave()
	})
	list.add("tagged IPv4", func(x expressions) { x.dropBehindTag(unix.ETH_P_IP) })
	list.add("tagged IPv6", func(x expressions) { x.dropBehindTag(unix.ETH_P_IPV6) })
	list.add("tags in a row", func(x expressions) { x.dropBehindTag(unix.ETH_P_8021Q) })
	list.add("outer tags in a row", func(x expressions) { x.dropBehindTag(unix.ETH_P_8021AD) })
}

// dropBehindTag drops what a pod sends of a type behind a tag.
func (x expressions) dropBehindTag(typ uint16) {
	x.isAt(expr.PayloadBaseLLHeader, vlanType, Number16(typ))
	x.isMeta(expr.MetaKeyIIFNAME, []byte(podPorts))
	x.Drop()
}

// isPodGroup adds a match for PodGroup and GatewayGroup, which differ in one bit, by the port that a frame comes in by or
// leaves by.
func (x expressions) isPodGroup(link expr.MetaKey) {
	x.Meta(link, nftnl.First)
	x.Mask(group(^uint32(PodGroup^GatewayGroup)), nil)
	x.Compare(expr.CmpOpEq, group(PodGroup&GatewayGroup))
}

// group returns the number of a group of links as rules compare it.
func group(number uint32) []byte { return binary.NativeEndian.AppendUint32(nil, number) }

// hasAny holds if any of some bits is set in the two bytes in the first register.
func (x expressions) hasAny(bits uint16) {
	x.Mask(Number16(bits), Number16(0))
	x.Compare(expr.CmpOpNeq, Number16(0))
}

// Frames to the link-local groups, 01:80:c2:00:00:00 to :0f, are for the device at the other end of the wire (IEEE
// 802.1Q, table 8-1): STP, LACP, 802.1X, LLDP and the like. A bridge does not forward them, but hands them to the
// host's own stack, as from the port and not from the bridge: with any contents, an IPv6 router advertisement or a
// datagram, past every rule that names the bridge. A pod needs to send none.
//
// The kernel asks the rules in two places (br_handle_frame): in the bridge's input, and, about what it takes for
// any other frame, in prerouting. Those are the groups of the masks in group_fwd_mask, of the port or of the
// bridge, and that of STP where the bridge has STP off. It asks no rule about :0e, and :00 where STP is on, unless
// the port's mask has them; pause frames (:01) it drops itself.

// podPorts is how the names of all pods' ports begin, those that other plugins made
// among them. It takes no element to know a pod by it, which would come and go with the
// pod, and no group of links, which an operator may change.
const podPorts = "veth"

func (list *rules) addGroups() {
	list.add("to link-local groups, from pods", func(x expressions) {
		x.Payload(expr.PayloadBaseLLHeader, etherTarget, EtherLen, nftnl.First)
		x.Mask([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xf0}, nil)
		x.Compare(expr.CmpOpEq, []byte{0x01, 0x80, 0xc2, 0, 0, 0})
		x.isMeta(expr.MetaKeyIIFNAME, []byte(podPorts)) // as far as it goes: nft's "veth*"
		x.Drop()
	})
}
