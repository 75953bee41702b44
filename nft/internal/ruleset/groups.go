package ruleset

import (
	"github.com/google/nftables/expr"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// Frames to the link-local groups, 01:80:c2:00:00:00 to :0f, are for the device at the
// other end of the wire (IEEE 802.1Q, table 8-1): STP, LACP, 802.1X, LLDP and the like. A
// bridge does not forward them, but hands them to the host's own stack, as from the port
// and not from the bridge: whatever is in them, an IPv6 router advertisement or a datagram,
// past every rule that names the bridge. Nothing of that is a pod's to send.
//
// The kernel asks the rules in two places (br_handle_frame): in the bridge's input, and,
// about what it takes for any other frame, in prerouting. Those are the groups of the
// masks in group_fwd_mask, of the port or of the bridge, and that of STP where the bridge
// has STP off. It asks nobody about :0e, and :00 where STP is on, unless the port's mask
// has them; pause frames (:01) it drops itself.

// podPorts is how the names of all pods' ports begin, those that other plugins made
// among them. It takes no element to know a pod by it, which would come and go with the
// pod, and no group of links, which an operator may change.
const podPorts = "veth"

func (list *rules) addGroups() {
	list.add("to link-local groups, from pods", func(x expressions) {
		x.Payload(expr.PayloadBaseLLHeader, etherTarget, EtherLen, nftnl.First)
		x.Mask([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xf0}, nil)
		x.Compare(expr.CmpOpEq, []byte{0x01, 0x80, 0xc2, 0, 0, 0})
		x.Meta(expr.MetaKeyIIFNAME, nftnl.First)
		x.Compare(expr.CmpOpEq, []byte(podPorts)) // as far as it goes: nft's "veth*"
		x.Drop()
	})
}
