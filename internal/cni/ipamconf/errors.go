package ipamconf

import (
	"errors"
	"fmt"

	"github.com/containernetworking/cni/pkg/types"

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
	codeNotAvailable  uint = 50 // STATUS: ADD cannot succeed
	codeInvalidEnv         = types.ErrInvalidEnvironmentVariables
	codeInvalidConfig      = types.ErrInvalidNetworkConfig
)

// An Error is an error with its CNI error object. It matches both: errors.As
// finds the *[types.Error] in it, and errors.Is what caused it.
type Error struct {
	CNI   *types.Error
	cause error
}

// Error is the message of the error object.
func (e *Error) Error() string { return e.CNI.Error() }

// Unwrap returns the error object and the cause.
func (e *Error) Unwrap() []error { return []error{e.CNI, e.cause} }

func newError(code uint, format string, args ...any) error {
	return &types.Error{Code: code, Msg: fmt.Sprintf(format, args...)}
}

// withCode gives an error a code; nil stays nil.
func withCode(code uint, err error) error {
	if err == nil {
		return nil
	}
	return &Error{&types.Error{Code: code, Msg: err.Error()}, err}
}

// ConfigError gives an error of package strict its code: 2 for a field that is
// unknown, 6 for what is not JSON, 7 for all else that can be wrong with a
// config; nil stays nil.
func ConfigError(err error) error {
	switch {
	case errors.As(err, new(*strict.UnknownFieldError)):
		return withCode(types.ErrUnsupportedField, err)
	case errors.As(err, new(*strict.SyntaxError)):
		return withCode(types.ErrDecodingFailure, err)
	}
	return withCode(codeInvalidConfig, err)
}
