package ipam

import (
	"context"
	"errors"
	"io/fs"
	"strings"
)

// Ranged is an Allocator that gives addresses from ranges. Package network puts them on record, by
// which its Node.Pools counts. An Allocator that wraps a HostLocal passes the call on.
type Ranged interface {
	RangeSets() []RangeSet
}

// RangeSetsOf gives the range sets of an Allocator, none if it is not Ranged.
func RangeSetsOf(a Allocator) []RangeSet {
	if ranged, ok := a.(Ranged); ok {
		return ranged.RangeSets()
	}
	return nil
}

// A Pool is how far a range set is used up.
type Pool struct {
	// Name is the subnet if the set is all of one, else its ranges.
	Name string
	IPv6 bool
	// Size is how many addresses the set can give, gateways not among them; the largest number
	// stands for more.
	Size uint64
	// Reserved is how many of them are, by attachments that are there and by what was left of
	// others.
	Reserved uint64
}

// RangeSets gives the range sets that a HostLocal was made with, with their defaults filled in
// and without their names.
func (h *HostLocal) RangeSets() []RangeSet {
	if h == nil {
		return nil
	}
	sets := make([]RangeSet, len(h.pool))
	for i, set := range h.pool {
		sets[i].Ranges = make([]Range, len(set.ranges))
		for k, r := range set.ranges {
			sets[i].Ranges[k] = Range{Subnet: r.subnet, RangeStart: r.start, RangeEnd: r.end, Gateway: r.gateway}
		}
	}
	return sets
}

// Pools counts the reservations of each range set. It takes no lock and changes nothing.
func (h *HostLocal) Pools(ctx context.Context) ([]Pool, error) {
	if err := h.ready(ctx); err != nil {
		return nil, err
	}
	addrs, err := h.store.list()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	pools := make([]Pool, len(h.pool))
	for i, set := range h.pool {
		name := strings.TrimPrefix(strings.TrimPrefix(set.String(), "range set "), "range ")
		pools[i] = Pool{Name: name, IPv6: set.ranges[0].start.Is6(), Size: set.size(h.pool), Reserved: uint64(len(takenOf(addrs, h.pool, set)))}
	}
	return pools, nil
}
