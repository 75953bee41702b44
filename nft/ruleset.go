package nft

import (
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// The names of our table and of what is in it. Chains and sets that belong to a
// network have its key in their names.
const (
	tableName = "tombolo"

	pods4Set = "pods4"
	pods6Set = "pods6"
	portsSet = "ports"

	masquerade4Prefix = "masq4-"
	masquerade6Prefix = "masq6-"

	forwardChain     = "forward"
	unmarkChain      = "unmark"
	masqueradePrefix = "masq-"
)

func masqueradeSet(is4 bool, networkKey string) string {
	if is4 {
		return masquerade4Prefix + networkKey
	}
	return masquerade6Prefix + networkKey
}

// isMasqueradeSet says that a set is that of some network.
func isMasqueradeSet(name string) bool {
	return strings.HasPrefix(name, masquerade4Prefix) || strings.HasPrefix(name, masquerade6Prefix)
}

// ruleset is what there should be: what all networks share, and one network's own.
type ruleset struct {
	tables []uint8 // by their families
	sets   []set
	chains []chain
	// gone are chains that should not be there.
	gone []place
	// network is the key of the network, and bridge what it has in the sets of bridges,
	// with what comment.
	network       string
	bridge        []element
	bridgeComment string
}

// set is a plain hash set, or a map. It has no time-outs, intervals or verdicts:
// those make adding an element slower with each that is there.
type set struct {
	place
	keyType  uint32 // nft's number of the type, six bits for each part of a concatenation
	keyLen   uint32 // bytes
	dataType uint32 // of a map
	dataLen  uint32 // 0: it is no map
	// typeof is userdata for nft, where the type does not say enough.
	typeof []byte
}

func (s set) flags() uint32 {
	if s.dataLen > 0 {
		return unix.NFT_SET_MAP
	}
	return 0
}

// state is what the kernel tells of such a set.
func (s set) state() setState {
	return setState{s.flags(), s.keyType, s.keyLen, s.dataType, s.dataLen}
}

// chain is a base chain: the kernel calls it, whatever other tables do.
type chain struct {
	place
	kind     string // "filter" or "nat"
	hook     uint32 // unix.NF_INET_*
	priority int32
	settings string // what its rules depend on, in short
	rules    []rule
}

// rule has a comment that says what it is for.
type rule struct {
	comment string
	write   func(expressions)
}

// rulesVersion is raised with every change of the rules that are made from the
// same settings; a test knows the rules of each version.
const rulesVersion = 2

// comment tells a chain of another version, or made with other settings, apart: so
// one look at it does for all its rules.
func (ch *chain) comment() string {
	return "tombolo rules " + strconv.Itoa(rulesVersion) + ", " + ch.settings
}

// nft's numbers of its data types (enum datatypes in its include/datatype.h);
// the kernel only stores them.
const (
	typeFamily   = 2 // nf_proto
	typeInteger  = 4
	typeIPv4     = 7
	typeIPv6     = 8
	typeEther    = 9
	typeProtocol = 12 // inet_proto
	typePort     = 13 // inet_service
	typeIfname   = 41
	typeBits     = 6
)

// Priorities by the names that nft has for them.
const (
	priorityRaw             = -300
	priorityDestinationNAT  = -100
	priorityBeforeFilter    = -10
	priorityBeforeSourceNAT = prioritySourceNAT - 1
	prioritySourceNAT       = 100
	// priorityLast is behind every other that is in use in postrouting, so that
	// nobody there sees the bit.
	priorityLast = 300
)

// sharedSets are what rules of all networks look into.
func sharedSets() []set {
	pods := []set{
		{place: inInet(pods4Set), keyType: typeIfname<<typeBits | typeIPv4, keyLen: pods4Len},
		{place: inInet(pods6Set), keyType: typeIfname<<typeBits | typeIPv6, keyLen: pods6Len},
		{place: inInet(portsSet), keyType: typeIfname<<typeBits | typeEther, keyLen: portsLen},
	}
	return slices.Concat(pods, portSets(), bridgeSets())
}

// ruleset gives what there should be for a network.
func (c *Conn) ruleset(n *Network) (*ruleset, error) {
	if err := n.check(); err != nil {
		return nil, err
	}
	key := networkKey(n.Name)
	rs := &ruleset{
		tables: []uint8{unix.NFPROTO_INET}, sets: sharedSets(),
		chains:  append([]chain{forward(c.mark), unmark(c.mark)}, portChains()...),
		network: key, bridge: n.bridgeElements(), bridgeComment: n.bridgeComment(),
	}
	if n.Masquerade {
		rs.sets = append(rs.sets,
			set{place: inInet(masqueradeSet(true, key)), keyType: typeIPv4, keyLen: addr4Len},
			set{place: inInet(masqueradeSet(false, key)), keyType: typeIPv6, keyLen: addr6Len})
		rs.chains = append(rs.chains, masquerade(n, key))
	} else {
		// The sets may stay: what is in them belongs to endpoints, not to rules.
		rs.gone = append(rs.gone, inInet(masqueradePrefix+key))
	}
	rs.addGuard(n)
	rs.addDedup(n, key)
	return rs, nil
}

// add appends a rule. The comment is to be one of its chain's own, for Check.
func (ch *chain) add(comment string, write func(expressions)) {
	ch.rules = append(ch.rules, rule{comment, write})
}

// forward admits nothing by itself: it says with a mark bit what may be admitted,
// to a rule in whatever chain would drop it otherwise.
func forward(mark uint32) chain {
	const (
		in, out  = unix.NFT_META_IIFNAME, unix.NFT_META_OIFNAME
		ip, link = unix.NFT_PAYLOAD_NETWORK_HEADER, unix.NFT_PAYLOAD_LL_HEADER
		linkDst  = 0 // offsets in the Ethernet header
		linkSrc  = 6
	)
	ch := chain{
		place: inInet(forwardChain), kind: "filter", hook: unix.NF_INET_FORWARD, priority: priorityBeforeFilter,
		settings: markSettings(mark),
	}
	// A bit that another program set would admit what was never looked at here.
	ch.add("clear the mark bit", func(x expressions) { x.clearMark(mark) })
	ch.addPolicies()
	for _, f := range families() {
		ch.add("mark what pods send, "+f.name, func(x expressions) {
			x.is(f)
			x.port(in, ip, f.src, f.addrLen)
			x.lookup(f.pods)
			x.addMark(mark)
		})
	}
	ch.add("mark what pods without addresses send", func(x expressions) {
		x.isEthernet()
		x.port(in, link, linkSrc, etherLen)
		x.lookup(portsSet)
		x.addMark(mark)
	})
	for _, f := range families() {
		ch.add("mark replies to pods, "+f.name, func(x expressions) {
			x.isReply()
			x.is(f)
			x.port(out, ip, f.dst, f.addrLen)
			x.lookup(f.pods)
			x.addMark(mark)
		})
	}
	// Only frames that are bridged through this hook still carry a pod's MAC here.
	ch.add("mark replies to pods without addresses", func(x expressions) {
		x.isReply()
		x.isEthernet()
		x.port(out, link, linkDst, etherLen)
		x.lookup(portsSet)
		x.addMark(mark)
	})
	// Connections that reach the same port of a pod by no published one stay under
	// the rules of whoever drops them.
	for _, f := range families() {
		ch.add("mark what goes to published ports, "+f.name, func(x expressions) {
			x.isRedirected()
			x.is(f)
			x.podPort(f)
			x.lookup(f.published)
			x.addMark(mark)
		})
	}
	ch.add("mark what stays on a bridge of ours", func(x expressions) {
		x.bridged()
		x.lookup(bridgesSet)
		x.addMark(mark)
	})
	return ch
}

// unmark keeps the bit from what comes after the firewall.
func unmark(mark uint32) chain {
	ch := chain{
		place: inInet(unmarkChain), kind: "filter", hook: unix.NF_INET_POST_ROUTING, priority: priorityLast,
		settings: markSettings(mark),
	}
	ch.add("clear the mark bit", func(x expressions) { x.clearMark(mark) })
	return ch
}

func markSettings(mark uint32) string { return "mark 0x" + strconv.FormatUint(uint64(mark), 16) }

// masquerade is a base chain of the network's own, so that networks never touch
// each other's rules.
func masquerade(n *Network, key string) chain {
	ch := chain{place: inInet(masqueradePrefix + key), kind: "nat", hook: unix.NF_INET_POST_ROUTING, priority: prioritySourceNAT}
	settings := fnv.New32a()
	for _, f := range families() {
		exempt := n.exempt(f.is4())
		for _, p := range exempt {
			settings.Write(p.AppendTo(nil))
			settings.Write([]byte{' '})
		}
		if slices.Contains(exempt, f.all) {
			ch.add("never masquerade "+f.name, func(x expressions) {
				x.is(f)
				x.leave()
			})
			continue
		}
		ch.add("not sent by pods of this network, "+f.name, func(x expressions) {
			x.is(f)
			x.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, f.src, f.addrLen, first)
			x.lookupNone(masqueradeSet(f.is4(), key))
			x.leave()
		})
		// It was sent to the host, and is elsewhere only by where the port leads.
		ch.add("pods keep their address towards published ports, "+f.name, func(x expressions) {
			x.isRedirected()
			x.is(f)
			x.podPort(f)
			x.lookup(f.published)
			x.leave()
		})
		for _, p := range exempt {
			ch.add("pods keep their address towards "+p.String(), func(x expressions) {
				x.isTo(f, p)
				x.leave()
			})
		}
		ch.add("multicast, "+f.name, func(x expressions) {
			x.isTo(f, f.multicast)
			x.leave()
		})
		if f.is4() {
			ch.add("broadcast", func(x expressions) {
				x.isTo(f, netip.PrefixFrom(netip.AddrFrom4([4]byte{255, 255, 255, 255}), 32))
				x.leave()
			})
		}
	}
	ch.add("masquerade what pods send to elsewhere", expressions.masquerade)
	ch.settings = fmt.Sprintf("prefixes %08x", settings.Sum32())
	return ch
}
