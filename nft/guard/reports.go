package guard

import (
	"encoding/binary"
	"strconv"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// Group is the group of links (IFLA_GROUP) that ports of pods have to be in for Reports, and
// for the rules about multicast queries, to say something of them. One that is taken out of
// it, by `ip link set PORT group 0`, gets all reports again, as a pod needs that is a multicast
// router.
const Group = 0x746f

// Reports gives the chain that keeps the multicast listener reports of others from the ports
// in Group, of one network or of all: it is for the caller to name it.
func Reports() []Chain {
	return []Chain{{"reports", bridgeForward, priorityBridged, "quiet group 0x" + strconv.FormatUint(Group, 16), by((*rules).addReports)}}
}

// addReports comes behind the bridge's own look at reports (multicast snooping).
func (list *rules) addReports() {
	list.add("all but ICMPv6", func(x expressions) {
		x.Meta(expr.MetaKeyL4PROTO, nftnl.First)
		x.Compare(expr.CmpOpNeq, []byte{unix.IPPROTO_ICMPV6})
		x.Leave()
	})
	list.add("multicast listener reports to pods", func(x expressions) {
		x.Meta(expr.MetaKeyOIFGROUP, nftnl.First)
		x.Compare(expr.CmpOpEq, binary.NativeEndian.AppendUint32(nil, Group))
		x.isDiscovery(listenerReportTwo, listenerReportTwo)
		x.Drop()
	})
}
