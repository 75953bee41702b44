package endpoint

import (
	"net/netip"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// The alias of a port says whose it is, so that a node whose state was lost can
// still tell: tombolo:1:<hash>:<network>:<addresses>.

// AliasPrefix begins every alias of ours.
const AliasPrefix = "tombolo:1:"

// BridgeAlias marks a bridge that we made. One that was there before is its
// owner's: it keeps its MTU and its router advertisements, and is never deleted.
const BridgeAlias = AliasPrefix + "bridge"

// ShareAlias marks the pair by which a bridge shares a NIC.
const ShareAlias = AliasPrefix + "share"

const aliasMax = 255 // IFALIASZ without its NUL

// AliasOwner is the beginning of an attachment's alias, which no other has.
func AliasOwner(hash string) string { return AliasPrefix + hash + ":" }

// AliasOf is the alias of an attachment's port, from its record.
func AliasOf(a *state.Attachment) string { return Alias(a.Hash(), a.Network, Addresses(a)) }

// Alias leaves the addresses out where they do not fit; nf_tables has them too.
func Alias(hash, network string, addresses []netip.Addr) string {
	head := AliasOwner(hash) + NetworkToken(network) + ":"
	if full := head + printable.List(addresses, ","); len(full) <= aliasMax {
		return full
	}
	return head
}

// NetworkToken is a network's name where it is short, else a hash of it: no name
// begins with '#'.
func NetworkToken(network string) string {
	const longest = 64
	if len(network) <= longest {
		return network
	}
	return "#" + ident.Hash(network, "", "")
}

// Mark is what an alias says.
type Mark struct {
	Hash      string
	Network   string // as NetworkToken gives it
	Addresses []netip.Addr
}

// ParseAlias reads the alias of a port; that of others is none.
func ParseAlias(s string) (Mark, bool) {
	rest, ok := strings.CutPrefix(s, AliasPrefix)
	if !ok {
		return Mark{}, false
	}
	var m Mark
	var addresses string
	if m.Hash, rest, ok = strings.Cut(rest, ":"); !ok || !ident.IsHash(m.Hash) {
		return Mark{}, false
	}
	// An IPv6 address has colons of its own, a network's name has none.
	if m.Network, addresses, ok = strings.Cut(rest, ":"); !ok {
		return Mark{}, false
	}
	for _, text := range strings.Split(addresses, ",") {
		if ip, err := netip.ParseAddr(text); err == nil {
			m.Addresses = append(m.Addresses, ip)
		}
	}
	return m, true
}
