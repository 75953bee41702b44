package ruleset

import (
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

const (
	internalChain = "internal"
	internalSet   = "internal" // the bridges of internal networks
)

func internalSets() []Set { return []Set{keySet(internalSet, nftnl.TypeIfname)} }

// internal returns the chain that drops packets between an internal network's bridge and all other links, in both
// directions. The firewall has this chain and its set only if there is an internal network.
func internal() Chain {
	return filterChain(InInet(internalChain), unix.NF_INET_FORWARD, priorityBeforeFilter-1, sharedSettings,
		(*rules).addInternal)
}

func (list *rules) addInternal() {
	for _, link := range [...]struct {
		direction string
		key       expr.MetaKey
	}{{"leaves", expr.MetaKeyIIFNAME}, {"enters", expr.MetaKeyOIFNAME}} {
		list.begin("drop what "+link.direction+" an internal network").
			linkIn(link.key, internalSet).loadBridges().isNotIn(bridgesSet).Drop()
	}
}
