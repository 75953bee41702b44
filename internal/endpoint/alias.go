package endpoint

import (
	"net/netip"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// The alias of a port names the port's owner: tombolo:1:<hash>:<network>:<addresses>. So a node that has lost its
// state can still find the owner.

// AliasPrefix begins each alias that Tombolo sets.
const AliasPrefix = "tombolo:1:"

// BridgeAlias marks a bridge that Tombolo created. A bridge that existed before belongs to its owner: it keeps its
// MTU and its router advertisements, and is never deleted.
const BridgeAlias = AliasPrefix + "bridge"

// ShareAlias marks the veth pair that connects a bridge to a shared NIC.
const ShareAlias = AliasPrefix + "share"

const aliasMax = 255 // IFALIASZ without its NUL

// AliasOwner returns the beginning of an attachment's alias. No other attachment's alias begins so.
func AliasOwner(hash string) string { return AliasPrefix + hash + ":" }

// AliasOf returns the alias for an attachment's port.
func AliasOf(a *state.Attachment) string { return Alias(a.Hash(), a.Network, Addresses(a)) }

// Alias returns the alias for a port. It leaves the addresses out if they do not fit; nf_tables has them too.
func Alias(hash, network string, addresses []netip.Addr) string {
	head := AliasOwner(hash) + NetworkToken(network) + ":"
	if full := head + printable.List(addresses, ","); len(full) <= aliasMax {
		return full
	}
	return head
}

// NetworkToken returns a network's name if it is short, else a hash of it, which begins with '#' as no name does.
func NetworkToken(network string) string {
	const longest = 64
	if len(network) <= longest {
		return network
	}
	return "#" + ident.Hash(network, "", "")
}

// Mark is the content of a port's alias.
type Mark struct {
	Hash      string
	Network   string // a NetworkToken
	Addresses []netip.Addr
}

// ParseAlias parses the alias of a port. It returns false for any other alias.
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
