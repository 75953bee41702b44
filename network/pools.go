package network

import (
	"context"
	"errors"

	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
)

// Pool is how far a range set of a network is used up.
type Pool struct {
	Network string
	ipam.Pool
}

// Pools counts the reservations of the networks whose addresses an ipam.HostLocal gives, by
// their records: a network is on record from its first Add. It goes on past a network for which
// that fails, takes no lock and changes nothing.
func (n *Node) Pools(ctx context.Context) ([]Pool, error) {
	if err := n.usable(ctx); err != nil {
		return nil, err
	}
	records, _, err := n.dir.ListNetworks()
	if err != nil {
		return nil, fail.State(err)
	}
	var list []Pool
	var errs []error
	for _, rec := range records {
		pools, err := recorded.Pools(ctx, n.dir.Path(), rec)
		errs = append(errs, err)
		for _, p := range pools {
			list = append(list, Pool{rec.Name, p})
		}
	}
	return list, errors.Join(errs...)
}
