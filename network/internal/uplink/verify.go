package uplink

import (
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/route"
)

// poll is the interval between two looks at a change that the kernel makes by itself.
const poll = 5 * time.Millisecond

// localWithin limits the wait until the kernel receives packets to new IPv6 addresses.
const localWithin = 5 * time.Second

// pause waits for poll, and returns false if ctx is done.
func pause(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(poll):
		return true
	}
}

// waitUntilLocal waits until a link receives packets to its new IPv6 addresses. After the answer to the request, a
// worker of the kernel joins the groups for their neighbour discovery and adds their local routes. Until then packets
// would be lost once the other link no longer has the addresses.
func (c *Conn) waitUntilLocal(ctx context.Context, m *move) error {
	ctx, cancel := context.WithTimeout(ctx, localWithin)
	defer cancel()
	for {
		have, err := c.routes.List(ctx, route.Filter{Family: unix.AF_INET6, Table: unix.RT_TABLE_LOCAL,
			Link: m.to.Index, Type: unix.RTN_LOCAL})
		if err != nil {
			return err
		}

		missing := slices.DeleteFunc(m.addresses(), func(a addr.Address) bool {
			return a.Prefix.Addr().Is4() ||
				slices.ContainsFunc(have, func(r route.Route) bool { return r.Dst.Addr() == a.Prefix.Addr() })
		})
		if len(missing) == 0 {
			return nil
		}

		if !pause(ctx) {
			return fmt.Errorf("wait until the kernel receives what is sent to %s: %w", missing[0].Prefix.Addr(),
				ctx.Err())
		}
	}
}
