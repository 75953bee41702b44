package network

import (
	"cmp"
	"context"
	"errors"

	"github.com/tombolo-cni/tombolo/ipam"
)

// Networks lists the names of the networks on record.
func (n *Node) Networks(ctx context.Context) ([]string, error) {
	names, err := n.cfg.Dir.Networks()
	return names, stateError(err)
}

// Attachments lists a network's attachments on record. It skips unreadable records, which Inspect reports.
func (n *Node) Attachments(ctx context.Context, network string) ([]*Attachment, error) {
	if err := checkName(network); err != nil {
		return nil, err
	}

	records, _, err := n.cfg.Dir.List(network)
	if err != nil {
		return nil, stateError(err)
	}

	list := make([]*Attachment, len(records))
	for i, rec := range records {
		list[i] = attachmentOf(rec)
	}
	return list, nil
}

// Pool describes the use of one range set of a network.
type Pool struct {
	Network string
	ipam.Pool
}

// Pools returns the use of the range sets of all networks whose addresses come from an ipam.HostLocal. It knows a
// network from the network's first Add on. After a failure it continues with the other networks. It takes no lock and
// changes nothing.
func (n *Node) Pools(ctx context.Context) ([]Pool, error) {
	records, _, err := n.cfg.Dir.ListNetworks()
	if err != nil {
		return nil, stateError(err)
	}

	var list []Pool
	var errs []error
	for _, rec := range records {
		if len(rec.Pools) == 0 {
			continue
		}

		h, err := ipam.NewHostLocal(&ipam.Config{Network: rec.Name, Dir: cmp.Or(rec.PoolDir, n.cfg.Dir.Path()+"/ipam"),
			Ranges: rec.Pools})
		var pools []ipam.Pool
		if err == nil {
			pools, err = h.Pools(ctx)
		}

		errs = append(errs, err)
		for _, p := range pools {
			list = append(list, Pool{rec.Name, p})
		}
	}

	return list, errors.Join(errs...)
}
