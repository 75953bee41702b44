package uplink

import (
	"encoding/binary"
	"math"
	"net"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// nfTable is a transaction of nf_tables about one table of the family netdev: the kernel
// makes all of its changes or none. The attributes of its messages are those of
// include/uapi/linux/netfilter/nf_tables.h.
type nfTable struct {
	b    nl.Batch
	name string
}

// nfHeader appends struct nfgenmsg (include/uapi/linux/netfilter/nfnetlink.h).
func nfHeader(e *nl.Encoder, family uint8, resource uint16) {
	e.Raw([]byte{family, unix.NFNETLINK_V0, byte(resource >> 8), byte(resource)})
}

// transaction puts changes between the messages that begin and end one.
func (d detour) transaction(change func(*nfTable)) *nl.Batch {
	t := &nfTable{name: d.table()}
	edge := func(kind uint16) {
		t.b.Silent("change", nl.Name("nf_tables"), kind, 0, func(e *nl.Encoder) { nfHeader(e, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES) })
	}
	edge(unix.NFNL_MSG_BATCH_BEGIN)
	change(t)
	edge(unix.NFNL_MSG_BATCH_END)
	return &t.b
}

// add appends a change. The first one's acknowledgement is enough to know that the
// kernel has worked through all.
func (t *nfTable) add(op string, msg, flags uint16, body func(*nl.Encoder)) {
	request := t.b.Silent
	if t.b.Len() == 1 { // what begins the transaction
		request = t.b.Request
	}
	request(op, nl.Name("netdev "+t.name), unix.NFNL_SUBSYS_NFTABLES<<8|msg, flags, func(e *nl.Encoder) {
		nfHeader(e, unix.NFPROTO_NETDEV, 0)
		body(e)
	})
}

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
	return d.transaction(func(t *nfTable) {
		t.add("add table", unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, func(e *nl.Encoder) {
			e.String(unix.NFTA_TABLE_NAME, t.name)
		})
		t.add("add chain of table", unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE|unix.NLM_F_EXCL, func(e *nl.Encoder) {
			e.String(unix.NFTA_CHAIN_TABLE, t.name)
			e.String(unix.NFTA_CHAIN_NAME, chainName)
			e.Nest(unix.NFTA_CHAIN_HOOK, func(e *nl.Encoder) {
				e.Uint32BE(unix.NFTA_HOOK_HOOKNUM, unix.NF_NETDEV_INGRESS)
				e.Uint32BE(unix.NFTA_HOOK_PRIORITY, chainPriority)
				e.String(unix.NFTA_HOOK_DEV, nic)
			})
			e.String(unix.NFTA_CHAIN_TYPE, "filter")
		})
		t.addRule(func(x nfExpressions) {
			x.sentTo(mac, unix.ETH_P_IP)
			x.forward(peer)
		})
		t.addRule(func(x nfExpressions) {
			x.sentTo(mac, unix.ETH_P_IPV6)
			x.load(unix.NFT_PAYLOAD_NETWORK_HEADER, nextHeader, nextHeaderLen)
			x.compare(unix.NFT_CMP_NEQ, []byte{unix.IPPROTO_ICMPV6})
			x.load(unix.NFT_PAYLOAD_NETWORK_HEADER, destination6, addr6Len)
			x.mask(append([]byte{0xff, 0xc0}, make([]byte, addr6Len-2)...))
			x.compare(unix.NFT_CMP_NEQ, append([]byte{0xfe, 0x80}, make([]byte, addr6Len-2)...)) // fe80::/10
			x.forward(peer)
		})
	})
}

func (t *nfTable) addRule(write func(nfExpressions)) {
	t.add("add rule to table", unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, func(e *nl.Encoder) {
		e.String(unix.NFTA_RULE_TABLE, t.name)
		e.String(unix.NFTA_RULE_CHAIN, chainName)
		e.Nest(unix.NFTA_RULE_EXPRESSIONS, func(e *nl.Encoder) { write(nfExpressions{e}) })
	})
}

// delTable deletes the table and all that is in it; the error is ENOENT where there is
// none.
func (d detour) delTable() *nl.Batch {
	return d.transaction(func(t *nfTable) {
		t.add("delete table", unix.NFT_MSG_DELTABLE, 0, func(e *nl.Encoder) { e.String(unix.NFTA_TABLE_NAME, t.name) })
	})
}

// nfExpressions are those of a rule. They all go by the first register.
type nfExpressions struct{ e *nl.Encoder }

func (x nfExpressions) add(name string, data func(*nl.Encoder)) {
	x.e.Nest(unix.NFTA_LIST_ELEM, func(e *nl.Encoder) {
		e.String(unix.NFTA_EXPR_NAME, name)
		e.Nest(unix.NFTA_EXPR_DATA, data)
	})
}

// sentTo ends the rule unless a frame is for a MAC, and of a type. A VLAN tag that the
// NIC has taken off is still the type here. That the NIC is Ethernet is known, but not to
// nft, which lists what follows as bytes without it.
func (x nfExpressions) sentTo(mac net.HardwareAddr, typ uint16) {
	x.add("meta", func(e *nl.Encoder) {
		e.Uint32BE(unix.NFTA_META_DREG, unix.NFT_REG_1)
		e.Uint32BE(unix.NFTA_META_KEY, unix.NFT_META_IIFTYPE)
	})
	x.compare(unix.NFT_CMP_EQ, binary.NativeEndian.AppendUint16(nil, unix.ARPHRD_ETHER))
	x.load(unix.NFT_PAYLOAD_LL_HEADER, etherDestination, etherAddrLen)
	x.compare(unix.NFT_CMP_EQ, mac)
	x.load(unix.NFT_PAYLOAD_LL_HEADER, etherType, etherTypeLen)
	x.compare(unix.NFT_CMP_EQ, binary.BigEndian.AppendUint16(nil, typ))
}

// load takes bytes of a header.
func (x nfExpressions) load(header, offset, length uint32) {
	x.add("payload", func(e *nl.Encoder) {
		e.Uint32BE(unix.NFTA_PAYLOAD_DREG, unix.NFT_REG_1)
		e.Uint32BE(unix.NFTA_PAYLOAD_BASE, header)
		e.Uint32BE(unix.NFTA_PAYLOAD_OFFSET, offset)
		e.Uint32BE(unix.NFTA_PAYLOAD_LEN, length)
	})
}

// mask keeps some bits of what was loaded.
func (x nfExpressions) mask(bits []byte) {
	x.add("bitwise", func(e *nl.Encoder) {
		e.Uint32BE(unix.NFTA_BITWISE_SREG, unix.NFT_REG_1)
		e.Uint32BE(unix.NFTA_BITWISE_DREG, unix.NFT_REG_1)
		e.Uint32BE(unix.NFTA_BITWISE_LEN, uint32(len(bits)))
		e.Nest(unix.NFTA_BITWISE_MASK, func(e *nl.Encoder) { e.Bytes(unix.NFTA_DATA_VALUE, bits) })
		e.Nest(unix.NFTA_BITWISE_XOR, func(e *nl.Encoder) { e.Bytes(unix.NFTA_DATA_VALUE, make([]byte, len(bits))) })
	})
}

// compare ends the rule unless the register is (or is not) the value.
func (x nfExpressions) compare(op uint32, value []byte) {
	x.add("cmp", func(e *nl.Encoder) {
		e.Uint32BE(unix.NFTA_CMP_SREG, unix.NFT_REG_1)
		e.Uint32BE(unix.NFTA_CMP_OP, op)
		e.Nest(unix.NFTA_CMP_DATA, func(e *nl.Encoder) { e.Bytes(unix.NFTA_DATA_VALUE, value) })
	})
}

// forward sends the frame out by a link (nft_fwd_netdev, Linux 4.3), whose index is in
// the machine's byte order.
func (x nfExpressions) forward(link int) {
	x.add("immediate", func(e *nl.Encoder) {
		e.Uint32BE(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_1)
		e.Nest(unix.NFTA_IMMEDIATE_DATA, func(e *nl.Encoder) {
			e.Bytes(unix.NFTA_DATA_VALUE, binary.NativeEndian.AppendUint32(nil, uint32(link)))
		})
	})
	x.add("fwd", func(e *nl.Encoder) { e.Uint32BE(unix.NFTA_FWD_SREG_DEV, unix.NFT_REG_1) })
}
