package recorded

import (
	"context"
	"errors"
	"io/fs"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/nft"
)

// Others are the networks, as the firewall has them, that attachments of other programs' are on and that
// no record tells of; more, which may be nil, is to be one of these attachments. admitted says that what one
// of them sends may pass other firewalls.
func Others(ctx context.Context, links *bridge.Conn, dir *state.Dir, more *state.Attachment) (list []nft.Network, admitted bool, _ error) {
	others, _, err := dir.ListOthers()
	if err != nil {
		return nil, false, err
	}
	if more != nil {
		others = append(others, more)
	}
	at := map[string]int{}
	for _, a := range others {
		admitted = admitted || a.Admitted && a.Bridge != ""
		i, there := at[a.Network]
		if !there {
			if _, err := dir.LoadNetwork(a.Network); !errors.Is(err, fs.ErrNotExist) {
				continue
			}
			i, at[a.Network], list = len(list), len(list), append(list, nft.Network{Name: a.Network, PortSNAT: true})
		}
		if !a.Admitted || a.Bridge == "" {
			continue
		}
		l, err := links.Link(ctx, a.Bridge)
		if errors.Is(err, fs.ErrNotExist) || err == nil && l.Kind != "bridge" {
			continue // of a pod that is gone, or one without a bridge
		}
		if err != nil {
			return nil, false, err
		}
		list[i].Bridge, list[i].NFCall, list[i].Policy = l.Name, nfCall(l), policyOf(a.Policy)
	}
	return list, admitted, nil
}

// OfOthers is that of one name among them.
func OfOthers(ctx context.Context, links *bridge.Conn, dir *state.Dir, name string, more *state.Attachment) (nft.Network, error) {
	list, _, err := Others(ctx, links, dir, more)
	for _, n := range list {
		if n.Name == name {
			return n, err
		}
	}
	return nft.Network{Name: name, PortSNAT: true}, err
}
