package ruleset

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
	"slices"
	"sort"
	"strconv"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// The sets of bridges contain link names. Two of them contain pairs of a name with itself, to match packets that come
// in and go out by the same bridge.
const (
	OursSet     = "ours"     // the bridges of all networks, and their links in VLANs
	gatewaysSet = "gateways" // the links that the host uses to route for networks
	bridgesSet  = "bridges"  // the bridges of all networks
	policiesSet = "policies" // bridges with a policy
	isolatedSet = "isolated" // bridges with the policy Isolated
	bypassSet   = "bypass"   // link names under which bridged packets pass the hooks
	lansSet     = "lans"     // bridges that connect to other machines

	// SharesSet contains the NICs of all Shares. The host routes pods' packets through them, but other programs use
	// them too.
	SharesSet = "shares"

	// UplinksSet contains the bridges and veth links that are uplinks of the host and belong to no network.
	UplinksSet = "uplinks"
	// TrustedSet contains links of networks that another firewall trusts completely, such as firewalld's zone
	// trusted.
	TrustedSet = "trusted"
)

// HostComment is the comment of elements in HostSets that belong to the host and not to a network.
const HostComment = OwnerPrefix + "host"

// HostSets returns the names of the sets with facts about the host.
func HostSets() []string {
	families := Families()
	return []string{UplinksSet, TrustedSet, families[0].Services, families[1].Services}
}

// BridgeSets returns the sets of link names: bridges and other links of networks, shared NICs and the host's uplinks.
func BridgeSets() []Set {
	names := [...]string{
		bridgesSet, OursSet, gatewaysSet, policiesSet, isolatedSet, bypassSet, lansSet, SharesSet, UplinksSet,
		TrustedSet,
	}
	list := make([]Set, 0, len(names))
	for _, name := range names {
		s := keySet(name, nftnl.TypeIfname)
		if name == bridgesSet || name == isolatedSet {
			s = keySet(name, nftnl.TypeIfname, nftnl.TypeIfname)
		}
		list = append(list, s)
	}

	return list
}

// addPolicies appends the rules for the policies of all networks to the chain forward.
func (list *rules) addPolicies() {
	list.begin("drop what would stay on an isolated bridge").loadBridges().isIn(isolatedSet).Drop()
	list.begin("drop what goes from one bridge with a policy to another").
		linkIn(expr.MetaKeyIIFNAME, policiesSet).linkIn(expr.MetaKeyOIFNAME, policiesSet).
		loadBridges().isNotIn(bridgesSet).Drop()
}

// bridgeElements returns the network's elements in the sets of bridges.
func (n *Network) bridgeElements() []Element {
	if n.Bridge == "" {
		return nil
	}

	name := nftnl.LinkKey(n.Bridge, nil, 0)
	pair := slices.Concat(name, name)
	var list []Element
	add := func(is bool, set string, key []byte) {
		if is {
			list = append(list, Element{Set: InInet(set), Key: key})
		}
	}
	hasPolicy, vlanOf := n.Policy == policySameBridge || n.Policy == policyIsolated, nftnl.LinkKey(n.VLANOf, nil, 0)
	add(true, bridgesSet, pair)
	add(true, OursSet, name)
	add(n.VLANOf != "", bridgesSet, slices.Concat(vlanOf, vlanOf))
	add(n.VLANOf != "", OursSet, vlanOf)
	add(n.Gateway, gatewaysSet, name)
	add(hasPolicy, policiesSet, name)
	add(n.Policy == policyIsolated, isolatedSet, pair)
	add(!n.NFCall, bypassSet, name)
	add(n.LAN, lansSet, name)
	add(n.Internal, internalSet, name)
	add(n.Internal && n.VLANOf != "", internalSet, vlanOf)
	if n.Egress != nil {
		list = append(list, n.Egress.bridgeElements(n.Bridge)...)
	}

	if n.Share != nil {
		add(true, SharesSet, nftnl.LinkKey(n.Share.NIC, nil, 0))
	}

	return WithComment(list, n.BridgeComment())
}

// BridgeComment returns the comment of the network's elements in the sets of bridges. It begins like the comment of
// an endpoint with an empty owner, and then lists settings of the network. So an element with outdated settings is
// recognized by its comment. If networks share a bridge, its elements have the comment of one of them.
func (n *Network) BridgeComment() string {
	comment := networkComment(n.Key) + "," + n.Policy
	if n.NFCall {
		comment += ",nf"
	}

	if n.LAN {
		comment += ",lan"
	}

	if n.Gateway {
		comment += ",gw"
	}

	if n.Internal {
		comment += ",internal"
	}

	return comment
}

const (
	internalChain = "internal"
	internalSet   = "internal" // the bridges of internal networks
)

func internalSets() []Set { return []Set{keySet(internalSet, nftnl.TypeIfname)} }

// addInternal appends the rules of a chain that drops packets between an internal network's bridge and all other links,
// in both directions. The firewall has this chain and its set only if there is an internal network.
func (list *rules) addInternal() {
	for _, link := range [...]struct {
		direction string
		key       expr.MetaKey
	}{{"leaves", expr.MetaKeyIIFNAME}, {"enters", expr.MetaKeyOIFNAME}} {
		list.begin("drop what "+link.direction+" an internal network").
			linkIn(link.key, internalSet).loadBridges().isNotIn(bridgesSet).Drop()
	}
}

const podsOnlyChain = "pods-only"

// Closed describes an address family that the host forwards for pods only. It has the same fields as nft.Closed.
type Closed struct {
	IPv6    bool
	Routers []string
}

func (c Closed) family() Family {
	if c.IPv6 {
		return Families()[1]
	}
	return Families()[0]
}

// addPodsOnly adds the chain that drops forwarded packets that are neither from nor to pods, in the families of closed.
// Without this chain, the host would forward such packets, because forwarding for pods is on. The chain runs after the
// chain forward, which marks the pods' packets. If no family is closed, addPodsOnly marks the chain for deletion.
func (rs *Ruleset) addPodsOnly(closed []Closed, mark uint32) {
	if len(closed) == 0 {
		rs.gone = append(rs.gone, InInet(podsOnlyChain))
		return
	}

	settings := []string{markSettings(mark)}
	for _, c := range closed {
		settings = append(settings, c.family().name)
	}

	rs.filter(InInet(podsOnlyChain), unix.NF_INET_FORWARD, priorityBeforeFilter+2, strings.Join(settings, ", "),
		func(list *rules) { list.addPodsOnly(closed, mark) })
}

func (list *rules) addPodsOnly(closed []Closed, mark uint32) {
	const in, out = expr.MetaKeyIIFNAME, expr.MetaKeyOIFNAME
	list.begin("what comes from a gateways' link").linkIn(in, gatewaysSet).Return()
	list.begin("what goes to one").linkIn(out, gatewaysSet).Return()
	x := list.begin("what else pods send and receive").loadMeta(expr.MetaKeyMARK)
	x.Mask(binary.NativeEndian.AppendUint32(nil, mark), nil)
	x.compare(expr.CmpOpNeq, make([]byte, 4)).Return()

	// The next rules accept frames that another program's bridge forwards itself. With br_netfilter, such frames pass
	// this hook too, and no property of the packet distinguishes them from packets that the host routes. The rules
	// use routes instead: the host itself would route a packet to a link other than its incoming link. If the host
	// has no address on a bridge, its routes mostly do not lead to the sender through that bridge.
	for _, route := range []struct {
		text   string
		fib    expr.Fib
		exists bool
	}{
		{"what stays on a bridge of others", expr.Fib{FlagDADDR: true, FlagIIF: true}, true},
		{"what such a bridge forwards, to where the host has no route", expr.Fib{FlagDADDR: true}, false},
		{"what such a bridge forwards, from where the host has no route by it",
			expr.Fib{FlagSADDR: true, FlagIIF: true}, false},
	} {
		list.begin(route.text).betweenBridges().hasRoute(route.fib, route.exists).Return()
	}

	for _, c := range closed {
		f := c.family()
		list.begin("multicast, which a routing daemon forwards, "+f.name).isTo(f, f.multicast).Return()
		for _, router := range slices.Sorted(slices.Values(c.Routers)) {
			list.begin("the owner of "+router+" has it forward "+f.name).
				is(f).isMeta(in, nftnl.LinkKey(router, nil, 0)).Return()
		}

		list.begin("the host is no router of " + f.name).is(f).Drop()
	}
}

// betweenBridges matches packets that come in by a bridge and go out by a bridge, which may be the same one.
func (x expressions) betweenBridges() expressions {
	bridge := nftnl.LinkKey("bridge", nil, 0) // a kind has the same length as a link's name
	return x.isMeta(metaIIFKind, bridge).isMeta(metaOIFKind, bridge)
}

// NFT_META_IIFKIND and NFT_META_OIFKIND of include/uapi/linux/netfilter/nf_tables.h. A hardware link has no kind.
const (
	metaIIFKind expr.MetaKey = 26
	metaOIFKind expr.MetaKey = 27
)

// hasRoute matches packets for which a route exists or, if exists is false, no route exists. The flags of fib select
// the address and the link of the lookup.
func (x expressions) hasRoute(fib expr.Fib, exists bool) expressions {
	fib.Register, fib.ResultOIF, fib.FlagPRESENT = uint32(nftnl.First), true, true
	x.Add(&fib)
	found := make([]byte, 4)
	if exists {
		found[0] = 1
	}
	return x.compare(expr.CmpOpEq, found)
}

const dedupPrefix = "dedup-"

// addDedup adds the network's chain that drops duplicate packets. If n.Dedup is empty, addDedup marks the chain for
// deletion.
func (rs *Ruleset) addDedup(n *Network) {
	if len(n.Dedup) == 0 {
		rs.gone = append(rs.gone, InBridge(dedupPrefix+n.Key))
		return
	}

	ds := normalDedup(n.Dedup)
	settings := fnv.New32a()

	for _, d := range ds {
		fmt.Fprintf(settings, "%s %s %s ", d.BridgeMAC, d.Gateway, d.Subnet)
	}

	rs.filter(InBridge(dedupPrefix+n.Key), bridgeOutput, 0, fmt.Sprintf("dedup %08x", settings.Sum32()),
		func(list *rules) { list.addDedup(ds) })
}

// bridgeOutput is the hook for packets that the bridge itself sends. It runs once for each port.
const bridgeOutput = unix.NF_INET_LOCAL_OUT

// addDedup appends the rules that drop duplicate packets. The rules that accept packets from gateways come before the
// rules that drop packets of a subnet, since a gateway may be in several subnets.
func (list *rules) addDedup(ds []Dedup) {
	once := func(comment string, write func(expressions)) {
		if !slices.ContainsFunc(*list, func(r Rule) bool { return r.Comment == comment }) {
			write(list.begin(comment))
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

// Share describes how a NIC of the host connects a bridge to a LAN. It has the same fields as nft.Share.
//
// Chains at the NIC's hooks send frames for pods, and copies of multicast frames, into a veth pair that leads to the
// bridge. A BPF program at the pair (package bridge/share) handles the other direction. It makes frames for the host
// come in by the NIC. So packets that the host routes for pods come in and go out by the NIC. The chains of family
// inet recognize them by the pods' addresses.
type Share struct {
	NIC   string
	MAC   net.HardwareAddr
	Outer int
	Port  string
}

// Prefixes of the names of chains and sets for a Share. After a prefix follows the name of the bridge, so networks on
// one bridge share these objects.
const (
	sharePrefix       = "share-"
	sharePodsPrefix   = sharePrefix + "pods-"
	shareInPrefix     = sharePrefix + "in-"
	shareOutPrefix    = sharePrefix + "out-"
	shareGuardPrefix  = sharePrefix + "guard-"
	shareMutePrefix   = sharePrefix + "mute-"
	shareTrackPrefix  = sharePrefix + "track-"
	shareClosedPrefix = sharePrefix + "closed-"
	shareAnswerPrefix = sharePrefix + "answers-"
	shareUnmarkPrefix = sharePrefix + "unmark-"
)

// ShareSet returns the name of the set that contains the MACs of a bridge's pods. The set is in the table of family
// netdev.
func ShareSet(bridge string) string { return sharePodsPrefix + bridge }

func shareSet(name string) Set {
	return Set{Place: InNetdev(name), KeyType: nftnl.TypeEther, KeyLen: EtherLen}
}

// ofShare reports whether a chain or set belongs to the Share of a bridge.
func ofShare(at Place, bridge string) bool {
	rest, ok := strings.CutPrefix(at.Name, sharePrefix)
	_, owner, _ := strings.Cut(rest, "-")
	return ok && owner == bridge
}

// addShare adds the chains that the network's Share needs.
func (rs *Ruleset) addShare(n *Network, mark uint32) {
	if n.Share == nil {
		return
	}

	s := &share{*n.Share, n.Bridge, mark}
	pair := "pair " + strconv.Itoa(s.Outer)
	at := func(prefix, device string, hook uint32, settings string, write func(*rules)) {
		rs.add(Chain{Place: InNetdev(prefix + n.Bridge), Kind: "filter", Hook: hook, Device: device, settings: settings,
			write: write})
	}
	at(shareInPrefix, s.NIC, unix.NF_NETDEV_INGRESS, pair, s.addIn)
	at(shareOutPrefix, s.NIC, unix.NF_NETDEV_EGRESS, pair, s.addOut)
	at(shareGuardPrefix, s.Port, unix.NF_NETDEV_EGRESS, sharedSettings, s.addGuard)
	at(shareMutePrefix, n.Bridge, unix.NF_NETDEV_INGRESS, sharedSettings, s.addMute)

	host := fmt.Sprintf("%s at %s", s.MAC, s.NIC)
	rs.filter(InInet(shareTrackPrefix+n.Bridge), unix.NF_INET_PRE_ROUTING, priorityRaw, host, s.addTrack)
	marks := s.NIC + ", " + markSettings(mark)
	rs.filter(InInet(shareClosedPrefix+n.Bridge), unix.NF_INET_FORWARD, priorityBeforeFilter+1, marks, s.addClosed)
	rs.filter(InInet(shareUnmarkPrefix+n.Bridge), unix.NF_INET_POST_ROUTING, priorityLast, marks, s.addUnmark)
	if n.NFCall {
		rs.gone = append(rs.gone, InInet(shareAnswerPrefix+n.Bridge))
		return
	}

	rs.nat(shareAnswerPrefix+n.Bridge, unix.NF_INET_POST_ROUTING, priorityBeforeSourceNAT, s.NIC, s.addAnswers)
}

// share holds the parameters of the rules for a Share.
type share struct {
	Share
	bridge string
	mark   uint32
}

// addIn appends the rules for packets that the NIC receives. They come from the wire, or from pods through the BPF
// program at the veth pair.
func (s *share) addIn(list *rules) {
	list.addTagged()
	s.isMAC(list.begin("what pods send"), etherSource).Return()
	s.addToPods(list)
}

// addOut appends the rules for packets that the NIC sends. They come from the host, or from pods through the BPF
// program at the veth pair.
func (s *share) addOut(list *rules) {
	list.addTagged()
	s.isMAC(list.begin("what pods send"), etherSource).Return()
	for _, redirect := range []struct {
		family        string
		typ           uint16
		protocol, ofL byte
	}{
		{"IPv4", unix.ETH_P_IP, unix.IPPROTO_ICMP, icmpRedirect},
		{"IPv6", unix.ETH_P_IPV6, unix.IPPROTO_ICMPV6, redirectMessage},
	} {
		s.isMAC(list.begin("the host's redirects to pods that have it for their router, "+redirect.family),
			etherTarget).
			isEtherType(redirect.typ).isL4(redirect.protocol).firstByte(redirect.ofL, redirect.ofL).Drop()
	}

	s.addToPods(list)
}

// addToPods appends the rules that send frames for pods, and copies of multicast frames, into the veth pair.
func (s *share) addToPods(list *rules) {
	s.isMAC(list.begin("for a pod"), etherTarget).Forward(s.Outer)
	list.begin("for all").isEthernet().isMulticast().Duplicate(s.Outer)
}

// addTagged appends rules that leave frames of a VLAN to the host. A tag with VLAN ID 0 contains only a priority, so
// it does not count.
func (list *rules) addTagged() {
	for _, tag := range []struct {
		comment string
		typ     uint16
	}{{"of a VLAN", unix.ETH_P_8021Q}, {"of a VLAN, by an outer tag", unix.ETH_P_8021AD}} {
		list.begin(tag.comment).isEthernet().isEtherType(tag.typ).
			load(expr.PayloadBaseLLHeader, vlanTag, 2).hasAny(vlanID).Return()
	}
}

// addGuard appends a rule that drops multicast frames that leave the bridge through the pair, unless a pod sent them.
// The chains at the NIC know only the MACs of pods. They would send a copy of any other sender's frame back to the
// bridge.
func (s *share) addGuard(list *rules) {
	list.begin("multicast of MACs that are no pod's").
		isEthernet().load(expr.PayloadBaseLLHeader, etherSource, EtherLen).isNotIn(ShareSet(s.bridge)).
		isMulticast().Drop()
}

// addMute appends a rule that drops multicast frames that the bridge passes to the host. The host receives the same
// frames through the NIC.
func (s *share) addMute(list *rules) {
	list.begin("what the host hears by " + s.NIC).isEthernet().isMulticast().Drop()
}

// addTrack appends rules that exclude packets between the host and pods from connection tracking in br_netfilter. The
// kernel already tracks these packets at the NIC.
func (s *share) addTrack(list *rules) {
	for _, way := range []struct {
		comment string
		offset  uint32
	}{{"the host sends", etherSource}, {"pods send to the host", etherTarget}} {
		list.begin("tracked at "+s.NIC+": what "+way.comment).
			isMeta(expr.MetaKeyIIFNAME, nftnl.LinkKey(s.bridge, nil, 0)).isEthernet().
			isAt(expr.PayloadBaseLLHeader, way.offset, s.MAC).Add(&expr.Notrack{})
	}
}

// addClosed appends rules for pods' packets that come in by the NIC. If a packet opens a connection to another
// program's bridge or veth link, they clear its mark. The chain forward, which runs before, does this only for
// packets from our bridges.
func (s *share) addClosed(list *rules) {
	for _, kind := range [...]string{"bridge", "veth"} {
		list.addFamilies("except what opens a connection to a "+kind+" of others", func(x expressions, f Family) {
			s.isPod(x, f, expr.MetaKeyIIFNAME, f.src).opens(kind, s.NIC).clearMark(s.mark)
		})
	}
}

// addUnmark appends rules that clear the mark bit of pods' packets that come in or go out by the NIC.
func (s *share) addUnmark(list *rules) {
	list.addFamilies("what pods send", func(x expressions, f Family) {
		s.isPod(x, f, expr.MetaKeyIIFNAME, f.src).clearMark(s.mark)
	})
	list.addFamilies("what pods receive", func(x expressions, f Family) {
		s.isPod(x, f, expr.MetaKeyOIFNAME, f.dst).clearMark(s.mark)
	})
}

// addAnswers appends rules that masquerade packets whose answers would otherwise bypass the host. The bridge is
// connected to the LAN, so pods and LAN machines reach each other directly.
func (s *share) addAnswers(list *rules) {
	list.addFamilies("a pod answers past the host", func(x expressions, f Family) {
		s.isPod(x.isRedirected(), f, expr.MetaKeyOIFNAME, f.dst).masquerade()
	})
	list.addFamilies("a pod is answered past the host", func(x expressions, f Family) {
		s.isPod(x.isRedirected(), f, expr.MetaKeyOIFNAME, f.src).masquerade()
	})
}

// isMAC matches frames whose source or destination MAC belongs to a pod. offset selects the source or the
// destination.
func (s *share) isMAC(x expressions, offset uint32) expressions {
	return x.isEthernet().load(expr.PayloadBaseLLHeader, offset, EtherLen).isIn(ShareSet(s.bridge))
}

// isPod matches packets of pods that come in or go out by the NIC. link and offset select the incoming link and the
// source, or the outgoing link and the destination.
func (s *share) isPod(x expressions, f Family, link expr.MetaKey, offset uint32) expressions {
	return x.isMeta(link, nftnl.LinkKey(s.NIC, nil, 0)).isPod(f, link, offset)
}

// isMulticast matches frames to a multicast or broadcast MAC.
func (x expressions) isMulticast() expressions {
	group := []byte{1, 0, 0, 0, 0, 0}
	x.load(expr.PayloadBaseLLHeader, etherTarget, EtherLen).Mask(group, nil)
	return x.compare(expr.CmpOpEq, group)
}

// RemoveShare deletes the chains and sets of a bridge's Share from the table. It deletes the whole table of family
// netdev if that table contains no other objects.
func (inv *Inventory) RemoveShare(t *Transaction, bridge string) {
	others := func(at Place) bool { return !ofShare(at, bridge) }
	if inv.family == unix.NFPROTO_NETDEV && inv.Table &&
		!slices.ContainsFunc(slices.Concat(inv.chains, inv.sets), others) {
		t.delTable(inv.family)
		return
	}

	for _, at := range inv.chains {
		if ofShare(at, bridge) {
			t.delChain(at)
		}
	}

	for _, at := range inv.sets {
		if ofShare(at, bridge) {
			t.delSet(at)
		}
	}
}
