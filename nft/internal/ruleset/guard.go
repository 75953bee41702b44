package ruleset

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/nft/guard"
)

const quietPrefix = "quiet-"

// guardSets are package guard's, in our table.
func guardSets() []Set {
	var list []Set
	for _, s := range guard.Sets() {
		list = append(list, Set{Place: InBridge(s.Name), KeyType: s.KeyType, KeyLen: s.KeyLen, typeof: s.Userdata})
	}
	return list
}

func isGuardSet(at Place) bool {
	return at.Family == unix.NFPROTO_BRIDGE && guard.IsSet(at.Name)
}

// addGuard adds what guards the network's pods: the same for all networks. Without it,
// chains that are there may be another network's too, and go with the table.
func (rs *Ruleset) addGuard(n *Network) {
	if n.Groups || n.Guard {
		rs.addChains(guard.Everyone())
	}
	if n.Guard {
		rs.addChains(guard.Guarded())
	}
}

// addReports adds the network's chain against reports that nobody reads, or has it removed.
func (rs *Ruleset) addReports(n *Network) {
	if !n.DropReports {
		rs.gone = append(rs.gone, InBridge(quietPrefix+n.Key))
		return
	}
	reports := guard.Reports()
	for i := range reports {
		reports[i].Name = quietPrefix + n.Key
	}
	rs.addChains(reports)
}

func (rs *Ruleset) addChains(list []guard.Chain) {
	rs.needTable(unix.NFPROTO_BRIDGE)
	for _, ch := range list {
		rs.Chains = append(rs.Chains, Chain{
			Place: InBridge(ch.Name), Kind: "filter", Hook: ch.Hook, Priority: ch.Priority, settings: ch.Settings,
			write: func(list *rules) { *list = ch.Rules() },
		})
	}
}

// needTable has the table of a family made.
func (rs *Ruleset) needTable(family uint8) {
	if !slices.Contains(rs.tables, family) {
		rs.tables = append(rs.tables, family)
	}
}
