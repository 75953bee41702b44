package bridge

import (
	"context"
	"errors"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/route"
)

// DefaultMTU is that of the link of the default route, in bytes, the smaller over both
// families; 1500 if there is none, or it is the link that is excepted by its name.
func (c *Conn) DefaultMTU(ctx context.Context, except string) (int, error) {
	const ethernet = 1500
	mtu := 0
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		list, err := c.Routes().List(route.Filter{Family: family, Table: route.TableMain})
		if err != nil {
			return 0, err
		}
		var best *route.Route
		for i, r := range list {
			if r.Dst.Bits() <= 0 && r.Type == route.Unicast && (best == nil || r.Priority < best.Priority) {
				best = &list[i]
			}
		}
		if best == nil {
			continue
		}
		index := best.Link
		if len(best.Nexthops) > 0 {
			index = best.Nexthops[0].Link
		}
		l, err := c.LinkByIndex(ctx, index)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return 0, err
		}
		if err == nil && l.Name != except && (mtu == 0 || l.MTU < mtu) {
			mtu = l.MTU
		}
	}
	if mtu == 0 {
		mtu = ethernet
	}
	return mtu, nil
}
