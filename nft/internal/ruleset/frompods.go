package ruleset

import (
	"encoding/binary"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/ident"
)

// The chain from-pods drops frames that a pod, guarded or not, could use to change the bridge's behaviour or to
// bypass the firewall.
//
// A host that receives a frame with a tag of VLAN 0 (IEEE 802.1Q's priority tag), and has no link for it, removes the
// tag and reads what follows, for any number of tags in a row (__netif_receive_skb_core). A bridge without VLANs
// forwards such a frame unchanged, and does not show it to the firewall, since br_netfilter does not regard it as IP.
// So between pods it would bypass every rule, policy and connection tracking. A tag in front of another protocol may
// pass, and so may that of any other VLAN, since its receiver needs a link for it.
//
// A bridge that separates VLANs removes the tag of its default VLAN from frames that leave by a port with this VLAN
// untagged, such as uplinks and trunks. A second tag would then come first, and put the frame into a VLAN that the
// pod's port does not belong to.
//
// A multicast query makes the bridge regard its sender as the querier. From then on it sends a group only to ports
// that have reported it. Suppose a pod asks once, and permits answers within hours (RFC 3810, section 5.1.3). The
// bridge still forgets all reports after some minutes (mcast_membership_interval). Then neighbour solicitations,
// which are multicast, reach no pod any more, neither from pods nor from the host. The rule applies to PodGroup, like
// the rules that keep reports from pods, so that an operator can run a pod that is a multicast router.

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

	list.rule("IGMP queries of pods").
		isPodGroup(in).isProtocol(unix.ETH_P_IP).isL4(unix.IPPROTO_IGMP).firstByte(igmpQuery, igmpQuery).Drop()

	// The bridge reads a later fragment as if it were a whole packet.
	list.rule("IGMP fragments of pods").isPodGroup(in).fragment4(0x3fff).isL4(unix.IPPROTO_IGMP).Drop()

	// The bridge only reads queries with hop-by-hop options.
	list.rule("MLD queries of pods").
		isPodGroup(in).isProtocol(unix.ETH_P_IPV6).nextHeader(unix.IPPROTO_HOPOPTS, unix.IPPROTO_HOPOPTS).
		isICMPv6(listenerQuery, listenerQuery).Drop()

	list.rule("of the LAN").isMeta(in, group(ident.ShareGroup)).Leave()
	noTag := list.rule("no tag")
	for _, tag := range []uint16{unix.ETH_P_8021Q, unix.ETH_P_8021AD} {
		noTag.load(expr.PayloadBaseLLHeader, etherType, 2).compare(expr.CmpOpNeq, Number16(tag))
	}
	noTag.Leave()

	for _, inner := range []struct {
		comment string
		typ     uint16
	}{{"a tag behind one of VLAN 1", unix.ETH_P_8021Q}, {"an outer tag behind one of VLAN 1", unix.ETH_P_8021AD}} {
		x := list.rule(inner.comment).load(expr.PayloadBaseLLHeader, vlanTag, 2)
		x.Mask(Number16(vlanID), Number16(0))
		x.compare(expr.CmpOpEq, Number16(defaultVLAN)).dropBehindTag(inner.typ)
	}

	list.rule("of a VLAN").load(expr.PayloadBaseLLHeader, vlanTag, 2).hasAny(vlanID).Leave()
	list.rule("tagged IPv4").dropBehindTag(unix.ETH_P_IP)
	list.rule("tagged IPv6").dropBehindTag(unix.ETH_P_IPV6)
	list.rule("tags in a row").dropBehindTag(unix.ETH_P_8021Q)
	list.rule("outer tags in a row").dropBehindTag(unix.ETH_P_8021AD)
}

// dropBehindTag drops frames from a pod that have a type behind a tag.
func (x expressions) dropBehindTag(typ uint16) {
	x.isAt(expr.PayloadBaseLLHeader, vlanType, Number16(typ)).isPodPort(expr.MetaKeyIIFNAME).Drop()
}

// isPodPort matches the link of a pod's port. It compares a prefix of the name: nft's "veth*".
func (x expressions) isPodPort(link expr.MetaKey) expressions {
	return x.isMeta(link, []byte(podPorts))
}

// isPodGroup matches PodGroup and GatewayGroup, which differ in one bit, in the port that a frame comes in or leaves
// by.
func (x expressions) isPodGroup(link expr.MetaKey) expressions {
	x.loadMeta(link).Mask(group(^uint32(PodGroup^GatewayGroup)), nil)
	return x.compare(expr.CmpOpEq, group(PodGroup&GatewayGroup))
}

// group returns the number of a link group in the form that rules compare.
func group(number uint32) []byte { return binary.NativeEndian.AppendUint32(nil, number) }

// hasAny matches if any of some bits is set in the two bytes in the first register.
func (x expressions) hasAny(bits uint16) expressions {
	x.Mask(Number16(bits), Number16(0))
	return x.compare(expr.CmpOpNeq, Number16(0))
}

// Frames to the link-local groups, 01:80:c2:00:00:00 to :0f, are for the device at the other end of the wire (IEEE
// 802.1Q, table 8-1): STP, LACP, 802.1X, LLDP and the like. A bridge does not forward them, but passes them to the
// host's own stack, as received by the port and not by the bridge. They may contain anything, such as an IPv6 router
// advertisement or a datagram, and bypass every rule that names the bridge. A pod needs to send none.
//
// The kernel applies rules in two places (br_handle_frame): in the bridge's input, and in prerouting for frames that
// it handles like any other. The latter are the groups in the masks group_fwd_mask of the port or the bridge, and the
// group of STP if STP is off on the bridge. It applies no rule to :0e, and to :00 if STP is on, unless the port's
// mask contains them. It drops pause frames (:01) itself.

// podPorts is the beginning of the names of all pods' ports, including those that other plugins created. Matching it
// needs no element, which would come and go with the pod, and no link group, which an operator may change.
const podPorts = "veth"

func (list *rules) addGroups() {
	x := list.rule("to link-local groups, from pods").load(expr.PayloadBaseLLHeader, etherTarget, EtherLen)
	x.Mask([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xf0}, nil)
	x.compare(expr.CmpOpEq, []byte{0x01, 0x80, 0xc2, 0, 0, 0}).isPodPort(expr.MetaKeyIIFNAME).Drop()
}
