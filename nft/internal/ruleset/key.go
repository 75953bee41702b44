package ruleset

import (
	"fmt"
	"hash/fnv"
	"strings"
)

// ownerPrefix starts the comments of our elements; the number is that of their
// form.
const OwnerPrefix = "tombolo:1:"

// maxOwner is how long the name of an endpoint's owner may be, in bytes.
const MaxOwner = 16

// An element's comment holds the network and the owner, and nft reads back
// comments of up to 128 bytes only.
const (
	MaxComment    = 128
	maxNetworkKey = MaxComment - len(OwnerPrefix) - MaxOwner - len(":")
	keptOfLong    = 80
)

// NetworkKey is the network's name as comments and names of chains and sets have
// it: a name that is too long is cut and gets a hash, behind a character that nft
// takes in names and networks' names never have.
func NetworkKey(name string) string {
	if len(name) <= maxNetworkKey {
		return name
	}
	h := fnv.New64a()
	h.Write([]byte(name))
	return fmt.Sprintf("%s/%016x", name[:keptOfLong], h.Sum64())
}

// networkComment starts the comment of what is a network's own.
func networkComment(networkKey string) string { return OwnerPrefix + ":" + networkKey }

// IsNetwork says that an element is a network's own.
func (e *ElementState) IsNetwork(key string) bool {
	own, _, _ := strings.Cut(e.Comment, ",")
	return own == networkComment(key)
}
