package nftnl

import (
	"strings"

	"github.com/google/nftables/userdata"
)

// Comment makes userdata of a text, as libnftables does: a type of one byte, a length of
// one byte, and the text with a NUL. It is the same for rules, chains and elements.
func Comment(text string) []byte {
	return userdata.AppendString(make([]byte, 0, 2+len(text)+1), userdata.TypeComment, text)
}

// CommentOf finds the comment in userdata, which may be anyone's and anything: Get of
// package userdata panics where a length is too large.
func CommentOf(b []byte) (string, bool) {
	for len(b) >= 2 {
		typ, n := userdata.Type(b[0]), int(b[1])
		if n > len(b)-2 {
			return "", false
		}
		if typ == userdata.TypeComment {
			text, _, _ := strings.Cut(string(b[2:2+n]), "\x00")
			return text, true
		}
		b = b[2+n:]
	}
	return "", false
}
