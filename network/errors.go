package network

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tombolo-cni/tombolo"
)

// Errors of this package match these with errors.Is if a program can react to them. Other errors come from the
// packages below, usually from the kernel.
var (
	// ErrInvalid means that an argument or a configuration is invalid.
	ErrInvalid = tombolo.ErrInvalid
	// ErrState means that the state directory, or the directory of leases, cannot be used.
	ErrState = errors.New("state cannot be read or written")
	// ErrTryAgain means that a later call may succeed.
	ErrTryAgain = errors.New("try again later")
	// ErrHostNamespace means that a pod's namespace contains the bridge. Such an error also matches
	// ErrInvalid.
	ErrHostNamespace = errors.New("the pod's namespace is the host's own")
	// ErrExists means that the attachment exists already.
	ErrExists = errors.New("the attachment exists")
	// ErrNotAttached means that there is no such attachment, or that its Add is not complete.
	ErrNotAttached = errors.New("no such attachment")
	// ErrAttached means that a network, or an uplink, is in use by attachments.
	ErrAttached = errors.New("there are attachments")
	// ErrConflict means that an address, a port or a link belongs to another owner.
	ErrConflict = errors.New("it belongs to another owner")
	// ErrNoGateway means that there is no address for pods to send to.
	ErrNoGateway = errors.New("no gateway")
	// ErrNoLink means that a link does not exist, or is of a kind that nothing can be attached to.
	ErrNoLink = errors.New("no link to attach to")
	// ErrObstructed means that another firewall would drop the pods' packets.
	ErrObstructed = errors.New("another firewall is in the way")
)

// failure is an error with a message for the operator and a kind for the program.
type failure struct{ kind, message error }

func (e *failure) Error() string   { return e.message.Error() }
func (e *failure) Unwrap() []error { return []error{e.kind, e.message} }

// failf returns an error of a kind. It also matches the errors that the format wraps.
func failf(kind error, format string, args ...any) error {
	return &failure{kind, fmt.Errorf(format, args...)}
}

// stateError returns an ErrState for an error about records, and nil for nil.
func stateError(err error) error {
	if err == nil {
		return nil
	}
	return failf(ErrState, "%w", err)
}

// joinSteps runs all steps, even after a failed one, and joins their errors.
func joinSteps(steps ...func() error) error {
	var errs []error
	for _, step := range steps {
		errs = append(errs, step())
	}
	return errors.Join(errs...)
}

// poll calls done until it reports true or returns an error, with pauses, and for at most limit.
func poll(ctx context.Context, pause, limit time.Duration, done func() (bool, error)) error {
	for end := time.Now().Add(limit); ; {
		if is, err := done(); is || err != nil || !time.Now().Before(end) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}

// undo contains the functions that undo the steps so far.
type undo []func(context.Context) error

func (u *undo) push(step func(context.Context) error) { *u = append(*u, step) }

// run undoes all steps in reverse order, and joins the errors to the cause.
func (u undo) run(cause error) error {
	ctx, cancel := context.WithTimeout(context.Background(), UndoTimeout)
	defer cancel()
	errs := []error{cause}
	for i := len(u) - 1; i >= 0; i-- {
		errs = append(errs, u[i](ctx))
	}
	return errors.Join(errs...)
}
