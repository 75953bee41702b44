package ruleset

import (
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

const (
	internalChain = "internal"
	internalSet   = "internal"
)

// internalSets returns the set of the bridges of internal networks. The set and the chain are made only for networks
// that need them, so that packets of other networks pass no rule for them.
func internalSets() []Set {
	return []Set{keySet(internalSet, nftnl.TypeIfname)}
}

// internal returns the chain that drops packets between an internal network and all other links, in both directions.
func internal() Chain {
	return Chain{
		Place: InInet(internalChain), Kind: "filter", Hook: unix.NF_INET_FORWARD, Priority: priorityBeforeFilter - 1,
		settings: sharedSettings, write: (*rules).addInternal,
	}
}

func (list *rules) addInternal() {
	for _, link := range [...]struct {
		direction string
		key       expr.MetaKey
	}{{"leaves", expr.MetaKeyIIFNAME}, {"enters", expr.MetaKeyOIFNAME}} {
		list.rule("drop what "+link.direction+" an internal network").
			linkIn(link.key, internalSet).bridged().isNotIn(bridgesSet).Drop()
	}
}
