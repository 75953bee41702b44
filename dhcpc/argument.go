package dhcpc

import (
	"context"
	"slices"

	"github.com/tombolo-cni/tombolo/dhcpc/internal/trace"
)

// usable refuses a Client that New did not make, a context that is nil, and leases that
// are.
func (c *Client) usable(ctx context.Context, leases ...*Lease) error {
	switch {
	case c == nil || c.machine == nil:
		return trace.Argument("the client was not made by New")
	case ctx == nil:
		return trace.Argument("no context")
	case slices.Contains(leases, nil):
		return trace.Argument("no lease")
	}
	return nil
}
