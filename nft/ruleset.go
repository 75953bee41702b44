package nft

import (
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/nft/guard"
)

// The names of our table and of what is in it. Chains and sets that belong to a
// network have its key in their names.
const (
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
	of     *Network
	table  tableName
	tables []uint8 // by their families
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
	settings string       // what its rules depend on, in short
	write    func(*rules) // makes them, unless they are of package guard
	guard    func() []guard.Rule
}

// rules gives the chain's. A look at whether they are there does without: see comment.
func (ch *chain) rules() []rule {
	var list rules
	if ch.guard == nil {
		ch.write(&list)
		return list
	}
	for _, r := range ch.guard() {
		list.add(r.Comment, func(x expressions) {
			for _, step := range r.Steps {
				x.Add(step)
			}
		})
	}
	return list
}

// rule has a comment that says what it is for.
type rule struct {
	comment string
	write   func(expressions)
}

// rules are those of a chain, in their order.
type rules []rule

// add appends a rule. The comment is to be one of its chain's own, for Check.
func (list *rules) add(comment string, write func(expressions)) {
	*list = append(*list, rule{comment, write})
}

// rulesVersion is raised with every change of the rules that are made from the
// same settings; a test knows the rules of each version.
const rulesVersion = 5

// natRulesVersion is that of chains that translate, which have one of their own. While such
// a chain is made anew, established connections that are translated lose a packet now and
// then, which those of other chains do not: so an upgrade leaves them alone if it can.
const natRulesVersion = 3

// version is that of the chain's rules.
func (ch *chain) version() int {
	if ch.kind == "nat" {
		return natRulesVersion
	}
	return rulesVersion
}

// comment is that of a chain with so many rules. It tells a chain of another version,
// or made with other settings, apart, and the number one whose rules have been changed
// since: so one look at the chain does for all its rules, and nobody has to make them
// for it. What has the right version and settings had the right number, too: a chain
// and its comment are made once.
func (ch *chain) comment(rules int) string {
	return "tombolo rules " + strconv.Itoa(ch.version()) + ", " + ch.settings + ", " + strconv.Itoa(rules) + " in all"
}

// Priorities by the names that nft has for them.
const (
	priorityRaw             = -300
	priorityDestinationNAT  = -100
	priorityBeforeFilter    = nftnl.PriorityForward
	priorityBeforeSourceNAT = prioritySourceNAT - 1
	prioritySourceNAT       = 100
	// priorityLast is behind every other that is in use in postrouting, so that
	// nobody there sees the bit.
	priorityLast = 300
)

// sharedSets are what rules of all networks look into.
func sharedSets() []set {
	pods := []set{
		{place: inInet(pods4Set), keyType: nftnl.TypeIfname<<nftnl.TypeBits | nftnl.TypeIPv4, keyLen: pods4Len},
		{place: inInet(pods6Set), keyType: nftnl.TypeIfname<<nftnl.TypeBits | nftnl.TypeIPv6, keyLen: pods6Len},
		{place: inInet(portsSet), keyType: nftnl.TypeIfname<<nftnl.TypeBits | nftnl.TypeEther, keyLen: portsLen},
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
		of: n, table: c.table, tables: []uint8{unix.NFPROTO_INET},
		chains:  append([]chain{forward(c.mark), unmark(c.mark)}, portChains(c.mark)...),
		network: key, bridge: n.bridgeElements(), bridgeComment: n.bridgeComment(),
	}
	if n.Masquerade {
		rs.chains = append(rs.chains, masquerade(n, key))
	} else {
		// The sets may stay: what is in them belongs to endpoints, not to rules.
		rs.gone = append(rs.gone, inInet(masqueradePrefix+key))
	}
	rs.addGuard(n)
	rs.addDedup(n, key)
	rs.addReports(n, key)
	return rs, nil
}

// sets are those that the rules look into, and that endpoints have elements in.
func (rs *ruleset) sets() []set {
	list := sharedSets()
	if rs.of.Masquerade {
		list = append(list,
			set{place: inInet(masqueradeSet(true, rs.network)), keyType: nftnl.TypeIPv4, keyLen: addr4Len},
			set{place: inInet(masqueradeSet(false, rs.network)), keyType: nftnl.TypeIPv6, keyLen: addr6Len})
	}
	if rs.of.Guard {
		list = append(list, guardSets()...)
	}
	return list
}

// forward admits nothing by itself: it says with a mark bit what may be admitted,
// to a rule in whatever chain would drop it otherwise.
func forward(mark uint32) chain {
	return chain{
		place: inInet(forwardChain), kind: "filter", hook: unix.NF_INET_FORWARD, priority: priorityBeforeFilter,
		settings: markSettings(mark), write: func(list *rules) { list.addForward(mark) },
	}
}

func (list *rules) addForward(mark uint32) {
	const (
		in, out  = expr.MetaKeyIIFNAME, expr.MetaKeyOIFNAME
		ip, link = expr.PayloadBaseNetworkHeader, expr.PayloadBaseLLHeader
		linkDst  = 0 // offsets in the Ethernet header
		linkSrc  = 6
	)
	// A bit that another program set would admit what was never looked at here.
	list.add("clear the mark bit", func(x expressions) { x.clearMark(mark) })
	list.addPolicies()
	for _, f := range families() {
		list.add("mark what pods send, "+f.name, func(x expressions) {
			x.is(f)
			x.port(in, ip, f.src, f.addrLen)
			x.Lookup(f.pods)
			x.addMark(mark)
		})
	}
	list.add("mark what pods without addresses send", func(x expressions) {
		x.isEthernet()
		x.port(in, link, linkSrc, etherLen)
		x.Lookup(portsSet)
		x.addMark(mark)
	})
	for _, f := range families() {
		list.add("mark replies to pods, "+f.name, func(x expressions) {
			x.isReply()
			x.is(f)
			x.port(out, ip, f.dst, f.addrLen)
			x.Lookup(f.pods)
			x.addMark(mark)
		})
	}
	// Only frames that are bridged through this hook still carry a pod's MAC here.
	list.add("mark replies to pods without addresses", func(x expressions) {
		x.isReply()
		x.isEthernet()
		x.port(out, link, linkDst, etherLen)
		x.Lookup(portsSet)
		x.addMark(mark)
	})
	// Connections that reach the same port of a pod by no published one stay under
	// the rules of whoever drops them.
	for _, f := range families() {
		list.add("mark what goes to published ports, "+f.name, func(x expressions) {
			x.isRedirected()
			x.is(f)
			x.podPort(f)
			x.Lookup(f.published)
			x.addMark(mark)
		})
	}
	list.add("mark what stays on a bridge of ours", func(x expressions) {
		x.bridged()
		x.Lookup(bridgesSet)
		x.addMark(mark)
	})
}

// unmark keeps the bit from what comes after the firewall.
func unmark(mark uint32) chain {
	return chain{
		place: inInet(unmarkChain), kind: "filter", hook: unix.NF_INET_POST_ROUTING, priority: priorityLast,
		settings: markSettings(mark),
		write: func(list *rules) {
			list.add("clear the mark bit", func(x expressions) { x.clearMark(mark) })
		},
	}
}

func markSettings(mark uint32) string { return "mark 0x" + strconv.FormatUint(uint64(mark), 16) }

// masquerade is a base chain of the network's own, so that networks never touch
// each other's rules.
func masquerade(n *Network, key string) chain {
	settings := fnv.New32a()
	for _, f := range families() {
		for _, p := range n.exempt(f.is4()) {
			settings.Write(p.AppendTo(nil))
			settings.Write([]byte{' '})
		}
	}
	return chain{
		place: inInet(masqueradePrefix + key), kind: "nat", hook: unix.NF_INET_POST_ROUTING, priority: prioritySourceNAT,
		settings: fmt.Sprintf("prefixes %08x", settings.Sum32()),
		write:    func(list *rules) { list.addMasquerade(n, key) },
	}
}

func (list *rules) addMasquerade(n *Network, key string) {
	for _, f := range families() {
		exempt := n.exempt(f.is4())
		if slices.Contains(exempt, f.all) {
			list.add("never masquerade "+f.name, func(x expressions) {
				x.is(f)
				x.Leave()
			})
			continue
		}
		list.add("not sent by pods of this network, "+f.name, func(x expressions) {
			x.is(f)
			x.Payload(expr.PayloadBaseNetworkHeader, f.src, f.addrLen, nftnl.First)
			x.LookupNone(masqueradeSet(f.is4(), key))
			x.Leave()
		})
		// It was sent to the host, and is elsewhere only by where the port leads.
		list.add("pods keep their address towards published ports, "+f.name, func(x expressions) {
			x.isRedirected()
			x.is(f)
			x.podPort(f)
			x.Lookup(f.published)
			x.Leave()
		})
		for _, p := range exempt {
			list.add("pods keep their address towards "+p.String(), func(x expressions) {
				x.isTo(f, p)
				x.Leave()
			})
		}
		list.add("multicast, "+f.name, func(x expressions) {
			x.isTo(f, f.multicast)
			x.Leave()
		})
		if f.is4() {
			list.add("broadcast", func(x expressions) {
				x.isTo(f, netip.PrefixFrom(netip.AddrFrom4([4]byte{255, 255, 255, 255}), 32))
				x.Leave()
			})
		}
	}
	list.add("masquerade what pods send to elsewhere", expressions.masquerade)
}
