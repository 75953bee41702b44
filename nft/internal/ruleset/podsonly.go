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

// Closed is a family that the host forwards for pods only. It has the fields of nft's Closed.
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

// podsOnly returns the chain that drops packets which the host would forward for others, since its links must forward
// for pods. It comes after the chain forward, which marks the pods' packets.
func podsOnly(closed []Closed, mark uint32) Chain {
	settings := []string{markSettings(mark)}
	for _, c := range closed {
		settings = append(settings, c.family().name)
	}
	return filterChain(InInet(podsOnlyChain), unix.NF_INET_FORWARD, priorityBeforeFilter+2, strings.Join(settings, ", "),
		func(list *rules) { list.addPodsOnly(closed, mark) })
}

func (list *rules) addPodsOnly(closed []Closed, mark uint32) {
	const in, out = expr.MetaKeyIIFNAME, expr.MetaKeyOIFNAME
	list.rule("what comes from a gateways' link").linkIn(in, gatewaysSet).Leave()
	list.rule("what goes to one").linkIn(out, gatewaysSet).Leave()
	x := list.rule("what else pods send and receive").loadMeta(expr.MetaKeyMARK)
	x.Mask(binary.NativeEndian.AppendUint32(nil, mark), nil)
	x.compare(expr.CmpOpNeq, make([]byte, 4)).Leave()

	// With br_netfilter, frames that another program's bridge forwards itself pass here, and no property of the
	// packet reveals this. The host would route a packet to a link other than the one it came in by. If the host has
	// no address on a bridge, the bridge's own routes usually lead to no sender.
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
		list.rule(route.text).betweenBridges().hasRoute(route.fib, route.exists).Leave()
	}

	for _, c := range closed {
		f := c.family()
		list.rule("multicast, which a routing daemon forwards, "+f.name).isTo(f, f.multicast).Leave()
		for _, router := range slices.Sorted(slices.Values(c.Routers)) {
			list.rule("the owner of "+router+" has it forward "+f.name).
				is(f).isMeta(in, nftnl.LinkKey(router, nil, 0)).Leave()
		}

		list.rule("the host is no router of " + f.name).is(f).Drop()
	}
}

// betweenBridges matches packets that come in by a link of kind bridge, and leave by one, perhaps the same.
func (x expressions) betweenBridges() expressions {
	bridge := nftnl.LinkKey("bridge", nil, 0) // a kind is as long as a name
	return x.isMeta(metaIIFKind, bridge).isMeta(metaOIFKind, bridge)
}

// NFT_META_IIFKIND and NFT_META_OIFKIND of include/uapi/linux/netfilter/nf_tables.h. Hardware has no kind.
const (
	metaIIFKind expr.MetaKey = 26
	metaOIFKind expr.MetaKey = 27
)

// hasRoute matches if the routes that the flags of fib select exist, or if there are none.
func (x expressions) hasRoute(fib expr.Fib, exists bool) expressions {
	fib.Register, fib.ResultOIF, fib.FlagPRESENT = uint32(nftnl.First), true, true
	x.Add(&fib)
	found := make([]byte, 4)
	if exists {
		found[0] = 1
	}
	return x.compare(expr.CmpOpEq, found)
}
