package nft

import (
	"strings"

	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// ownerComment is the comment of an endpoint's elements: tombolo:1:OWNER:NETWORK.
func ownerComment(o Owner, networkKey string) string {
	return ruleset.OwnerPrefix + string(o) + ":" + networkKey
}

// parseOwner takes such a comment apart; it is false for any other.
func parseOwner(comment string) (owner Owner, networkKey string, ok bool) {
	rest, ok := strings.CutPrefix(comment, ruleset.OwnerPrefix)
	if !ok {
		return "", "", false
	}
	o, key, ok := strings.Cut(rest, ":")
	if !ok || Owner(o).check() != nil || key == "" {
		return "", "", false
	}
	return Owner(o), key, true
}

// ownerOf is what an element's comment says; it is false for elements that are not ours.
func ownerOf(el *ruleset.ElementState) (owner Owner, networkKey string, ok bool) {
	return parseOwner(el.Comment)
}
