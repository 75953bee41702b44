package recorded

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// Misplaced is a gateway that another link has, too.
type Misplaced struct {
	Gateway netip.Prefix
	Link    string
	Index   int
	Ours    bool // a bridge of ours, of which no network needs the address
}

// Elsewhere finds the network's gateways on other links than at, which is its own. The host may send
// what is for pods out of those: a link keeps its addresses when somebody renames it.
func Elsewhere(ctx context.Context, dir *state.Dir, links *bridge.Conn, rec *state.Network, at *bridge.Link) ([]Misplaced, error) {
	if len(rec.Gateways) == 0 {
		return nil, nil
	}
	addresses, err := links.Addresses().List(addr.Filter{})
	if err != nil {
		return nil, err
	}
	var list []Misplaced
	for _, a := range addresses {
		if a.Link == at.Index || a.Prefix.IsSingleIP() || !slices.Contains(rec.Gateways, a.Prefix) {
			continue
		}
		l, err := links.LinkByIndex(ctx, a.Link)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it has gone since
		}
		if err != nil {
			return nil, err
		}
		if l.Master != 0 {
			continue // a port has no say, and a VRF has routes of its own
		}
		ours := l.Alias == endpoint.BridgeAlias
		if ours {
			records, _, err := dir.ListNetworks()
			if err != nil {
				return nil, err
			}
			if slices.ContainsFunc(records, func(o *state.Network) bool { return o.GatewayLink() == l.Name && slices.Contains(o.Gateways, a.Prefix) }) {
				continue
			}
		}
		list = append(list, Misplaced{a.Prefix, l.Name, l.Index, ours})
	}
	return list, nil
}
