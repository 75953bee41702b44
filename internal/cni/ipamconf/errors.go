package ipamconf

import (
	"errors"
	"fmt"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/internal/strict"
)

// Codes of the CNI error object that are an IPAM's own. The specification
// leaves 100 and above to plugins.
const (
	CodePoolFull      uint = 100 // a range set has no free address
	CodeAddressTaken  uint = 101 // a requested address belongs to another attachment
	CodeDuplicate     uint = 102 // the attachment already has an address in the range set
	CodeCheckFailed   uint = 103 // CHECK: an address is not, or no longer, this attachment's
	CodePluginMissing uint = 104 // a delegated plugin is not in CNI_PATH
	CodePluginFailed  uint = 105 // a delegated plugin ended without an error object
)

// The specification's own codes, of which the library has no name for the
// first.
const (
	codeNotAvailable     uint = 50 // STATUS: ADD cannot succeed
	codeUnsupportedField      = types.ErrUnsupportedField
	codeInvalidEnv            = types.ErrInvalidEnvironmentVariables
	codeIO                    = types.ErrIOFailure
	codeDecode                = types.ErrDecodingFailure
	codeInvalidConfig         = types.ErrInvalidNetworkConfig
	codeTryAgain              = types.ErrTryAgainLater
)

// ErrNoPlugin is matched by CodePluginMissing.
var ErrNoPlugin = delegate.ErrNotFound

// An Error is an error with its CNI error object. It matches both: errors.As
// finds the *[types.Error] in it, and errors.Is the sentinel or the system's
// error that caused it.
type Error struct {
	CNI   *types.Error
	cause error
}

// Error is the message and the details of the error object.
func (e *Error) Error() string { return e.CNI.Error() }

// Unwrap returns the error object and the cause.
func (e *Error) Unwrap() []error {
	if e.cause == nil {
		return []error{e.CNI}
	}
	return []error{e.CNI, e.cause}
}

// newError builds an error. The message must say all; cause is only for
// errors.Is.
func newError(code uint, cause error, format string, args ...any) error {
	return &Error{CNI: types.NewError(code, fmt.Sprintf(format, args...), ""), cause: cause}
}

// ConfigError gives an error of package strict its code: 2 for a field that is
// unknown, 6 for what is not JSON, 7 for all else that can be wrong with a
// config. Other errors get 7 too; nil stays nil.
func ConfigError(err error) error {
	if err == nil {
		return nil
	}
	var unknown *strict.UnknownFieldError
	var syntax *strict.SyntaxError
	switch {
	case errors.As(err, &unknown):
		return newError(codeUnsupportedField, err, "%s", err)
	case errors.As(err, &syntax):
		return newError(codeDecode, err, "%s", err)
	default:
		return newError(codeInvalidConfig, err, "%s", err)
	}
}

// unavailable gives err the code by which STATUS says that ADD cannot succeed.
// The message and the sentinels stay.
func unavailable(err error) error {
	if err == nil {
		return nil
	}
	return newError(codeNotAvailable, err, "%s", err)
}
