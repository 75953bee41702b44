package ruleset

import (
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"sort"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

const dedupPrefix = "dedup-"

// addDedup adds the network's chain that drops duplicate packets. If n.Dedup is empty, addDedup marks the chain for
// deletion.
func (rs *Ruleset) addDedup(n *Network) {
	if len(n.Dedup) == 0 {
		rs.gone = append(rs.gone, InBridge(dedupPrefix+n.Key))
		return
	}
	rs.needTable(unix.NFPROTO_BRIDGE)
	rs.Chains = append(rs.Chains, dedup(n))
}

// bridgeOutput is the hook for packets that the bridge itself sends. It runs once for each port.
const bridgeOutput = unix.NF_INET_LOCAL_OUT

// dedup returns the network's base chain that drops duplicate packets.
func dedup(n *Network) Chain {
	ds := normalDedup(n.Dedup)
	settings := fnv.New32a()
	for _, d := range ds {
		fmt.Fprintf(settings, "%s %s %s ", d.BridgeMAC, d.Gateway, d.Subnet)
	}
	return filterChain(InBridge(dedupPrefix+n.Key), bridgeOutput, 0, fmt.Sprintf("dedup %08x", settings.Sum32()),
		func(list *rules) { list.addDedup(ds) })
}

// addDedup appends the rules that drop duplicate packets. The rules that accept packets from gateways come before the
// rules that drop packets of a subnet, since a gateway may be in several subnets.
func (list *rules) addDedup(ds []Dedup) {
	once := func(comment string, write func(expressions)) {
		if !slices.ContainsFunc(*list, func(r Rule) bool { return r.Comment == comment }) {
			list.add(comment, write)
		}
	}
	for _, d := range ds {
		once(fmt.Sprintf("sent by gateway %s at %s", d.Gateway, d.BridgeMAC), func(x expressions) {
			own := netip.PrefixFrom(d.Gateway, d.Gateway.BitLen())
			x.isSentBy(&d).inPrefix(FamilyOf(d.Gateway).src, own).Return()
		})
	}

	for _, d := range ds {
		// Drop only packets within a subnet. Packets between subnets are no duplicates, since only the host forwards
		// them.
		once(fmt.Sprintf("a copy of what the bridge forwards within %s at %s", d.Subnet, d.BridgeMAC),
			func(x expressions) {
				f := FamilyOf(d.Gateway)
				x.isSentBy(&d).inPrefix(f.src, d.Subnet).inPrefix(f.dst, d.Subnet).Drop()
			})
	}
}

// normalDedup sorts the list and removes duplicates, so that lists with the same meaning produce the same rules.
func normalDedup(list []Dedup) []Dedup {
	list = slices.Clone(list)
	for i := range list {
		list[i].Subnet = list[i].Subnet.Masked()
	}
	sort.Slice(list, func(i, j int) bool { return compareDedups(list[i], list[j]) < 0 })
	return slices.CompactFunc(list, func(a, b Dedup) bool { return compareDedups(a, b) == 0 })
}

func compareDedups(a, b Dedup) int {
	if c := comparePrefixes(a.Subnet, b.Subnet); c != 0 {
		return c
	}
	if c := a.Gateway.Compare(b.Gateway); c != 0 {
		return c
	}
	return slices.Compare(a.BridgeMAC, b.BridgeMAC)
}

// isSentBy adds a match for packets of the subnet's family that leave by a pod's port with the bridge's MAC as
// source.
func (x expressions) isSentBy(d *Dedup) expressions {
	typ := uint16(unix.ETH_P_IPV6)
	if d.Subnet.Addr().Is4() {
		typ = unix.ETH_P_IP
	}
	return x.isPodPort(expr.MetaKeyOIFNAME).isAt(expr.PayloadBaseLLHeader, etherSource, d.BridgeMAC).isProtocol(typ)
}
