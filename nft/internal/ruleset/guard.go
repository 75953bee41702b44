package ruleset

import (
	"slices"
	"strconv"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// The guard restricts the frames that a pod may send through its port (GuardedPort). The pod can use only its own MAC
// and addresses, and cannot pose as a server or a router.
//
// The chain guard sees frames when they come in by a port, before the bridge learns from them and before other rules
// run. It checks Ethernet, ARP, IP and neighbour discovery, so that no pod can pose as the host or as a router. It
// drops frames with any VLAN tag, and all protocols except IP and ARP, such as STP, LLDP and PPPoE. A port with
// nft.GuardMAC is only checked for its MAC. A frame from a port without a guard costs two set lookups.
//
// The chain untrusted applies to pods that must be hosts only. It keeps them from posing as DHCP or DHCPv6 servers
// and as multicast routers, and from sending redirects. The chains groups and from-pods apply to every port whose
// name begins with "veth".
//
// The guard has limits. It does not limit rates. A pod may ask DHCP servers for any number of addresses with
// different client identifiers, which rules cannot read. The guard does not look at names in mDNS, LLMNR or NetBIOS,
// or at routing protocols over TCP.

const quietPrefix = "quiet-"

// Priorities in the bridge family. Its hooks have the same numbers as those of other families (uapi
// linux/netfilter_bridge.h).
const (
	// priorityGuard is before other tables, and before the kernel passes bridged packets to iptables.
	priorityGuard = -300
	// priorityUntrusted and priorityFromPods are the priorities of the chains after the chain guard, in this order.
	priorityUntrusted = priorityGuard + 1
	priorityFromPods  = priorityUntrusted + 1

	priorityBridged = -200 // "filter" in nft's names for the family
)

// PodGroup is the link group (IFLA_GROUP) of pods' ports that the rules for multicast queries and listener reports
// apply to. These rules also apply to GatewayGroup. A pod that is a multicast router needs all reports: remove its
// port from the group with `ip link set PORT group 0`.
const PodGroup = 0x746f

// addGuard adds the chains that guard pods. All networks share them. If the network needs no guard, addGuard does not
// mark existing chains for deletion, since another network may need them. RemoveNetwork deletes the chains together
// with the table.
func (rs *Ruleset) addGuard(n *Network) {
	if n.Groups || n.Guard {
		rs.addBridgeChain("groups", unix.NF_INET_PRE_ROUTING, priorityGuard, "link-local groups", (*rules).addGroups)

		// The chain groups-input sees the frames that the bridge passes to the host.
		rs.addBridgeChain("groups-input", unix.NF_INET_LOCAL_IN, priorityGuard, "groups, servers",
			(*rules).addTowardHost)
		rs.addBridgeChain("from-pods", unix.NF_INET_PRE_ROUTING, priorityFromPods, "tags, queries",
			(*rules).addFromPods)
	}

	if n.Guard {
		rs.addBridgeChain("guard", unix.NF_INET_PRE_ROUTING, priorityGuard, "spoof guard, or MAC alone",
			(*rules).addGuard)
		rs.addBridgeChain("untrusted", unix.NF_INET_PRE_ROUTING, priorityUntrusted, "hosts only", (*rules).addUntrusted)
	}
}

// addReports adds the network's chain that drops multicast listener reports at ports of pods. Without DropReports, it
// marks the chain for deletion.
func (rs *Ruleset) addReports(n *Network) {
	if !n.DropReports {
		rs.gone = append(rs.gone, InBridge(quietPrefix+n.Key))
		return
	}
	settings := "quiet groups 0x" + strconv.FormatUint(GatewayGroup, 16) + " and on"
	rs.addBridgeChain(quietPrefix+n.Key, unix.NF_INET_FORWARD, priorityBridged, settings, (*rules).addReports)
}

// addReports appends rules that drop multicast listener reports on their way out by pods' ports. At this hook, the
// bridge has already learned from the reports (multicast snooping).
func (list *rules) addReports() {
	list.begin("all but ICMPv6").isNotL4(unix.IPPROTO_ICMPV6).Return()
	list.begin("multicast listener reports to pods").
		isPodGroup(expr.MetaKeyOIFGROUP).isDiscovery(listenerReportTwo, listenerReportTwo).Drop()
}

func (rs *Ruleset) addBridgeChain(name string, hook uint32, priority int32, settings string, write func(*rules)) {
	rs.needTable(unix.NFPROTO_BRIDGE)
	rs.Chains = append(rs.Chains, filterChain(InBridge(name), hook, priority, settings, write))
}

// needTable adds the table of a family, unless the ruleset already has it.
func (rs *Ruleset) needTable(family uint8) {
	if !slices.Contains(rs.tables, family) {
		rs.tables = append(rs.tables, family)
	}
}
