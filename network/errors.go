package network

import (
	"context"
	"errors"
	"fmt"

	"github.com/tombolo-cni/tombolo"
)

// Errors of this package match these with errors.Is, where a program can do something about it. Other errors are
// those of the packages that this one composes: of the kernel, as a rule.
var (
	// ErrInvalid says that an argument or a configuration is not valid.
	ErrInvalid = tombolo.ErrInvalid
	// ErrState says that the state directory, or the directory of leases, cannot be used.
	ErrState = errors.New("state cannot be read or written")
	// ErrTryAgain says that a later call may succeed.
	ErrTryAgain = errors.New("try again later")
	// ErrHostNamespace says that a pod's namespace is the one that the bridge is in. It
	// comes with ErrInvalid.
	ErrHostNamespace = errors.New("the pod's namespace is the host's own")
	// ErrExists says that there is such an attachment already.
	ErrExists = errors.New("the attachment exists")
	// ErrNotAttached says that there is no such attachment, or that its Add has not come to
	// its end.
	ErrNotAttached = errors.New("no such attachment")
	// ErrAttached says that a network, or an uplink, is in use by attachments.
	ErrAttached = errors.New("there are attachments")
	// ErrConflict says that an address, a port or a link belongs to another owner.
	ErrConflict = errors.New("it belongs to another owner")
	// ErrNoGateway says that there is no address for pods to send to.
	ErrNoGateway = errors.New("no gateway")
	// ErrNoLink says that a link is not there, or of a kind that nothing can be attached to.
	ErrNoLink = errors.New("no link to attach to")
	// ErrObstructed says that another firewall would drop what pods send.
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

// joinSteps runs all steps, also after one that failed, and joins their errors.
func joinSteps(steps ...func() error) error {
	var errs []error
	for _, step := range steps {
		errs = append(errs, step())
	}
	return errors.Join(errs...)
}

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
