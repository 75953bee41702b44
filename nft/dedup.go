package nft

import (
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
	"slices"
	"sort"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// Dedup is a subnet of a promiscuous bridge whose pods would get packets twice.
//
// What pods of such a bridge send to a service's address, which is changed to that of
// another pod of the bridge, takes two ways where the bridge calls iptables
// (Network.NFCall): the bridge forwards it by itself, and the host, which sees a copy,
// routes it back to the bridge. The second copy is dropped where it leaves the bridge: it
// comes from the bridge's own MAC, with a pod's address. So does everything that the
// host alone forwards between pods of the subnet: where the bridge does not call
// iptables or is not promiscuous, and where the service's address is the host's own,
// as IPVS has it, there is no first copy, and dedup drops all. Pods with hairpin
// ports need no promiscuous bridge.
type Dedup struct {
	// BridgeMAC is the bridge's.
	BridgeMAC net.HardwareAddr
	// Gateway is the host's address on the bridge, from which it may send to pods. For
	// more than one of them, the rest is given again.
	Gateway netip.Addr
	// Subnet has the pods' addresses, of the same family; its host bits do not matter.
	Subnet netip.Prefix
}

func (d *Dedup) check() error {
	switch {
	case len(d.BridgeMAC) != etherLen:
		return invalid("dedup: %q is no MAC of a bridge", d.BridgeMAC)
	case !d.Subnet.IsValid() || d.Subnet.Addr().Is4In6() || d.Subnet.Bits() == 0:
		return invalid("dedup: subnet %v", d.Subnet)
	case d.Gateway.Is4() != d.Subnet.Addr().Is4() || !d.Gateway.IsValid() || d.Gateway.Zone() != "" || d.Gateway.Is4In6():
		return invalid("dedup: gateway %v of subnet %v", d.Gateway, d.Subnet)
	}
	return nil
}

const dedupPrefix = "dedup-"

// checkDedup says what is wrong with the network's.
func (n *Network) checkDedup() error {
	for i := range n.Dedup {
		if err := n.Dedup[i].check(); err != nil {
			return fmt.Errorf("network %s: %w", n.Name, err)
		}
	}
	return nil
}

// addDedup adds the network's chain against packets that come twice, or has it
// removed.
func (rs *ruleset) addDedup(n *Network, key string) {
	if len(n.Dedup) == 0 {
		rs.gone = append(rs.gone, inBridge(dedupPrefix+key))
		return
	}
	rs.needTable(unix.NFPROTO_BRIDGE)
	rs.chains = append(rs.chains, dedup(n, key))
}

// The hook of what the bridge itself sends, by each of its ports.
const bridgeOutput = unix.NF_INET_LOCAL_OUT

// dedup is a base chain of the network's own.
func dedup(n *Network, key string) chain {
	ds := normalDedup(n.Dedup)
	settings := fnv.New32a()
	for _, d := range ds {
		fmt.Fprintf(settings, "%s %s %s ", d.BridgeMAC, d.Gateway, d.Subnet)
	}
	return chain{
		place: inBridge(dedupPrefix + key), kind: "filter", hook: bridgeOutput,
		settings: fmt.Sprintf("dedup %08x", settings.Sum32()), write: func(list *rules) { list.addDedup(ds) },
	}
}

// addDedup puts what gateways send before what is dropped of any subnet, since it may
// be within several.
func (list *rules) addDedup(ds []Dedup) {
	once := func(comment string, write func(expressions)) {
		if !slices.ContainsFunc(*list, func(r rule) bool { return r.comment == comment }) {
			list.add(comment, write)
		}
	}
	for _, d := range ds {
		once(fmt.Sprintf("sent by gateway %s at %s", d.Gateway, d.BridgeMAC), func(x expressions) {
			f := familyOf(d.Gateway)
			x.isSentBy(d.BridgeMAC)
			x.isProtocol(etherTypeOf(d.Subnet))
			x.inPrefix(f.src, netip.PrefixFrom(d.Gateway, d.Gateway.BitLen()))
			x.Leave()
		})
	}
	for _, d := range ds {
		// Between subnets, the host is the only way.
		once(fmt.Sprintf("a copy of what the bridge forwards within %s at %s", d.Subnet, d.BridgeMAC), func(x expressions) {
			f := familyOf(d.Gateway)
			x.isSentBy(d.BridgeMAC)
			x.isProtocol(etherTypeOf(d.Subnet))
			x.inPrefix(f.src, d.Subnet)
			x.inPrefix(f.dst, d.Subnet)
			x.Drop()
		})
	}
}

// normalDedup gives the same for whatever means the same.
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

func etherTypeOf(p netip.Prefix) uint16 {
	if p.Addr().Is4() {
		return unix.ETH_P_IP
	}
	return unix.ETH_P_IPV6
}

// isSentBy holds for what a bridge of a MAC sends out by a pod's port.
func (x expressions) isSentBy(mac net.HardwareAddr) {
	const podPorts, etherSource = "veth", 6
	x.Meta(expr.MetaKeyOIFNAME, nftnl.First)
	x.Compare(expr.CmpOpEq, []byte(podPorts)) // as far as it goes: nft's "veth*"
	x.Payload(expr.PayloadBaseLLHeader, etherSource, etherLen, nftnl.First)
	x.Compare(expr.CmpOpEq, mac)
}

// isProtocol holds for frames of a type, behind a VLAN tag too.
func (x expressions) isProtocol(typ uint16) {
	x.Meta(expr.MetaKeyPROTOCOL, nftnl.First)
	x.Compare(expr.CmpOpEq, number16(typ))
}
