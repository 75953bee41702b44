package recorded

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
)

// The range sets of a network are on record as one string, since an ADD only compares it: sets
// end in a semicolon, and each range is its subnet, first and last address and gateway, with a
// space before each but the subnet and a comma after it: "10.1.0.0/24 10.1.0.1 10.1.0.254 10.1.0.1,;".

// PoolsText is what is on record of range sets. It is empty for none.
func PoolsText(sets []ipam.RangeSet) string {
	const usual = 160 // bytes of two sets of one range each
	b := make([]byte, 0, usual)
	for _, set := range sets {
		for _, r := range set.Ranges {
			b = r.Subnet.AppendTo(b)
			for _, a := range [...]netip.Addr{r.RangeStart, r.RangeEnd, r.Gateway} {
				b = a.AppendTo(append(b, ' '))
			}
			b = append(b, ',')
		}
		b = append(b, ';')
	}
	return string(b)
}

// ParsePools reads what PoolsText wrote.
func ParsePools(text string) ([]ipam.RangeSet, error) {
	var sets []ipam.RangeSet
	for s := range strings.SplitSeq(strings.TrimSuffix(text, ";"), ";") {
		var set ipam.RangeSet
		for one := range strings.SplitSeq(strings.TrimSuffix(s, ","), ",") {
			r, err := parseRange(one)
			if err != nil {
				return nil, fmt.Errorf("range %q: %w", one, err)
			}
			set.Ranges = append(set.Ranges, r)
		}
		sets = append(sets, set)
	}
	return sets, nil
}

func parseRange(text string) (r ipam.Range, err error) {
	f := strings.Split(text, " ")
	if len(f) != 4 {
		return r, fmt.Errorf("%w: it has %d parts, where four are due", state.ErrDamaged, len(f))
	}
	if r.Subnet, err = netip.ParsePrefix(f[0]); err != nil {
		return r, fmt.Errorf("%w: %w", state.ErrDamaged, err)
	}
	for i, a := range [...]*netip.Addr{&r.RangeStart, &r.RangeEnd, &r.Gateway} {
		if *a, err = netip.ParseAddr(f[i+1]); err != nil {
			return r, fmt.Errorf("%w: %w", state.ErrDamaged, err)
		}
	}
	return r, nil
}

// Pools says how far the pools of a network are used up whose state is kept in dir.
func Pools(ctx context.Context, dir string, rec *state.Network) ([]ipam.Pool, error) {
	if rec.Pools == "" {
		return nil, nil
	}
	sets, err := ParsePools(rec.Pools)
	if err != nil {
		return nil, fmt.Errorf("network %q: %w", rec.Name, err)
	}
	h, err := ipam.NewHostLocal(&ipam.Config{Network: rec.Name, Dir: cmp.Or(rec.PoolDir, dir+"/ipam"), Ranges: sets})
	if err != nil {
		return nil, err
	}
	return h.Pools(ctx)
}
