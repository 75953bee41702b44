package network

import (
	"context"
	"errors"
	"io/fs"
	"slices"

	"github.com/tombolo-cni/tombolo"
)

// uplinks names the host's uplinks, by which pods may leave it: see nft.Conn.SetUplinks. Bridges of networks need not
// be among them.
func (s *session) uplinks(ctx context.Context) ([]string, error) {
	records, _, err := s.Dir.ListNetworks()
	if err != nil {
		return nil, err
	}
	var ours []string
	for _, rec := range records {
		ours = append(ours, rec.Bridge)
	}
	return s.Links.Uplinks(ctx, ours...)
}

// lookAtExits finds uplinks of the host that the rules do not know. It takes several lists, so Add and Check do not.
func (s *session) lookAtExits(ctx context.Context, found *findings) error {
	known, err := s.Firewall.Uplinks(ctx)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the table is missing, which firewallPart reports
	}
	if err != nil {
		return err
	}
	names, err := s.uplinks(ctx)
	for _, name := range names {
		if !slices.Contains(known, name) {
			found.Advise(tombolo.RemedyRepair, "%s, an uplink of the host, is missing in set uplinks of table inet tombolo", name)
		}
	}
	return err
}
