package nft

import "strings"

// Comments are the userdata that libnftables writes: a type of one byte, a length
// of one byte, and the text with a NUL.
const udataComment = 0 // NFTNL_UDATA_RULE_COMMENT, NFTNL_UDATA_SET_ELEM_COMMENT

func encodeComment(text string) []byte {
	b := make([]byte, 0, 2+len(text)+1)
	b = append(b, udataComment, byte(len(text)+1))
	b = append(b, text...)
	return append(b, 0)
}

// decodeComment finds the comment in userdata, which may be anyone's and anything.
func decodeComment(b []byte) (string, bool) {
	for len(b) >= 2 {
		typ, n := b[0], int(b[1])
		if n > len(b)-2 {
			return "", false
		}
		if typ == udataComment {
			text, _, _ := strings.Cut(string(b[2:2+n]), "\x00")
			return text, true
		}
		b = b[2+n:]
	}
	return "", false
}

// ownerPrefix starts the comments of our elements; the number is that of their
// form.
const ownerPrefix = "tombolo:1:"

// ownerComment is the comment of an endpoint's elements: tombolo:1:OWNER:NETWORK.
func ownerComment(o Owner, networkKey string) string {
	return ownerPrefix + string(o) + ":" + networkKey
}

// parseOwner takes such a comment apart; it is false for any other.
func parseOwner(comment string) (owner Owner, networkKey string, ok bool) {
	rest, ok := strings.CutPrefix(comment, ownerPrefix)
	if !ok {
		return "", "", false
	}
	o, key, ok := strings.Cut(rest, ":")
	if !ok || Owner(o).check() != nil || key == "" {
		return "", "", false
	}
	return Owner(o), key, true
}
