package ruleset

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// A program that empties a set of ours (nft flush set) takes what every pod has in it, and
// nothing else shows it: not the rules that look into the set, nor their number. So each
// set and map has one element that is nobody's, a sentinel, which goes with the others:
// a single get shows whether they are still there.
//
// Sentinels match no packet that goes anywhere. Those with a link have one that cannot
// be: the kernel takes no name with a slash. The others are of no address, which nothing
// is sent to, or of protocol 255 and port 0, both of which are reserved.
const (
	SentinelLink     = "/sentinel"
	sentinelProtocol = unix.IPPROTO_RAW
	SentinelComment  = OwnerPrefix + "sentinel"
)

// Sentinel is that of a set.
func (s *Set) Sentinel() Element {
	el := Element{Set: s.Place, Key: make([]byte, s.KeyLen)}
	const parts = 5 // at most
	rest := el.Key
	for shift := parts * nftnl.TypeBits; shift >= 0; shift -= nftnl.TypeBits {
		typ := s.KeyType >> shift & (1<<nftnl.TypeBits - 1)
		if typ == 0 {
			continue
		}
		switch typ {
		case nftnl.TypeIfname:
			copy(rest, SentinelLink)
		case nftnl.TypeProtocol:
			rest[0] = sentinelProtocol
		}
		rest = rest[min(len(rest), (typeLen(typ)+Slot-1)/Slot*Slot):]
	}
	if s.DataLen > 0 {
		el.Data = make([]byte, s.DataLen) // of no address, and no port
	}
	return el
}

// getSentinels looks up those of sets, and notes the sets that have theirs.
func (st *State) getSentinels(b *nl.Batch, sets []Set) {
	for i := range sets {
		at := sets[i].Place
		st.table.getElement(b, sets[i].Sentinel(), func([]byte) error {
			st.sentinels[at] = true
			return nil
		})
	}
}

// emptied gives those sets that are there and right, but for their sentinels.
func (st *State) emptied(rs *Ruleset) []Set {
	return slices.DeleteFunc(rs.Sets(), func(s Set) bool {
		have, ok := st.sets[s.Place]
		return !ok || !s.matches(have) || st.sentinels[s.Place]
	})
}
