package dhcpc

import (
	"context"
	"fmt"
	"slices"
)

// argument is the error about an argument that cannot be meant: it matches ErrInvalid.
func argument(what string) error { return fmt.Errorf("%w: %s", ErrInvalid, what) }

// usable refuses a Client that New did not make, a context that is nil, and leases that
// are.
func (c *Client) usable(ctx context.Context, leases ...*Lease) error {
	switch {
	case c == nil || c.machine == nil:
		return argument("New made no such client")
	case ctx == nil:
		return argument("no context")
	case slices.Contains(leases, nil):
		return argument("no lease")
	}
	return nil
}
