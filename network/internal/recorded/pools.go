package recorded

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
)

// PoolsText is what is on record of a network's range sets: JSON in a string, since an Add only compares it. It is
// empty for none.
func PoolsText(sets []ipam.RangeSet) string {
	if len(sets) == 0 {
		return ""
	}
	data, _ := json.Marshal(sets) // addresses and names can all be written
	return string(data)
}

// Pools says how far the pools of a network are used up whose state is kept in dir.
func Pools(ctx context.Context, dir string, rec *state.Network) ([]ipam.Pool, error) {
	if rec.Pools == "" {
		return nil, nil
	}
	var sets []ipam.RangeSet
	if err := json.Unmarshal([]byte(rec.Pools), &sets); err != nil {
		return nil, fmt.Errorf("network %q: %w: pools: %w", rec.Name, state.ErrDamaged, err)
	}
	h, err := ipam.NewHostLocal(&ipam.Config{Network: rec.Name, Dir: cmp.Or(rec.PoolDir, dir+"/ipam"), Ranges: sets})
	if err != nil {
		return nil, err
	}
	return h.Pools(ctx)
}
