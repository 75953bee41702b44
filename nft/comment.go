package nft

import (
	"strings"
)

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
