package nftnl

// nft's numbers of its data types (enum datatypes in its include/datatype.h); the kernel only
// stores them. Of a concatenation, each part has TypeBits.
const (
	TypeInteger  = 4
	TypeIPv4     = 7
	TypeIPv6     = 8
	TypeEther    = 9
	TypeProtocol = 12 // inet_proto
	TypePort     = 13 // inet_service
	TypeIfname   = 41
	TypeBits     = 6
)

// Lengths in bytes, of parts of keys.
const (
	IfnameLen = 16 // IFNAMSIZ: a name and at least one NUL
	EtherLen  = 6
	EtherSlot = 8 // parts of a concatenation fill registers of 4 bytes
	IPv4Len   = 4
	IPv6Len   = 16
)

// LinkKey is the key of a link and something behind it: the name fills 16 bytes, and the rest
// at least pad.
func LinkKey(link string, rest []byte, pad int) []byte {
	key := make([]byte, IfnameLen, IfnameLen+max(len(rest), pad))
	copy(key, link)
	key = append(key, rest...)
	for len(key) < IfnameLen+pad {
		key = append(key, 0)
	}
	return key
}
