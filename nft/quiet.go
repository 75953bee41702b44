package nft

import (
	"encoding/binary"
	"strconv"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// QuietGroup is the group of links (IFLA_GROUP) that ports of pods have to be in for
// Network.Quiet to say something of them. One that is taken out of it, by `ip link set
// PORT group 0`, gets all reports again, as a pod needs that is a multicast router.
const QuietGroup = 0x746f

const (
	quietPrefix = "quiet-"

	// What the bridge forwards to each of its ports.
	bridgeForward = unix.NF_INET_FORWARD

	priorityBridged = -200 // "filter", by nft's names for the family

)

// addQuiet adds the network's chain against reports that nobody reads, or has it removed.
func (rs *ruleset) addQuiet(n *Network, key string) {
	if !n.Quiet {
		rs.gone = append(rs.gone, inBridge(quietPrefix+key))
		return
	}
	rs.needTable(unix.NFPROTO_BRIDGE)
	rs.chains = append(rs.chains, quiet(key))
}

func quiet(key string) chain {
	return chain{
		place: inBridge(quietPrefix + key), kind: "filter", hook: bridgeForward, priority: priorityBridged,
		settings: "quiet group 0x" + strconv.FormatUint(QuietGroup, 16), write: (*rules).addQuiet,
	}
}

// addQuiet comes behind the bridge's own look at reports (multicast snooping).
func (list *rules) addQuiet() {
	list.add("all but ICMPv6", func(x expressions) {
		x.Meta(expr.MetaKeyL4PROTO, nftnl.First)
		x.Compare(expr.CmpOpNeq, []byte{unix.IPPROTO_ICMPV6})
		x.Leave()
	})
	list.add("multicast listener reports to pods", func(x expressions) {
		x.Meta(expr.MetaKeyOIFGROUP, nftnl.First)
		x.Compare(expr.CmpOpEq, binary.NativeEndian.AppendUint32(nil, QuietGroup))
		x.isDiscovery(listenerReportTwo, listenerReportTwo)
		x.Drop()
	})
}
