package ruleset

import (
	"hash/fnv"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// Sum stands for a network, in what was seen of a generation: for all that its ruleset is made from.
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
		write(rs.Bridge[i].Set, string(rs.Bridge[i].Key))
	}
	return sum.Sum64()
}
