package ipam

import (
	"errors"
	"fmt"
)

// Sentinels that errors of this package match with errors.Is. An error of the system's matches its errno too, and
// holds an [*fs.PathError].
var (
	ErrPoolFull     = errors.New("no free address")
	ErrAddressTaken = errors.New("address is taken")
	ErrDuplicate    = errors.New("attachment already has an address")
	ErrNotReserved  = errors.New("address is not reserved by the attachment")
	// ErrLocked and ErrLiveUnknown pass with time: try again.
	ErrLocked      = errors.New("reservations are locked by another process")
	ErrLiveUnknown = errors.New("cannot tell which addresses are in use")
)

// failure is an error whose message says all; cause is for errors.Is.
type failure struct {
	message string
	cause   error
}

func (e *failure) Error() string { return e.message }
func (e *failure) Unwrap() error { return e.cause }

// newError makes an error whose message says all, and that matches its cause.
func newError(cause error, format string, args ...any) error {
	return &failure{fmt.Sprintf(format, args...), cause}
}
