package dhcpc

import (
	"context"
	"fmt"
	"slices"

	"github.com/tombolo-cni/tombolo"
)

// argument is the error about an argument that cannot be meant: it matches ErrInvalid.
func argument(what string) error { return invalid(tombolo.ErrInvalid.Error() + ": " + what) }

// invalid is an error that matches ErrInvalid and tombolo.ErrInvalid.
type invalid string

func (e invalid) Error() string { return string(e) }

func (e invalid) Is(target error) bool { return target == ErrInvalid || target == tombolo.ErrInvalid }

// invalidf is fmt.Errorf for such errors.
func invalidf(format string, args ...any) error { return invalid(fmt.Sprintf(format, args...)) }

// usable refuses a Client that New did not make, a context that is nil, and leases that
// are.
func (c *Client) usable(ctx context.Context, leases ...*Lease) error {
	switch {
	case c == nil || c.machine == nil:
		return argument("the client was not made by New")
	case ctx == nil:
		return argument("no context")
	case slices.Contains(leases, nil):
		return argument("no lease")
	}
	return nil
}
