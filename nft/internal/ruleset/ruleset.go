package ruleset

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// Names of sets and chains, and prefixes of such names. The key of a network follows each prefix.
const (
	Pods4Set = "pods4"
	Pods6Set = "pods6"
	PortsSet = "ports"

	masquerade4Prefix = "masq4-"
	masquerade6Prefix = "masq6-"

	forwardChain     = "forward"
	unmarkChain      = "unmark"
	masqueradePrefix = "masq-"
)

// MasqueradeSet returns the name of the set that contains the addresses, of one family, of a network's masqueraded
// pods.
func MasqueradeSet(is4 bool, networkKey string) string {
	if is4 {
		return masquerade4Prefix + networkKey
	}
	return masquerade6Prefix + networkKey
}

// IsMasqueradeSet reports whether name is a name that MasqueradeSet returns for some network.
func IsMasqueradeSet(name string) bool {
	return strings.HasPrefix(name, masquerade4Prefix) || strings.HasPrefix(name, masquerade6Prefix)
}

// masqueradeSet returns the definition of the set with a name from MasqueradeSet.
func masqueradeSet(name string) Set {
	if strings.HasPrefix(name, masquerade4Prefix) {
		return keySet(name, nftnl.TypeIPv4)
	}
	return keySet(name, nftnl.TypeIPv6)
}

// Ruleset is the intended content of the tables for one network: the objects that all networks share, and the
// network's own objects.
type Ruleset struct {
	of     *Network
	table  TableName
	tables []uint8 // the families with a table
	Chains []Chain
	// gone lists chains that must not exist.
	gone []Place
	// network is the key of the network. Bridge lists the network's elements in the sets of bridges.
	network string
	Bridge  []Element
}

// Set describes a set or a map. Our sets have no timeouts and no verdicts, because with these, adding an element takes
// longer as the set grows. Intervals have the same effect, so only the sets for egress policies and for callers of
// published ports have them.
type Set struct {
	Place
	setType
	// typeof is additional userdata that describes the key to nft, if KeyType is not sufficient.
	typeof []byte
}

// setType describes the elements of a set, as the message NFT_MSG_NEWSET does.
type setType struct {
	flags    uint32
	KeyType  uint32 // nft's number of the type, six bits for each part of a concatenation
	KeyLen   uint32 // length of a key in bytes
	DataType uint32 // nft's number of the data's type; 0 if the set is no map
	DataLen  uint32 // length of the data in bytes; 0 if the set is no map
}

// hasIntervals reports whether each element of the set is a range of keys, from a first to a last key.
func (s setType) hasIntervals() bool { return s.flags&unix.NFT_SET_INTERVAL != 0 }

// intervalSet returns the definition of a set of intervals. types are the types of the parts of its keys.
func intervalSet(name string, types ...uint32) Set {
	s := keySet(name, types...)
	s.flags = unix.NFT_SET_INTERVAL | setConcat
	return s
}

// keySet returns the definition of a set of family inet. types are the types of the parts of its keys.
func keySet(name string, types ...uint32) Set { return setOf(InInet(name), types...) }

// setOf returns the definition of a set. types are the types of the parts of its keys.
func setOf(at Place, types ...uint32) Set {
	s := Set{Place: at}
	s.KeyType, s.KeyLen = concat(types...)
	return s
}

// concat returns the type of a value with parts of the given types, and the length of the value in bytes.
func concat(types ...uint32) (typ, length uint32) {
	for _, part := range types {
		typ = typ<<nftnl.TypeBits | part
		length += (uint32(typeLen(part)) + Slot - 1) / Slot * Slot
	}
	return typ, length
}

// Chain describes a base chain. The kernel calls it at a hook, in addition to the chains of other tables.
type Chain struct {
	Place
	Kind     string // "filter" or "nat"
	Hook     uint32 // unix.NF_INET_*, or unix.NF_NETDEV_*
	Device   string // the link, in family netdev
	Priority int32
	settings string       // a short form of the settings that the rules depend on
	write    func(*rules) // writes the rules
}

// Rules returns the intended rules of the chain. Conn.Ready of package nft does not need them: see Comment.
func (ch *Chain) Rules() []Rule {
	var list rules
	ch.write(&list)
	return list
}

// Rule is a rule of a chain. Its comment is unique in the chain.
type Rule struct {
	Comment string
	Steps   []expr.Any
}

// rules is a list of the rules of a chain, in order.
type rules []Rule

// begin appends a rule without expressions. The caller adds expressions to the result before it appends another
// rule.
func (list *rules) begin(comment string) expressions {
	*list = append(*list, Rule{Comment: comment})
	return expressions{(*nftnl.Expressions)(&(*list)[len(*list)-1].Steps)}
}

// addFamilies appends one rule for each family, with the expressions that write adds.
func (list *rules) addFamilies(comment string, write func(expressions, Family)) {
	for _, f := range Families() {
		write(list.begin(comment+", "+f.name), f)
	}
}

// span describes a rule that matches the numbers between from and to, both included.
type span struct {
	comment  string
	from, to uint16
}

// addSpans appends one rule for each span, with the expressions that write adds.
func (list *rules) addSpans(spans []span, write func(expressions, span)) {
	for _, s := range spans {
		write(list.begin(s.comment), s)
	}
}

// rulesVersion is the version of the rules. It increases with every change of the rules that the same settings
// produce. A test contains the rules of each version.
const rulesVersion = 1

// Comment returns the comment of a chain that contains the given number of rules. It contains the version, the settings
// and this number. With a different version or different settings, the chain has other rules. If the number differs
// from the chain's actual number of rules, someone added or deleted rules. So a request for the chain alone shows most
// changes, without a listing of the rules. The kernel never changes a comment after the chain was created.
func (ch *Chain) Comment(rules int) string {
	return "tombolo rules " + strconv.Itoa(rulesVersion) + ", " + ch.settings + ", " + strconv.Itoa(rules) + " in all"
}

// Priorities of chains at a hook. The names follow those of nft.
const (
	priorityRaw             = -300
	priorityDestinationNAT  = -100
	priorityBeforeFilter    = nftnl.PriorityForward
	priorityBeforeSourceNAT = prioritySourceNAT - 1
	prioritySourceNAT       = 100
	// priorityUnmark is before mangle in postrouting, where other programs save a packet's mark in its connection.
	priorityUnmark = -160
)

// podSets returns the sets with the pods of all networks.
func podSets() []Set {
	return []Set{
		keySet(Pods4Set, nftnl.TypeIfname, nftnl.TypeIPv4), keySet(Pods6Set, nftnl.TypeIfname, nftnl.TypeIPv6),
		keySet(PortsSet, nftnl.TypeIfname, nftnl.TypeEther),
	}
}

// New returns the intended ruleset of a network. table is the name of the tables, and mark is the mark bit.
func New(n *Network, table TableName, mark uint32) *Ruleset {
	rs := &Ruleset{
		of: n, table: table, network: n.Key, Bridge: n.bridgeElements(),
		tables: make([]uint8, 0, 3), Chains: make([]Chain, 0, 16),
	}
	rs.filter(InInet(forwardChain), unix.NF_INET_FORWARD, priorityBeforeFilter, markSettings(mark),
		func(list *rules) { list.addForward(mark) })
	rs.filter(InInet(unmarkChain), unix.NF_INET_POST_ROUTING, priorityUnmark, markSettings(mark),
		func(list *rules) { list.addUnmark(mark) })
	rs.addPorts(mark)

	rs.addMasquerade(n)
	if n.PortSNAT {
		rs.nat(portSNATChain, unix.NF_INET_POST_ROUTING, priorityBeforeSourceNAT-1, sharedSettings,
			(*rules).addPortSNAT)
	}

	// The firewall has the following chains only after a network has needed them.
	if n.Internal {
		rs.filter(InInet(internalChain), unix.NF_INET_FORWARD, priorityBeforeFilter-1, sharedSettings,
			(*rules).addInternal)
	}

	if n.Egress != nil {
		rs.filter(InInet(egressChain), unix.NF_INET_PRE_ROUTING, priorityEgress, sharedSettings, (*rules).addEgress)
	}

	if n.PodEgress {
		rs.filter(InInet(podEgressChain), unix.NF_INET_PRE_ROUTING, priorityEgress+1, sharedSettings,
			(*rules).addPodEgress)
	}

	rs.addPodsOnly(n.Closed, mark)
	rs.addGuard(n)
	rs.addDedup(n)
	rs.addReports(n)
	rs.addShare(n, mark)
	return rs
}

// Sets returns the sets that the network's rules and endpoints need.
func (rs *Ruleset) Sets() []Set {
	list := slices.Concat(podSets(), portSets(), BridgeSets())
	masquerade := func(f Family) Set { return masqueradeSet(MasqueradeSet(f.Is4(), rs.network)) }
	for _, part := range [...]struct {
		isNeeded bool
		sets     func() []Set
	}{
		{rs.of.Masquerade, func() []Set { return setsOfBoth(masquerade) }},
		{rs.of.PortSNAT, portSNATSets}, {rs.of.Internal, internalSets}, {rs.of.Egress != nil, egressSets},
		{rs.of.PodEgress, podEgressSets}, {rs.of.Guard, guardSets},
		{rs.of.Share != nil, func() []Set { return []Set{shareSet(ShareSet(rs.of.Bridge))} }},
	} {
		if part.isNeeded {
			list = append(list, part.sets()...)
		}
	}

	return list
}

// filter adds a chain of kind filter, and the table that it needs.
func (rs *Ruleset) filter(at Place, hook uint32, priority int32, settings string, write func(*rules)) {
	rs.add(Chain{Place: at, Kind: "filter", Hook: hook, Priority: priority, settings: settings, write: write})
}

// nat adds a chain of kind nat.
func (rs *Ruleset) nat(name string, hook uint32, priority int32, settings string, write func(*rules)) {
	rs.add(Chain{Place: InInet(name), Kind: "nat", Hook: hook, Priority: priority, settings: settings, write: write})
}

func (rs *Ruleset) add(ch Chain) {
	if !slices.Contains(rs.tables, ch.Family) {
		rs.tables = append(rs.tables, ch.Family)
	}

	rs.Chains = append(rs.Chains, ch)
}

// addForward appends the rules of the chain forward, which sets the mark bit on packets that may pass. An accept here
// would not override a drop in another table, so a rule in that table must accept the mark. The chain changes only the
// mark of packets from or to our bridges and of pods' packets at a shared NIC. It drops packets that a policy forbids.
// It also drops new connections from trusted links (TrustedSet) to bridges and veth links of other programs, unless a
// rule has changed the connection's destination (DNAT).
func (list *rules) addForward(mark uint32) {
	const in, out, link = expr.MetaKeyIIFNAME, expr.MetaKeyOIFNAME, expr.PayloadBaseLLHeader

	// First clear the bit. If another program has set it, packets would pass that no rule here has examined. The mark
	// of packets that are not from or to our bridges stays.
	list.addClear(mark)
	list.addPolicies()

	// Packets that stay on one of our bridges leave the chain with the mark, since no later rule concerns them.
	stays := list.begin("mark what stays on a bridge of ours").loadBridges().isIn(bridgesSet)
	stays.addMark(mark)
	stays.Return()

	list.addFamilies("mark what pods send", func(x expressions, f Family) { x.isPod(f, in, f.src).addMark(mark) })
	list.begin("mark what pods without addresses send").
		isEthernet().loadLinkAnd(in, link, etherSource, EtherLen).isIn(PortsSet).addMark(mark)

	// Do not mark new connections to links of other programs, and drop those that firewalld would accept. Containers
	// and virtual machines of other programs are behind such links.
	for _, kind := range [...]string{"bridge", "veth"} {
		list.begin("except what opens a connection to a "+kind+" of others").
			linkIn(in, OursSet).opens(kind).clearMark(mark)
		list.begin("drop what firewalld would accept to a "+kind+" of others").
			linkIn(in, TrustedSet).opens(kind).hasConntrackBit(expr.CtKeySTATUS, expr.CmpOpEq, dstNAT).Drop()
	}

	list.addFamilies("mark replies to pods", func(x expressions, f Family) {
		x.isReply().isPod(f, out, f.dst).addMark(mark)
	})

	// Match replies by the MAC of the pod. Only bridged packets still have this MAC as their destination at this
	// hook.
	list.begin("mark replies to pods without addresses").
		isReply().isEthernet().loadLinkAnd(out, link, etherTarget, EtherLen).isIn(PortsSet).addMark(mark)

	// Mark only connections to published ports. The rules of other programs decide about connections that reach the
	// pod's port directly.
	list.addFamilies("mark what goes to published ports", func(x expressions, f Family) {
		x.isRedirected().is(f).loadPodPort(f).isIn(f.Published).addMark(mark)
	})
}

// opens matches packets that isReply does not match, and that go out by a link of the given kind. These packets open a
// connection, or have none. The link is neither ours, nor an uplink, nor one of own.
func (x expressions) opens(kind string, own ...string) expressions {
	x.hasConntrackBit(expr.CtKeySTATE, expr.CmpOpEq, replyStates).isMeta(metaOIFKind, nftnl.LinkKey(kind, nil, 0))
	for _, link := range own {
		x.isNotMeta(expr.MetaKeyOIFNAME, nftnl.LinkKey(link, nil, 0))
	}
	return x.linkNotIn(expr.MetaKeyOIFNAME, OursSet, UplinksSet)
}

// addClear appends rules that clear the mark bit of packets from and to our bridges. Two rules are needed, since a
// bridged packet has no incoming link in postrouting.
func (list *rules) addClear(mark uint32) {
	for _, link := range [...]struct {
		name string
		key  expr.MetaKey
	}{{"from", expr.MetaKeyIIFNAME}, {"to", expr.MetaKeyOIFNAME}} {
		list.begin("clear the mark bit of packets "+link.name+" our bridges").linkIn(link.key, OursSet).clearMark(mark)
	}
}

// addUnmark appends the rules of a chain in postrouting that clears the mark bit of our bridges' packets, before other
// programs save the mark in a connection. The chain also drops ICMP redirects from the host to pods. These would direct
// pods to the LAN's router, past the host.
func (list *rules) addUnmark(mark uint32) {
	list.addClear(mark)

	messages := [...]struct{ protocol, typ byte }{{unix.IPPROTO_ICMP, icmpRedirect},
		{unix.IPPROTO_ICMPV6, redirectMessage}}
	for i, f := range Families() {
		x := list.begin("the host's redirects to pods, "+f.name).
			is(f).isL4(messages[i].protocol).firstByte(messages[i].typ, messages[i].typ)
		x.Add(&expr.Fib{Register: uint32(nftnl.First), ResultADDRTYPE: true, FlagSADDR: true})
		x.compare(expr.CmpOpEq, binary.NativeEndian.AppendUint32(nil, unix.RTN_LOCAL)).
			loadLinkAddress(expr.MetaKeyOIFNAME, f.dst, f).isIn(f.Pods).Drop()
	}
}

func markSettings(mark uint32) string { return "mark 0x" + strconv.FormatUint(uint64(mark), 16) }

// addMasquerade adds the base chain that masquerades the network's packets. Each network has its own chain, so that
// networks never change each other's rules. Without Masquerade, it marks the chain for deletion, and keeps the sets of
// masqueraded pods, since their elements belong to endpoints.
func (rs *Ruleset) addMasquerade(n *Network) {
	if !n.Masquerade {
		rs.gone = append(rs.gone, InInet(masqueradePrefix+n.Key))
		return
	}

	settings := fnv.New32a()
	for _, f := range Families() {
		for _, p := range n.exemptOf(f.Is4()) {
			settings.Write(append(p.AppendTo(nil), ' '))
		}
	}

	rs.nat(masqueradePrefix+n.Key, unix.NF_INET_POST_ROUTING, prioritySourceNAT,
		fmt.Sprintf("prefixes %08x", settings.Sum32()), func(list *rules) { list.addMasquerade(n) })
}

func (list *rules) addMasquerade(n *Network) {
	for _, f := range Families() {
		exempt := n.exemptOf(f.Is4())
		if slices.Contains(exempt, f.All) {
			list.begin("never masquerade " + f.name).is(f).Return()
			continue
		}

		list.begin("not sent by pods of this network, "+f.name).
			is(f).loadAddress(f.src, f).isNotIn(MasqueradeSet(f.Is4(), n.Key)).Return()

		// Do not masquerade a packet that any rule redirected to a published port of a pod.
		list.begin("pods keep their address towards published ports, " + f.name).
			isRedirected().is(f).loadPodPort(f).isIn(f.Published).Return()

		for _, p := range exempt {
			list.begin("pods keep their address towards "+p.String()).isTo(f, p).Return()
		}

		list.begin("multicast, "+f.name).isTo(f, f.multicast).Return()
		if f.Is4() {
			all := netip.AddrFrom4([4]byte{255, 255, 255, 255})
			list.begin("broadcast").isTo(f, netip.PrefixFrom(all, 32)).Return()
		}
	}

	list.begin("masquerade what pods send to elsewhere").masquerade()
}

// exemptOf returns the destinations of one family that are not masqueraded. They are sorted, so that equal networks
// always produce the same rules.
func (n *Network) exemptOf(is4 bool) []netip.Prefix {
	var list []netip.Prefix
	for _, p := range n.Exempt {
		if p.Addr().Is4() != is4 {
			continue
		}
		if at, found := slices.BinarySearchFunc(list, p.Masked(), netip.Prefix.Compare); !found {
			list = slices.Insert(list, at, p.Masked())
		}
	}

	return list
}

// Network describes a network for the rules, with the fields of nft.Network. Package nft has checked all values.
type Network struct {
	Key                        string // the network's key, from NetworkKey
	Masquerade                 bool
	Exempt                     []netip.Prefix // destinations that are never masqueraded, in any order
	Bridge                     string         // "" if the network has no bridge
	VLANOf                     string         // the VLAN-aware bridge if Bridge is its link in a VLAN, else ""
	NFCall, LAN, Gateway       bool
	Closed                     []Closed
	Policy                     string // selects the pods that may send to the network's pods
	Guard, Groups, DropReports bool
	PortSNAT, Internal         bool
	Egress                     *Egress // the policy for all pods on the bridge; nil allows everything
	PodEgress                  bool    // pods may have policies of their own
	Dedup                      []Dedup
	Share                      *Share
}

// Dedup describes a subnet whose pods would get some packets twice. It has the same fields as nft.Dedup.
type Dedup struct {
	BridgeMAC net.HardwareAddr
	Gateway   netip.Addr
	Subnet    netip.Prefix
}

// The values of Network.Policy, other than "open". They are the names of nft.Policy.
const (
	policySameBridge = "same-bridge" // pods of the bridge, and of bridges without a policy, may send
	policyIsolated   = "isolated"    // pods of bridges without a policy may send
)

// Sum returns a hash that identifies the ruleset. Conn.Ready of package nft remembers by this hash that it found the
// network complete.
func (rs *Ruleset) Sum() uint64 {
	sum := fnv.New64a()
	write := func(at Place, text string) {
		sum.Write([]byte{at.Family})
		sum.Write([]byte(at.Name))
		sum.Write([]byte{0})
		sum.Write([]byte(text))
		sum.Write([]byte{0})
	}

	write(Place{rulesVersion, rs.network}, rs.of.BridgeComment())
	if rs.table != nftnl.DefaultTable {
		write(Place{Name: string(rs.table)}, "table")
	}

	for i := range rs.Chains {
		write(rs.Chains[i].Place, rs.Chains[i].settings)
	}

	for _, at := range rs.gone {
		write(at, "gone")
	}

	for i := range rs.Bridge {
		write(rs.Bridge[i].Set, string(rs.Bridge[i].Key)+string(rs.Bridge[i].End))
	}

	return sum.Sum64()
}
