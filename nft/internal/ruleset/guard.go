package ruleset

import (
	"slices"
	"strconv"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// The guard says what a port of a bridge may say: it holds the pod behind it to its own MAC and
// addresses, and keeps it from passing for a server or a router (GuardedPort).
//
// The chain guard sees frames as they come in by a port, before the bridge learns from them and before other rules,
// and checks their Ethernet, ARP, IP and neighbour discovery: so no pod passes for the host or the router. A port
// that is not guarded costs two looks at sets. It drops frames with any VLAN tag, and all protocols but IP and ARP:
// those of bridges (STP, LLDP), PPPoE and so on. The chain untrusted keeps those that are to be nothing but hosts
// from passing for servers and routers: of DHCP and DHCPv6, of multicast, and by redirects. The chains groups and
// from-pods hold for every port whose name begins with "veth".
//
// A guard does not limit how often: a pod may ask DHCP servers for any number of addresses, under any client
// identifier, which a rule cannot read. Nor does it read what is said by name, of mDNS, LLMNR or NetBIOS, or
// routing protocols over TCP and UDP.

const quietPrefix = "quiet-"

// Priorities in the bridge family, whose hooks have the numbers of the others' (uapi linux/netfilter_bridge.h).
const (
	// Before other tables, and before bridged packets are shown to iptables.
	priorityGuard = -300
	// The others are right behind the guard, in this order.
	priorityUntrusted = priorityGuard + 1
	priorityFromPods  = priorityUntrusted + 1

	priorityBridged = -200 // "filter", by nft's names for the family
)

// PodGroup is the group of links (IFLA_GROUP) that ports of pods have to be in for the rules
// about multicast queries and listener reports to say something of them. One that is taken out
// of it, by `ip link set PORT group 0`, gets all reports again, as a pod needs that is a
// multicast router.
const PodGroup = 0x746f

// addGuard adds the chains that guard the network's pods: the same for all networks. Without it, chains that are
// there may be another network's too, and go with the table.
func (rs *Ruleset) addGuard(n *Network) {
	if n.Groups || n.Guard {
		rs.addBridgeChain("groups", unix.NF_INET_PRE_ROUTING, priorityGuard, "link-local groups", (*rules).addGroups)
		// This one sees frames that the bridge hands to the host.
		rs.addBridgeChain("groups-input", unix.NF_INET_LOCAL_IN, priorityGuard, "groups, servers", (*rules).addTowardHost)
		rs.addBridgeChain("from-pods", unix.NF_INET_PRE_ROUTING, priorityFromPods, "tags, queries", (*rules).addFromPods)
	}
	if n.Guard {
		rs.addBridgeChain("guard", unix.NF_INET_PRE_ROUTING, priorityGuard, "spoof guard, or MAC alone", (*rules).addGuard)
		rs.addBridgeChain("untrusted", unix.NF_INET_PRE_ROUTING, priorityUntrusted, "hosts only", (*rules).addUntrusted)
	}
}

// addReports adds the network's chain that keeps the multicast listener reports of others from the
// ports in PodGroup, or has it removed.
func (rs *Ruleset) addReports(n *Network) {
	if !n.DropReports {
		rs.gone = append(rs.gone, InBridge(quietPrefix+n.Key))
		return
	}
	settings := "quiet groups 0x" + strconv.FormatUint(GatewayGroup, 16) + " and on"
	rs.addBridgeChain(quietPrefix+n.Key, unix.NF_INET_FORWARD, priorityBridged, settings, (*rules).addReports)
}

// addReports comes behind the bridge's own look at reports (multicast snooping).
func (list *rules) addReports() {
	list.add("all but ICMPv6", func(x expressions) {
		x.Meta(expr.MetaKeyL4PROTO, nftnl.First)
		x.Compare(expr.CmpOpNeq, []byte{unix.IPPROTO_ICMPV6})
		x.Leave()
	})
	list.add("multicast listener reports to pods", func(x expressions) {
		x.isPodGroup(expr.MetaKeyOIFGROUP)
		x.isDiscovery(listenerReportTwo, listenerReportTwo)
		x.Drop()
	})
}

func (rs *Ruleset) addBridgeChain(name string, hook uint32, priority int32, settings string, write func(*rules)) {
	rs.needTable(unix.NFPROTO_BRIDGE)
	rs.Chains = append(rs.Chains, Chain{
		Place: InBridge(name), Kind: "filter", Hook: hook, Priority: priority, settings: settings, write: write,
	})
}

// needTable has the table of a family made.
func (rs *Ruleset) needTable(family uint8) {
	if !slices.Contains(rs.tables, family) {
		rs.tables = append(rs.tables, family)
	}
}
