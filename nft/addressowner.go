package nft

import (
	"context"
	"net/netip"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// AddressOwner says whose an address is behind a bridge, in one request: the error of an Add of
// it would be the *ConflictError that it returns. It is nil where the address is nobody's,
// and where the table or a set is missing; what belongs to another program counts as
// somebody's.
func (c *Conn) AddressOwner(ctx context.Context, bridge string, a netip.Addr) (*ConflictError, error) {
	if err := c.usable(ctx); err != nil {
		return nil, err
	}
	if !ident.IsLinkName(bridge) || !a.IsValid() {
		return nil, invalid("address %s behind bridge %q", a, bridge)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	set := ruleset.Pods6Set
	if a = a.Unmap().WithZone(""); a.Is4() {
		set = ruleset.Pods4Set
	}
	have, err := c.tables.Lookup([]ruleset.Element{{Set: ruleset.InInet(set), Key: nftnl.LinkKey(bridge, a.AsSlice(), 0)}})
	if err != nil || have[0] == nil {
		return nil, err
	}
	return newConflict(c.tables.Name, *have[0], ""), nil
}
