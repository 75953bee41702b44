package ruleset

import (
	"encoding/binary"
	"slices"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

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

// podsOnly returns the chain that drops forwarded packets that are neither from nor to pods, in the families of
// closed. Without this chain, the host would forward such packets, because forwarding for pods is on. The chain runs
// after the chain forward, which marks the pods' packets.
func podsOnly(closed []Closed, mark uint32) Chain {
	settings := []string{markSettings(mark)}
	for _, c := range closed {
		settings = append(settings, c.family().name)
	}
	return filterChain(InInet(podsOnlyChain), unix.NF_INET_FORWARD, priorityBeforeFilter+2,
		strings.Join(settings, ", "), func(list *rules) { list.addPodsOnly(closed, mark) })
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
