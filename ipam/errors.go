package ipam

import (
	"errors"
	"fmt"
)

// Use errors.Is to match an error of this package with these variables. An error of the operating system matches its
// errno, and contains an [*fs.PathError].
var (
	ErrPoolFull     = errors.New("no free address")
	ErrAddressTaken = errors.New("address is taken")
	ErrDuplicate    = errors.New("attachment already has an address")
	ErrNotReserved  = errors.New("address is not reserved by the attachment")
	// ErrLocked and ErrLiveUnknown are temporary: try again.
	ErrLocked      = errors.New("reservations are locked by another process")
	ErrLiveUnknown = errors.New("cannot tell which addresses are in use")
)

// failure is an error with a complete message. errors.Is matches it with cause.
type failure struct {
	message string
	cause   error
}

func (e *failure) Error() string { return e.message }
func (e *failure) Unwrap() error { return e.cause }

// newError returns an error that matches cause, and whose message comes from the format alone.
func newError(cause error, format string, args ...any) error {
	return &failure{fmt.Sprintf(format, args...), cause}
}
