package network

import (
	"context"
	"errors"
	"io/fs"
	"slices"

	"github.com/tombolo-cni/tombolo"
)

// exitsPart is what the rules know of the host's uplinks, by which pods may leave it: see nft.Conn.SetUplinks. All
// networks share it.
type exitsPart struct{}

func (exitsPart) look(ctx context.Context, n *site) error {
	if n.usual {
		return nil // the keeper and the next build follow the host's uplinks
	}
	want, err := n.s.Links.Uplinks(ctx)
	if err != nil {
		return err
	}
	have, err := n.s.Firewall.Uplinks(ctx)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the table is missing, which firewallPart reports
	}
	if err == nil && !slices.Equal(have, want) {
		n.found.Advise(tombolo.RemedyRepair, "the host's uplinks among bridges and veth links are %q, and the firewall knows %q", want, have)
	}
	return err
}

func (exitsPart) make(ctx context.Context, n *site) (bool, error) {
	names, err := n.s.Links.Uplinks(ctx)
	if err != nil {
		return false, err
	}
	_, err = n.s.Firewall.SetUplinks(ctx, names...)
	return false, err
}
