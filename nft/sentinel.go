package nft

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Whoever empties a set of ours (nft flush set) takes what every pod has in it, and
// nothing else shows it: not the rules that look into the set, nor their number. So each
// set and map has one element that is nobody's, a sentinel, which goes with the others:
// a single get shows whether they are still there.
//
// Sentinels match no packet that goes anywhere. Those with a link have one that cannot
// be: the kernel takes no name with a slash. The others are of no address, which nothing
// is sent to, or of protocol 255 and port 0, both of which are reserved.
const (
	sentinelLink     = "/sentinel"
	sentinelProtocol = unix.IPPROTO_RAW
	sentinelComment  = ownerPrefix + "sentinel"
)

// sentinel is that of a set.
func (s *set) sentinel() element {
	el := element{set: s.place, key: make([]byte, s.keyLen)}
	const parts = 5 // at most
	rest := el.key
	for shift := parts * nftnl.TypeBits; shift >= 0; shift -= nftnl.TypeBits {
		typ := s.keyType >> shift & (1<<nftnl.TypeBits - 1)
		if typ == 0 {
			continue
		}
		switch typ {
		case nftnl.TypeIfname:
			copy(rest, sentinelLink)
		case nftnl.TypeProtocol:
			rest[0] = sentinelProtocol
		case nftnl.TypeFamily:
			rest[0] = unix.NFPROTO_IPV4
		}
		rest = rest[min(len(rest), (typeLen(typ)+slot-1)/slot*slot):]
	}
	if s.dataLen > 0 {
		el.data = make([]byte, s.dataLen) // of no address, and no port
	}
	return el
}

// getSentinels looks up those of sets, and notes the sets that have theirs.
func (st *state) getSentinels(b *nl.Batch, sets []set) {
	for i := range sets {
		at := sets[i].place
		st.table.getElement(b, sets[i].sentinel(), func([]byte) error {
			st.sentinels[at] = true
			return nil
		})
	}
}

// emptied gives those sets that are there and right, but for their sentinels.
func (st *state) emptied(rs *ruleset) []set {
	return slices.DeleteFunc(rs.sets(), func(s set) bool {
		have, ok := st.sets[s.place]
		return !ok || !s.matches(have) || st.sentinels[s.place]
	})
}
