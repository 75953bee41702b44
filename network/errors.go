package network

import (
	"errors"
	"fmt"

	"github.com/tombolo-cni/tombolo"
)

// Errors to which a program can react. An error of this package matches them by errors.Is. All other errors come from
// lower packages, mostly from the kernel.
var (
	// ErrInvalid means that an argument or a configuration is invalid.
	ErrInvalid = tombolo.ErrInvalid
	// ErrState means that the state directory, or the directory of leases, cannot be used.
	ErrState = errors.New("state cannot be read or written")
	// ErrTryAgain means that a later call may succeed.
	ErrTryAgain = errors.New("try again later")
	// ErrHostNamespace means that the pod's namespace is the host's own, which contains the bridge. Such an error
	// also matches ErrInvalid.
	ErrHostNamespace = errors.New("the pod's namespace is the host's own")
	// ErrExists means that the attachment exists already.
	ErrExists = errors.New("the attachment exists")
	// ErrNotAttached means that there is no such attachment, or that its Add is not complete.
	ErrNotAttached = errors.New("no such attachment")
	// ErrAttached means that a network or an uplink still has attachments, or that its bridge has ports of other
	// programs.
	ErrAttached = errors.New("there are attachments")
	// ErrConflict means that an address, a subnet, a port or a link belongs to another owner, or that a setting
	// conflicts with another network or with existing pods.
	ErrConflict = errors.New("it belongs to another owner")
	// ErrNoGateway means that one of the pod's addresses has no gateway, although the network has Gateway set.
	ErrNoGateway = errors.New("no gateway")
	// ErrNoLink means that the bridge or the uplink does not exist, or that the bridge cannot be used as it is. For
	// other faults of an uplink, the error matches share.ErrUnfit or ErrConflict.
	ErrNoLink = errors.New("no link to attach to")
	// ErrObstructed means that another firewall would drop the pods' packets, or that a program undoes our rules.
	ErrObstructed = errors.New("another firewall is in the way")
)

// failure is an error with a message for the operator, and a kind that a program can match by errors.Is.
type failure struct{ kind, message error }

func (e *failure) Error() string   { return e.message.Error() }
func (e *failure) Unwrap() []error { return []error{e.kind, e.message} }

// failf returns an error that matches kind, and all errors that the format wraps with %w.
func failf(kind error, format string, args ...any) error {
	return &failure{kind, fmt.Errorf(format, args...)}
}

// stateError makes an error about records match ErrState. It returns nil if err is nil.
func stateError(err error) error {
	if err == nil {
		return nil
	}
	return failf(ErrState, "%w", err)
}
