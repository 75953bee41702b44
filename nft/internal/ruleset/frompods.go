package ruleset

import (
	"encoding/binary"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/ident"
)

// The chain from-pods drops frames that a pod could send to change the bridge's behaviour or to bypass the firewall.
// It applies to all pods, with a guard or without one.
//
// First, the chain drops IP packets behind VLAN tags with the VLAN ID 0 (IEEE 802.1Q's priority tag). A host without
// a link for the tag removes it and reads the content, even behind several such tags (__netif_receive_skb_core). A
// bridge without VLANs forwards the frame unchanged. It does not pass the frame to the firewall, since br_netfilter
// does not recognize the content as IP. So such frames would reach other pods past every rule, policy and connection
// tracking. Tags before a protocol other than IP may pass. Tags with any other VLAN ID may pass too, since the
// receiver needs a link for that VLAN.
//
// Second, it drops frames with two tags whose first tag is of the default VLAN. A bridge that separates VLANs removes
// this tag at ports that carry the default VLAN untagged, such as an uplink or a trunk. Then the second tag would
// come first, and move the frame into a VLAN that the pod's port is not a member of.
//
// Third, it drops multicast queries. A query makes the bridge treat the sender as the multicast querier. From then on
// the bridge sends a group only to ports that have reported it. A pod could send one query that permits answers
// within hours (RFC 3810, section 5.1.3). The bridge forgets all reports after some minutes
// (mcast_membership_interval). Then neighbour solicitations, which are multicast, no longer reach any pod, whether
// they come from pods or from the host. This rule applies to PodGroup and GatewayGroup only, so an operator can run a
// pod that is a multicast router.

const (
	igmpQuery     = 0x11 // RFC 3376, section 4
	listenerQuery = 130  // RFC 3810, section 5.1

	vlanTag  = etherType + 2 // offset of a tag's priority and VLAN ID
	vlanType = vlanTag + 2   // offset of the EtherType after the tag

	vlanID      = 0x0fff // the bits of a tag with the number of the VLAN
	defaultVLAN = 1
)

func (list *rules) addFromPods() {
	const in = unix.NFT_META_IIFGROUP

	list.begin("IGMP queries of pods").
		isPodGroup(in).isProtocol(unix.ETH_P_IP).isL4(unix.IPPROTO_IGMP).firstByte(igmpQuery, igmpQuery).Drop()

	// Drop all IGMP fragments, since the bridge parses a later fragment as if it were a whole packet.
	list.begin("IGMP fragments of pods").isPodGroup(in).fragment4(0x3fff).isL4(unix.IPPROTO_IGMP).Drop()

	// Match only queries behind a hop-by-hop header, since the bridge parses no others.
	list.begin("MLD queries of pods").
		isPodGroup(in).isProtocol(unix.ETH_P_IPV6).nextHeader(unix.IPPROTO_HOPOPTS, unix.IPPROTO_HOPOPTS).
		isICMPv6(listenerQuery, listenerQuery).Drop()

	list.begin("of the LAN").isMeta(in, group(ident.ShareGroup)).Return()
	noTag := list.begin("no tag")
	for _, tag := range []uint16{unix.ETH_P_8021Q, unix.ETH_P_8021AD} {
		noTag.load(expr.PayloadBaseLLHeader, etherType, 2).compare(expr.CmpOpNeq, Number16(tag))
	}
	noTag.Return()

	for _, inner := range []struct {
		comment string
		typ     uint16
	}{{"a tag behind one of VLAN 1", unix.ETH_P_8021Q}, {"an outer tag behind one of VLAN 1", unix.ETH_P_8021AD}} {
		x := list.begin(inner.comment).load(expr.PayloadBaseLLHeader, vlanTag, 2)
		x.Mask(Number16(vlanID), Number16(0))
		x.compare(expr.CmpOpEq, Number16(defaultVLAN)).dropBehindTag(inner.typ)
	}

	list.begin("of a VLAN").load(expr.PayloadBaseLLHeader, vlanTag, 2).hasAny(vlanID).Return()
	list.begin("tagged IPv4").dropBehindTag(unix.ETH_P_IP)
	list.begin("tagged IPv6").dropBehindTag(unix.ETH_P_IPV6)
	list.begin("tags in a row").dropBehindTag(unix.ETH_P_8021Q)
	list.begin("outer tags in a row").dropBehindTag(unix.ETH_P_8021AD)
}

// dropBehindTag drops frames from a pod that have the given EtherType behind a VLAN tag.
func (x expressions) dropBehindTag(typ uint16) {
	x.isAt(expr.PayloadBaseLLHeader, vlanType, Number16(typ)).isPodPort(expr.MetaKeyIIFNAME).Drop()
}

// isPodPort matches packets whose link is a pod's port. The port's name begins with "veth", so nft prints "veth*".
func (x expressions) isPodPort(link expr.MetaKey) expressions {
	return x.isMeta(link, []byte(podPorts))
}

// isPodGroup matches frames whose port is in PodGroup or GatewayGroup. link selects the incoming or the outgoing
// port. The two groups differ in one bit, so a mask covers them.
func (x expressions) isPodGroup(link expr.MetaKey) expressions {
	x.loadMeta(link).Mask(group(^uint32(PodGroup^GatewayGroup)), nil)
	return x.compare(expr.CmpOpEq, group(PodGroup&GatewayGroup))
}

// group returns the number of a link group as bytes in the host's byte order, in which rules compare it.
func group(number uint32) []byte { return binary.NativeEndian.AppendUint32(nil, number) }

// hasAny matches if at least one of the bits is set in the two bytes in the first register.
func (x expressions) hasAny(bits uint16) expressions {
	x.Mask(Number16(bits), Number16(0))
	return x.compare(expr.CmpOpNeq, Number16(0))
}

// Frames to the link-local groups, 01:80:c2:00:00:00 to :0f, are meant for the device at the other end of the wire
// (IEEE 802.1Q, table 8-1). Examples are STP, LACP, 802.1X and LLDP. A bridge does not forward them, but passes them
// to the host's own stack as frames from the port, not from the bridge. So they bypass every rule that names the
// bridge, and may contain anything, such as an IPv6 router advertisement or a datagram. A pod does not need to send
// such frames.
//
// The kernel calls rules in two places (br_handle_frame). The first is the bridge's input hook. The second is the
// prerouting hook, for groups that the kernel handles like any other frames. These are the groups in group_fwd_mask
// of the port or the bridge, and the STP group if STP is off on the bridge. The kernel calls no rule for :0e, nor for
// :00 if STP is on, unless the port's mask contains the group. It drops pause frames (:01) itself.

// podPorts is the prefix of the names of all pods' ports, including ports that other plugins created. A match for it
// needs no set element, which would come and go with each pod. It needs no link group either, which an operator may
// change.
const podPorts = "veth"

func (list *rules) addGroups() {
	x := list.begin("to link-local groups, from pods").load(expr.PayloadBaseLLHeader, etherTarget, EtherLen)
	x.Mask([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xf0}, nil)
	x.compare(expr.CmpOpEq, []byte{0x01, 0x80, 0xc2, 0, 0, 0}).isPodPort(expr.MetaKeyIIFNAME).Drop()
}
