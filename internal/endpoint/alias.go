package endpoint

import (
	"net/netip"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// The alias of a port names the port's owner: tombolo:1:<hash>:<network>:<addresses>. So the owner can be found even
// if the node has lost its state.

// AliasPrefix is the prefix of each alias that Tombolo sets.
const AliasPrefix = "tombolo:1:"

// BridgeAlias marks a bridge that Tombolo created. Tombolo never deletes a bridge without this alias, and leaves its
// MTU and its router advertisements alone.
const BridgeAlias = AliasPrefix + "bridge"

// ShareAlias is the alias prefix of the veth pair that connects a bridge to a shared NIC.
const ShareAlias = AliasPrefix + "share"

const aliasMax = 255 // IFALIASZ without its NUL

// AliasOwner returns the beginning of an attachment's alias. No other attachment's alias begins with it.
func AliasOwner(hash string) string { return AliasPrefix + hash + ":" }

// AliasOf returns the alias for an attachment's port.
func AliasOf(a *state.Attachment) string { return Alias(a.Hash(), a.Network, Addresses(a)) }

// Alias returns the alias for a port. If the addresses do not fit, it leaves them out; nf_tables has them too.
func Alias(hash, network string, addresses []netip.Addr) string {
	head := AliasOwner(hash) + NetworkToken(network) + ":"
	if full := head + printable.List(addresses, ","); len(full) <= aliasMax {
		return full
	}
	return head
}

// NetworkToken returns a network's name if that is short. Otherwise it returns "#" and a hash of the name. No
// network's name begins with "#".
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

	// Cut at the first colon. An IPv6 address contains colons, but a network's name does not.
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
