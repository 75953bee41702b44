package ruleset

import (
	"slices"
	"strconv"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// The guard restricts the frames that a bridge's port may send: it holds the pod behind the port to its own MAC and
// addresses, and keeps it from posing as a server or router (GuardedPort).
//
// The chain guard sees frames as they come in by a port, before the bridge learns from them and before other rules.
// It checks their Ethernet, ARP, IP and neighbour discovery, so no pod can pose as the host or the router. A port
// that is not guarded costs two set lookups. The chain drops frames with any VLAN tag, and all protocols except IP
// and ARP: bridge protocols (STP, LLDP), PPPoE and so on. The chain untrusted keeps pods that must only be hosts from
// posing as servers and routers: of DHCP and DHCPv6, of multicast, and by redirects. The chains groups and from-pods
// apply to every port whose name begins with "veth".
//
// A guard does not limit rates. A pod may ask DHCP servers for any number of addresses, with any client identifier,
// which a rule cannot read. Nor does the guard read names in mDNS, LLMNR or NetBIOS, or routing protocols over TCP
// and UDP.

const quietPrefix = "quiet-"

// Priorities in the bridge family, whose hooks have the same numbers as the others (uapi linux/netfilter_bridge.h).
const (
	// Before other tables, and before bridged packets are shown to iptables.
	priorityGuard = -300
	// The others follow the guard, in this order.
	priorityUntrusted = priorityGuard + 1
	priorityFromPods  = priorityUntrusted + 1

	priorityBridged = -200 // "filter" in nft's names for the family
)

// PodGroup is the link group (IFLA_GROUP) of the pods' ports that the rules for multicast queries and listener
// reports apply to. A port that is removed from it, by `ip link set PORT group 0`, receives all reports again, as a
// pod that is a multicast router needs.
const PodGroup = 0x746f

// addGuard adds the chains that guard the network's pods. All networks share them. Without a guard, existing chains
// stay, since they may belong to another network too. They are deleted with the table.
func (rs *Ruleset) addGuard(n *Network) {
	if n.Groups || n.Guard {
		rs.addBridgeChain("groups", unix.NF_INET_PRE_ROUTING, priorityGuard, "link-local groups", (*rules).addGroups)

		// This chain sees frames that the bridge passes to the host.
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

// addReports adds the network's chain that drops the multicast listener reports of others at ports in PodGroup, or
// marks the chain for removal.
func (rs *Ruleset) addReports(n *Network) {
	if !n.DropReports {
		rs.gone = append(rs.gone, InBridge(quietPrefix+n.Key))
		return
	}
	settings := "quiet groups 0x" + strconv.FormatUint(GatewayGroup, 16) + " and on"
	rs.addBridgeChain(quietPrefix+n.Key, unix.NF_INET_FORWARD, priorityBridged, settings, (*rules).addReports)
}

// addReports appends its rules. The hook is behind the bridge's own look at reports (multicast snooping).
func (list *rules) addReports() {
	list.rule("all but ICMPv6").isNotL4(unix.IPPROTO_ICMPV6).Leave()
	list.rule("multicast listener reports to pods").
		isPodGroup(expr.MetaKeyOIFGROUP).isDiscovery(listenerReportTwo, listenerReportTwo).Drop()
}

func (rs *Ruleset) addBridgeChain(name string, hook uint32, priority int32, settings string, write func(*rules)) {
	rs.needTable(unix.NFPROTO_BRIDGE)
	rs.Chains = append(rs.Chains, filterChain(InBridge(name), hook, priority, settings, write))
}

// needTable adds the table of a family.
func (rs *Ruleset) needTable(family uint8) {
	if !slices.Contains(rs.tables, family) {
		rs.tables = append(rs.tables, family)
	}
}
