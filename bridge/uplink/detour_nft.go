package uplink

import (
	"encoding/binary"
	"math"
	"net"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

const (
	chainName = "in"
	// chainPriority is behind all others: what an operator filters at the NIC's ingress
	// stays filtered.
	chainPriority = math.MaxInt32
)

// Fields of headers, in bytes.
const (
	etherDestination, etherAddrLen = 0, 6 // struct ethhdr, include/uapi/linux/if_ether.h
	etherType, etherTypeLen        = 12, 2
	nextHeader, nextHeaderLen      = 6, 1 // struct ipv6hdr, include/uapi/linux/ipv6.h
	destination6, addr6Len         = 24, 16
)

// name is how errors name the detour's table.
func (d detour) name() nl.Name { return nl.Name("netdev " + d.table()) }

// addTable is, for the NIC eth0 of index 2,
//
//	table netdev tombolo-uplink-2 {
//		chain in {
//			type filter hook ingress device "eth0" priority 2147483647; policy accept;
//			ether daddr 02:00:0a:00:00:05 ether type ip fwd to "tombo2"
//			ether daddr 02:00:0a:00:00:05 ip6 nexthdr != ipv6-icmp ip6 daddr != fe80::/10 fwd to "tombo2"
//		}
//	}
func (d detour) addTable(nic string, mac net.HardwareAddr, peer int) *nl.Batch {
	t := nftnl.Begin(nil)
	add := func(op string, msg uint16, attrs ...netlink.Attribute) {
		t.Add(op, d.name(), unix.NFPROTO_NETDEV, msg, netlink.Create|netlink.Excl, attrs...)
	}
	addRule := func(write func(*nftnl.Expressions)) {
		t.AddRule("add rule to table", d.name(), unix.NFPROTO_NETDEV, netlink.Append, "", write,
			nftnl.String(unix.NFTA_RULE_TABLE, d.table()), nftnl.String(unix.NFTA_RULE_CHAIN, chainName))
	}
	add("add table", unix.NFT_MSG_NEWTABLE, nftnl.String(unix.NFTA_TABLE_NAME, d.table()))
	add("add chain of table", unix.NFT_MSG_NEWCHAIN,
		nftnl.String(unix.NFTA_CHAIN_TABLE, d.table()), nftnl.String(unix.NFTA_CHAIN_NAME, chainName),
		nftnl.Nest(unix.NFTA_CHAIN_HOOK,
			nftnl.Uint32(unix.NFTA_HOOK_HOOKNUM, unix.NF_NETDEV_INGRESS), nftnl.Uint32(unix.NFTA_HOOK_PRIORITY, chainPriority),
			nftnl.String(unix.NFTA_HOOK_DEV, nic)),
		nftnl.String(unix.NFTA_CHAIN_TYPE, "filter"))
	addRule(func(x *nftnl.Expressions) {
		sentTo(x, mac, unix.ETH_P_IP)
		forward(x, peer)
	})
	addRule(func(x *nftnl.Expressions) {
		sentTo(x, mac, unix.ETH_P_IPV6)
		x.Payload(expr.PayloadBaseNetworkHeader, nextHeader, nextHeaderLen, nftnl.First)
		x.Compare(expr.CmpOpNeq, []byte{unix.IPPROTO_ICMPV6})
		x.Payload(expr.PayloadBaseNetworkHeader, destination6, addr6Len, nftnl.First)
		x.Mask(append([]byte{0xff, 0xc0}, make([]byte, addr6Len-2)...), nil)
		x.Compare(expr.CmpOpNeq, append([]byte{0xfe, 0x80}, make([]byte, addr6Len-2)...)) // fe80::/10
		forward(x, peer)
	})
	return t.End()
}

// delTable deletes the table and all that is in it; the error is ENOENT where there is
// none.
func (d detour) delTable() *nl.Batch {
	t := nftnl.Begin(nil)
	t.Add("delete table", d.name(), unix.NFPROTO_NETDEV, unix.NFT_MSG_DELTABLE, 0, nftnl.String(unix.NFTA_TABLE_NAME, d.table()))
	return t.End()
}

// sentTo ends the rule unless a frame is for a MAC, and of a type. A VLAN tag that the
// NIC has taken off is still the type here. That the NIC is Ethernet is known, but not to
// nft, which lists what follows as bytes without it.
func sentTo(x *nftnl.Expressions, mac net.HardwareAddr, typ uint16) {
	x.Meta(expr.MetaKeyIIFTYPE, nftnl.First)
	x.Compare(expr.CmpOpEq, binary.NativeEndian.AppendUint16(nil, unix.ARPHRD_ETHER))
	x.Payload(expr.PayloadBaseLLHeader, etherDestination, etherAddrLen, nftnl.First)
	x.Compare(expr.CmpOpEq, mac)
	x.Payload(expr.PayloadBaseLLHeader, etherType, etherTypeLen, nftnl.First)
	x.Compare(expr.CmpOpEq, binary.BigEndian.AppendUint16(nil, typ))
}

// forward sends the frame out by a link (nft_fwd_netdev, Linux 4.3), whose index is in
// the machine's byte order.
func forward(x *nftnl.Expressions, link int) {
	x.Add(&expr.Immediate{Register: uint32(nftnl.First), Data: binary.NativeEndian.AppendUint32(nil, uint32(link))})
	x.AddOwn("fwd", nftnl.Uint32(unix.NFTA_FWD_SREG_DEV, uint32(nftnl.First)))
}
