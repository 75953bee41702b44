// Package fail has the errors that package network makes itself, of which each is of a
// kind that programs branch by.
package fail

import (
	"errors"
	"fmt"
)

// The kinds; package network says what each means.
var (
	ErrState         = errors.New("state cannot be read or written")
	ErrTryAgain      = errors.New("try again later")
	ErrHostNamespace = errors.New("the pod's namespace is the host's own")
	ErrExists        = errors.New("the attachment exists")
	ErrNotAttached   = errors.New("no such attachment")
	ErrAttached      = errors.New("there are attachments")
	ErrConflict      = errors.New("it belongs to another owner")
	ErrNoGateway     = errors.New("no gateway")
	ErrNoLink        = errors.New("no link to attach to")
	ErrObstructed    = errors.New("another firewall is in the way")
)

// failure is a message for the operator, and a kind for the program.
type failure struct{ kind, said error }

func (e *failure) Error() string   { return e.said.Error() }
func (e *failure) Unwrap() []error { return []error{e.kind, e.said} }

// Errorf makes an error of a kind, whose message says all. It matches its causes too, as
// fmt.Errorf takes them.
func Errorf(kind error, format string, args ...any) error {
	return &failure{kind, fmt.Errorf(format, args...)}
}

// State is for what goes wrong with records; nil stays nil.
func State(err error) error {
	if err == nil {
		return nil
	}
	return Errorf(ErrState, "%w", err)
}

// Join runs each step, also after one that failed, and joins their errors.
func Join(steps ...func() error) error {
	var errs []error
	for _, step := range steps {
		errs = append(errs, step())
	}
	return errors.Join(errs...)
}
