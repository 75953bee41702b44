package ruleset

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"sort"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// The sets of bridges contain link names. Two of them contain pairs of a name with itself, to match packets that come
// in and go out by the same bridge.
const (
	OursSet     = "ours"     // the bridges of all networks, and their links in VLANs
	gatewaysSet = "gateways" // the bridges of networks with Gateway, through which the host routes only for pods
	bridgesSet  = "bridges"  // the same links as in OursSet, as pairs
	policiesSet = "policies" // bridges with a policy
	isolatedSet = "isolated" // bridges with the policy Isolated
	bypassSet   = "bypass"   // bridges without NFCall: packets between their pods bypass the firewall's hooks
	lansSet     = "lans"     // bridges that connect to other machines

	// SharesSet contains the NICs of all Shares. The host routes pods' packets through them, but other programs use
	// them too.
	SharesSet = "shares"

	// UplinksSet contains the bridges and veth links that belong to no network, and through which the host itself
	// reaches other machines.
	UplinksSet = "uplinks"
	// TrustedSet contains links of networks whose packets another firewall always accepts, as firewalld does for
	// links in its zone trusted.
	TrustedSet = "trusted"
)

// HostComment is the comment of elements in HostSets that belong to the host and not to a network.
const HostComment = OwnerPrefix + "host"

// HostSets returns the names of the sets with facts about the host.
func HostSets() []string {
	families := Families()
	return []string{UplinksSet, TrustedSet, families[0].Services, families[1].Services}
}

// BridgeSets returns the sets of link names that every firewall has. Sets for internal networks and for egress policies
// are not among them.
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

// bridgeElements returns the network's elements in the sets of bridges, or nil if the network has no bridge.
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
	for _, setting := range [...]struct {
		is   bool
		name string
	}{{n.NFCall, ",nf"}, {n.LAN, ",lan"}, {n.Gateway, ",gw"}, {n.Internal, ",internal"}} {
		if setting.is {
			comment += setting.name
		}
	}

	return comment
}

const (
	internalChain = "internal"
	internalSet   = "internal" // the bridges of internal networks
)

func internalSets() []Set { return []Set{keySet(internalSet, nftnl.TypeIfname)} }

// addInternal appends the rules of a chain that drops packets between an internal network's bridge and all other links,
// in both directions. The first internal network creates this chain and its set.
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

// addPodsOnly adds the chain that drops forwarded packets without the mark, in the families of closed. Rules before
// each drop are the exceptions. Without this chain, the host would forward packets that do not concern pods, because
// forwarding for pods is on. The chain runs after the chain forward, which sets the mark. If no family is closed, the
// chain must not exist.
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
	// this hook too, and no property of the packet distinguishes them from packets that the host routes. So the rules
	// look up routes, and accept only packets that come in and go out by a bridge. They accept such a packet if its
	// destination is behind its incoming link. They also accept it if the host has no route to its destination, or no
	// route to its source by its incoming link.
	bridge := nftnl.LinkKey("bridge", nil, 0) // a kind has the same length as a link's name
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
		list.begin(route.text).isMeta(metaIIFKind, bridge).isMeta(metaOIFKind, bridge).
			hasRoute(route.fib, route.exists).Return()
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

// bridgeOutput is the hook for packets that the host sends through a bridge. The kernel calls it once for each port
// that gets a copy.
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

// normalDedup returns a sorted copy of the list with masked subnets and without duplicates, so that lists with the same
// meaning produce the same rules.
func normalDedup(list []Dedup) []Dedup {
	list = slices.Clone(list)
	for i := range list {
		list[i].Subnet = list[i].Subnet.Masked()
	}
	sort.Slice(list, func(i, j int) bool { return compareDedups(list[i], list[j]) < 0 })
	return slices.CompactFunc(list, func(a, b Dedup) bool { return compareDedups(a, b) == 0 })
}

func compareDedups(a, b Dedup) int {
	return cmp.Or(a.Subnet.Compare(b.Subnet), a.Gateway.Compare(b.Gateway), slices.Compare(a.BridgeMAC, b.BridgeMAC))
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
