package ruleset

import (
	"cmp"
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

// The names of our table and of its objects. Chains and sets that belong to a network have its key in their names.
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

// MasqueradeSet returns the name of the set of a network's masqueraded pods.
func MasqueradeSet(is4 bool, networkKey string) string {
	if is4 {
		return masquerade4Prefix + networkKey
	}
	return masquerade6Prefix + networkKey
}

// IsMasqueradeSet reports whether a set has such a name.
func IsMasqueradeSet(name string) bool {
	return strings.HasPrefix(name, masquerade4Prefix) || strings.HasPrefix(name, masquerade6Prefix)
}

// masqueradeSet returns the Set with such a name.
func masqueradeSet(name string) Set {
	if strings.HasPrefix(name, masquerade4Prefix) {
		return Set{Place: InInet(name), KeyType: nftnl.TypeIPv4, KeyLen: Addr4Len}
	}
	return Set{Place: InInet(name), KeyType: nftnl.TypeIPv6, KeyLen: addr6Len}
}

// Ruleset is the intended state: the objects that all networks share, and one network's own.
type Ruleset struct {
	of     *Network
	table  TableName
	tables []uint8 // by family
	Chains []Chain
	// gone are chains that should not exist.
	gone []Place
	// network is the key of the network. Bridge holds its elements in the sets of bridges, and BridgeComment their
	// comment.
	network       string
	Bridge        []Element
	BridgeComment string
}

// Set is a plain hash set, or a map. It has no time-outs and no verdicts, since these make adding an element slower
// with each existing one. So do intervals, which only policies have.
type Set struct {
	Place
	KeyType  uint32 // nft's number of the type, six bits for each part of a concatenation
	KeyLen   uint32 // bytes
	DataType uint32 // of a map
	DataLen  uint32 // 0 if it is no map
	// typeof is userdata for nft, if the type is not sufficient.
	typeof []byte
	// intervals is set if the elements are intervals of keys of several parts.
	intervals bool
}

// keySet returns the set with a name whose keys have parts of these types.
func keySet(name string, types ...uint32) Set {
	s := Set{Place: InInet(name)}
	s.KeyType, s.KeyLen = concat(types...)
	return s
}

// concat returns the type of values with parts of these types, and their length.
func concat(types ...uint32) (typ, length uint32) {
	for _, part := range types {
		typ = typ<<nftnl.TypeBits | part
		length += (uint32(typeLen(part)) + Slot - 1) / Slot * Slot
	}
	return typ, length
}

func (s Set) flags() uint32 {
	if s.intervals {
		return unix.NFT_SET_INTERVAL | setConcat
	}
	if s.DataLen > 0 {
		return unix.NFT_SET_MAP
	}
	return 0
}

// state returns the set in the form that the kernel reports.
func (s Set) state() setState {
	return setState{s.flags(), s.KeyType, s.KeyLen, s.DataType, s.DataLen}
}

// Chain is a base chain. The kernel calls it beside those of other tables.
type Chain struct {
	Place
	Kind     string // "filter" or "nat"
	Hook     uint32 // unix.NF_INET_*, or unix.NF_NETDEV_*
	Device   string // the link, in family netdev
	Priority int32
	settings string       // a short form of the settings that its rules depend on
	write    func(*rules) // writes the rules
}

// Rules returns the chain's rules. To check that they exist, they are not needed: see Comment.
func (ch *Chain) Rules() []Rule {
	var list rules
	ch.write(&list)
	return list
}

// Rule is one rule of a chain. No other rule in the chain has the same comment.
type Rule struct {
	Comment string
	Steps   []expr.Any
}

// rules are the rules of a chain, in order.
type rules []Rule

// rule appends a rule without steps, and returns its steps. The caller completes them before it appends another rule.
func (list *rules) rule(comment string) expressions {
	*list = append(*list, Rule{Comment: comment})
	return expressions{(*nftnl.Expressions)(&(*list)[len(*list)-1].Steps)}
}

// add appends a rule with the steps that write appends.
func (list *rules) add(comment string, write func(expressions)) { write(list.rule(comment)) }

// addFamilies appends a rule for each family.
func (list *rules) addFamilies(comment string, write func(expressions, Family)) {
	for _, f := range Families() {
		write(list.rule(comment+", "+f.name), f)
	}
}

// span describes a rule about a range of numbers, with the first and the last.
type span struct {
	comment  string
	from, to uint16
}

// addSpans appends a rule for each span.
func (list *rules) addSpans(spans []span, write func(expressions, span)) {
	for _, s := range spans {
		write(list.rule(s.comment), s)
	}
}

// rulesVersion is raised with every change of the rules that the same settings produce. A test contains the rules of
// each version.
const rulesVersion = 1

// Comment returns the comment of a chain with a number of rules. A different version or setting means that the chain
// was created differently, and a different number means that its rules were changed since. So a look at the chain
// alone is enough, and its rules need not be produced for comparison. A chain and its comment are created once, so a
// chain with the right version and settings had the right number of rules too.
func (ch *Chain) Comment(rules int) string {
	return "tombolo rules " + strconv.Itoa(rulesVersion) + ", " + ch.settings + ", " + strconv.Itoa(rules) + " in all"
}

// Priorities, by the names that nft has for them.
const (
	priorityRaw             = -300
	priorityDestinationNAT  = -100
	priorityBeforeFilter    = nftnl.PriorityForward
	priorityBeforeSourceNAT = prioritySourceNAT - 1
	prioritySourceNAT       = 100
	// priorityLast is behind all others in postrouting. Those chains run before the bit is cleared.
	priorityLast = 300
)

// linkSet returns the set of names of links at a place.
func linkSet(at Place) Set { return Set{Place: at, KeyType: nftnl.TypeIfname, KeyLen: IfnameLen} }

// podSets returns the sets of the pods of all networks.
func podSets() []Set {
	return []Set{
		keySet(Pods4Set, nftnl.TypeIfname, nftnl.TypeIPv4), keySet(Pods6Set, nftnl.TypeIfname, nftnl.TypeIPv6),
		keySet(PortsSet, nftnl.TypeIfname, nftnl.TypeEther),
	}
}

// New returns the intended state of a network, in tables with a name, with a mark.
func New(n *Network, table TableName, mark uint32) *Ruleset {
	rs := &Ruleset{
		of: n, table: table, network: n.Key, Bridge: n.bridgeElements(), BridgeComment: n.BridgeComment(),
		tables: []uint8{unix.NFPROTO_INET},
		Chains: append([]Chain{forward(mark), unmark(mark)}, portChains(mark)...),
	}
	if n.Masquerade {
		rs.Chains = append(rs.Chains, masquerade(n))
	} else {
		// The sets may stay: their elements belong to endpoints, not to rules.
		rs.gone = append(rs.gone, InInet(masqueradePrefix+n.Key))
	}

	if n.PortSNAT {
		rs.Chains = append(rs.Chains, portSNAT())
	}

	if n.Internal {
		rs.Chains = append(rs.Chains, internal())
	}

	rs.addEgress(n)
	if len(n.Closed) > 0 {
		rs.Chains = append(rs.Chains, podsOnly(n.Closed, mark))
	} else {
		rs.gone = append(rs.gone, InInet(podsOnlyChain))
	}

	rs.addGuard(n)
	rs.addDedup(n)
	rs.addReports(n)
	rs.addShare(n, mark)
	return rs
}

// Sets returns the sets that the rules look into, and that endpoints have elements in.
func (rs *Ruleset) Sets() []Set {
	list := slices.Concat(podSets(), portSets(), BridgeSets())
	if rs.of.Masquerade {
		list = append(list, masqueradeSet(MasqueradeSet(true, rs.network)),
			masqueradeSet(MasqueradeSet(false, rs.network)))
	}

	if rs.of.PortSNAT {
		list = append(list, portSNATSets()...)
	}

	if rs.of.Internal {
		list = append(list, internalSets()...)
	}

	if rs.of.Egress != nil {
		list = append(list, egressSets()...)
	}

	if rs.of.PodEgress {
		list = append(list, podEgressSets()...)
	}

	if rs.of.Guard {
		list = append(list, guardSets()...)
	}

	if rs.of.Share != nil {
		list = append(list, shareSet(ShareSet(rs.of.Bridge)))
	}

	return list
}

// filterChain returns a chain of kind filter.
func filterChain(at Place, hook uint32, priority int32, settings string, write func(*rules)) Chain {
	return Chain{Place: at, Kind: "filter", Hook: hook, Priority: priority, settings: settings, write: write}
}

// forward returns the chain forward. It admits nothing. It sets a mark bit on packets that may pass, for a rule in
// the chain that would otherwise drop them. It changes the mark only of packets from and to our bridges.
func forward(mark uint32) Chain {
	return filterChain(InInet(forwardChain), unix.NF_INET_FORWARD, priorityBeforeFilter, markSettings(mark),
		func(list *rules) { list.addForward(mark) })
}

func (list *rules) addForward(mark uint32) {
	const in, out, link = expr.MetaKeyIIFNAME, expr.MetaKeyOIFNAME, expr.PayloadBaseLLHeader

	// A bit that another program has set would admit packets that no rule here has examined. Packets of others keep
	// theirs.
	list.addClear(mark)
	list.addPolicies()
	list.addFamilies("mark what pods send", func(x expressions, f Family) { x.isPod(f, in, f.src).addMark(mark) })
	list.rule("mark what pods without addresses send").
		isEthernet().port(in, link, etherSource, EtherLen).isIn(PortsSet).addMark(mark)

	// Links closed by other programs stay closed: their containers and virtual machines are behind such links.
	for _, kind := range [...]string{"bridge", "veth"} {
		list.rule("except what opens a connection to a "+kind+" of others").
			linkIn(in, OursSet).opens(kind).clearMark(mark)
		list.rule("drop what firewalld would accept to a "+kind+" of others").
			linkIn(in, TrustedSet).opens(kind).isNotRedirected().Drop()
	}

	list.addFamilies("mark replies to pods", func(x expressions, f Family) {
		x.isReply().isPod(f, out, f.dst).addMark(mark)
	})

	// Only frames that are bridged through this hook still have a pod's MAC here.
	list.rule("mark replies to pods without addresses").
		isReply().isEthernet().port(out, link, etherTarget, EtherLen).isIn(PortsSet).addMark(mark)

	// Connections that reach the same port of a pod without using a published one stay under the rules of the program
	// that drops them.
	list.addFamilies("mark what goes to published ports", func(x expressions, f Family) {
		x.isRedirected().is(f).podPort(f).isIn(f.Published).addMark(mark)
	})

	list.rule("mark what stays on a bridge of ours").bridged().isIn(bridgesSet).addMark(mark)
}

// opens matches packets that open a connection to a link of a kind that is neither ours nor an uplink, except to the
// links in own.
func (x expressions) opens(kind string, own ...string) expressions {
	x.isNoReply().isMeta(metaOIFKind, nftnl.LinkKey(kind, nil, 0))
	for _, link := range own {
		x.isNotMeta(expr.MetaKeyOIFNAME, nftnl.LinkKey(link, nil, 0))
	}
	return x.linkNotIn(expr.MetaKeyOIFNAME, OursSet, UplinksSet)
}

// addClear clears the bit in packets from and to our bridges. A bridged packet has no incoming link in postrouting.
func (list *rules) addClear(mark uint32) {
	for _, link := range [...]struct {
		name string
		key  expr.MetaKey
	}{{"from", expr.MetaKeyIIFNAME}, {"to", expr.MetaKeyOIFNAME}} {
		list.rule("clear the mark bit of packets "+link.name+" our bridges").linkIn(link.key, OursSet).clearMark(mark)
	}
}

// unmark returns the chain that clears the bit in our bridges' packets, which only the firewall needs. It also drops
// the host's redirects to pods. They would direct pods to the LAN's router, bypassing the host.
func unmark(mark uint32) Chain {
	return filterChain(InInet(unmarkChain), unix.NF_INET_POST_ROUTING, priorityLast, markSettings(mark),
		func(list *rules) { list.addClear(mark); list.addRedirects() })
}

// addRedirects drops the host's redirects to pods.
func (list *rules) addRedirects() {
	messages := [...]struct{ protocol, typ byte }{{unix.IPPROTO_ICMP, icmpRedirect},
		{unix.IPPROTO_ICMPV6, redirectMessage}}
	for i, f := range Families() {
		x := list.rule("the host's redirects to pods, "+f.name).
			is(f).isL4(messages[i].protocol).firstByte(messages[i].typ, messages[i].typ)
		x.Add(&expr.Fib{Register: uint32(nftnl.First), ResultADDRTYPE: true, FlagSADDR: true})
		x.compare(expr.CmpOpEq, binary.NativeEndian.AppendUint32(nil, unix.RTN_LOCAL)).
			port(expr.MetaKeyOIFNAME, expr.PayloadBaseNetworkHeader, f.dst, f.AddrLen).isIn(f.pods).Drop()
	}
}

func markSettings(mark uint32) string { return "mark 0x" + strconv.FormatUint(uint64(mark), 16) }

// masquerade returns the network's own base chain for masquerading, so that networks never change each other's rules.
func masquerade(n *Network) Chain {
	settings := fnv.New32a()
	for _, f := range Families() {
		for _, p := range n.exemptOf(f.Is4()) {
			settings.Write(p.AppendTo(nil))
			settings.Write([]byte{' '})
		}
	}
	return Chain{
		Place: InInet(masqueradePrefix + n.Key),
		Kind:  "nat", Hook: unix.NF_INET_POST_ROUTING, Priority: prioritySourceNAT,
		settings: fmt.Sprintf("prefixes %08x", settings.Sum32()),
		write:    func(list *rules) { list.addMasquerade(n) },
	}
}

func (list *rules) addMasquerade(n *Network) {
	for _, f := range Families() {
		exempt := n.exemptOf(f.Is4())
		if slices.Contains(exempt, f.All) {
			list.rule("never masquerade " + f.name).is(f).Leave()
			continue
		}

		list.rule("not sent by pods of this network, "+f.name).
			is(f).load(expr.PayloadBaseNetworkHeader, f.src, f.AddrLen).isNotIn(MasqueradeSet(f.Is4(), n.Key)).Leave()

		// The packet was sent to the host. It is somewhere else only because the port leads there.
		list.rule("pods keep their address towards published ports, " + f.name).
			isRedirected().is(f).podPort(f).isIn(f.Published).Leave()

		for _, p := range exempt {
			list.rule("pods keep their address towards "+p.String()).isTo(f, p).Leave()
		}

		list.rule("multicast, "+f.name).isTo(f, f.multicast).Leave()
		if f.Is4() {
			all := netip.AddrFrom4([4]byte{255, 255, 255, 255})
			list.rule("broadcast").isTo(f, netip.PrefixFrom(all, 32)).Leave()
		}
	}

	list.rule("masquerade what pods send to elsewhere").masquerade()
}

// exemptOf returns the destinations of one family that are not masqueraded. The order is fixed, so that the same
// network always produces the same rules.
func (n *Network) exemptOf(is4 bool) []netip.Prefix {
	var list []netip.Prefix
	for _, p := range n.Exempt {
		if p.Addr().Is4() != is4 {
			continue
		}
		if at, found := slices.BinarySearchFunc(list, p.Masked(), comparePrefixes); !found {
			list = slices.Insert(list, at, p.Masked())
		}
	}

	return list
}

func comparePrefixes(a, b netip.Prefix) int {
	if c := a.Addr().Compare(b.Addr()); c != 0 {
		return c
	}
	return cmp.Compare(a.Bits(), b.Bits())
}

// Network has rules, sets and elements of its own. It has the fields of nft's Network, with valid values.
type Network struct {
	Key                        string // see NetworkKey
	Masquerade                 bool
	Exempt                     []netip.Prefix // destinations that are never masqueraded, in any order
	Bridge                     string         // "" if nothing is known about bridges
	VLANOf                     string         // the bridge that it is a VLAN of, or ""
	NFCall, LAN, Gateway       bool
	Closed                     []Closed
	Policy                     string // the pods that may send to its pods
	Guard, Groups, DropReports bool
	PortSNAT, Internal         bool
	Egress                     *Egress // of all pods on the bridge; nil allows everything
	PodEgress                  bool    // pods may have policies of their own
	Dedup                      []Dedup
	Share                      *Share
}

// Dedup is a subnet whose pods would get packets twice.
type Dedup struct {
	BridgeMAC net.HardwareAddr
	Gateway   netip.Addr
	Subnet    netip.Prefix
}

// The policies other than open, named as in nft.Policy.
const (
	policySameBridge = "same-bridge" // pods of the bridge may send, and those of bridges without a policy
	policyIsolated   = "isolated"    // pods of bridges without a policy may send
)

// Sum returns a hash of everything that the ruleset is made from. It stands for a network that was seen in a
// generation.
func (rs *Ruleset) Sum() uint64 {
	sum := fnv.New64a()
	write := func(at Place, text string) {
		sum.Write([]byte{at.Family})
		sum.Write([]byte(at.Name))
		sum.Write([]byte{0})
		sum.Write([]byte(text))
		sum.Write([]byte{0})
	}

	write(Place{rulesVersion, rs.network}, rs.BridgeComment)
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
