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

// look finds nothing: it would list all links of the host, which only the keeper and Inspect do (lookAtExits).
func (exitsPart) look(context.Context, *site) error { return nil }

func (exitsPart) make(ctx context.Context, n *site) (bool, error) {
	names, err := n.s.Links.Uplinks(ctx)
	if err != nil {
		return false, err
	}
	return false, n.s.Firewall.SetUplinks(ctx, names...)
}

// lookAtExits finds uplinks of the host that the rules do not know.
func (s *session) lookAtExits(ctx context.Context, found *findings) error {
	names, err := s.Links.Uplinks(ctx)
	if err != nil {
		return err
	}
	known, err := s.Firewall.Uplinks(ctx)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the table is missing, which firewallPart reports
	}
	for _, name := range names {
		if err == nil && !slices.Contains(known, name) {
			found.Advise(tombolo.RemedyRepair, "%s, an uplink of the host, is missing in set uplinks of table inet tombolo", name)
		}
	}
	return err
}
