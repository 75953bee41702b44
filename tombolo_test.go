package tombolo_test

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"
	"testing"

	"github.com/tombolo-cni/tombolo"
)

func TestOpErrorSaysAllThatIsKnown(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		err  tombolo.OpError
		want string
	}{
		{tombolo.OpError{Op: "add link", Object: "vethab", Err: syscall.EEXIST, Message: "in the way"},
			"add link vethab: file exists (kernel: in the way)"},
		{tombolo.OpError{Op: "add link", Object: "vethab", Err: syscall.EEXIST}, "add link vethab: file exists"},
		{tombolo.OpError{Op: "list links", Err: tombolo.ErrInterrupted},
			"list links: listing was interrupted by changes each time it was tried"},
		{tombolo.OpError{Op: "list links"}, "list links: failed"},
	} {
		if got := tt.err.Error(); got != tt.want {
			t.Errorf("got  %s\nwant %s", got, tt.want)
		}
	}
}

func TestOpErrorMatchesErrnoAndSentinel(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		cause    error
		sentinel error // nil: none of the three
	}{
		{syscall.EEXIST, fs.ErrExist},
		{syscall.ENOENT, fs.ErrNotExist},
		{syscall.ENODEV, fs.ErrNotExist},
		{syscall.ESRCH, fs.ErrNotExist},
		{syscall.EADDRNOTAVAIL, fs.ErrNotExist},
		{syscall.EPERM, fs.ErrPermission},
		{syscall.EACCES, fs.ErrPermission},
		{syscall.EBUSY, nil},
		{fmt.Errorf("wrapped: %w", syscall.ENODEV), fs.ErrNotExist},
		{tombolo.ErrInterrupted, nil},
		{nil, nil},
	} {
		// However deep it is, and beside whatever else.
		for _, err := range []error{
			&tombolo.OpError{Op: "do", Err: tt.cause},
			fmt.Errorf("more: %w", &tombolo.OpError{Op: "do", Err: tt.cause}),
			errors.Join(errors.New("other"), &tombolo.OpError{Op: "do", Err: tt.cause}),
		} {
			for _, s := range []error{fs.ErrExist, fs.ErrNotExist, fs.ErrPermission} {
				if got, want := errors.Is(err, s), s == tt.sentinel; got != want {
					t.Errorf("%v: matches %v: %t, want %t", err, s, got, want)
				}
			}
			if tt.cause != nil && !errors.Is(err, tt.cause) {
				t.Errorf("%v does not match its cause", err)
			}
			var opErr *tombolo.OpError
			if !errors.As(err, &opErr) || opErr.Op != "do" {
				t.Errorf("%v is not an OpError", err)
			}
		}
	}
}

// Errors are branched on by what has happened, and tell the operator the rest.
func ExampleOpError() {
	var err error = &tombolo.OpError{Op: "add link", Object: "veth0123", Err: syscall.EEXIST, Message: "Device already exists"}
	if errors.Is(err, fs.ErrExist) {
		fmt.Println("there already:", err)
	}
	// Output: there already: add link veth0123: file exists (kernel: Device already exists)
}
