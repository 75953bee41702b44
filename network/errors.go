package network

import (
	"context"
	"errors"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
)

// Errors of this package match these with errors.Is, where a program can do something about it. Other errors are
// those of the packages that this one composes: of the kernel, as a rule.
var (
	// ErrInvalid says that an argument or a configuration is not valid.
	ErrInvalid = tombolo.ErrInvalid
	// ErrState says that the state directory, or the directory of leases, cannot be used.
	ErrState = fail.ErrState
	// ErrTryAgain says that a later call may succeed.
	ErrTryAgain = fail.ErrTryAgain
	// ErrHostNamespace says that a pod's namespace is the one that the bridge is in. It
	// comes with ErrInvalid.
	ErrHostNamespace = fail.ErrHostNamespace
	// ErrExists says that there is such an attachment already.
	ErrExists = fail.ErrExists
	// ErrNotAttached says that there is no such attachment, or that its Add has not come to
	// its end.
	ErrNotAttached = fail.ErrNotAttached
	// ErrAttached says that a network, or an uplink, is in use by attachments.
	ErrAttached = fail.ErrAttached
	// ErrConflict says that an address, a port or a link belongs to another owner.
	ErrConflict = fail.ErrConflict
	// ErrNoGateway says that there is no address for pods to send to.
	ErrNoGateway = fail.ErrNoGateway
	// ErrNoLink says that a link is not there, or of a kind that nothing can be attached to.
	ErrNoLink = fail.ErrNoLink
	// ErrObstructed says that another firewall would drop what pods send.
	ErrObstructed = fail.ErrObstructed
)

// undo keeps the way back from each step that was taken.
type undo []func(context.Context) error

func (u *undo) push(step func(context.Context) error) { *u = append(*u, step) }

// run takes the steps back in reverse, all of them, and joins what goes wrong to
// the cause.
func (u undo) run(cause error) error {
	ctx, cancel := context.WithTimeout(context.Background(), UndoTimeout)
	defer cancel()
	errs := []error{cause}
	for i := len(u) - 1; i >= 0; i-- {
		errs = append(errs, u[i](ctx))
	}
	return errors.Join(errs...)
}
