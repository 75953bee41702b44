package tombolo_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"syscall"
	"testing"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/netns"
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
		got := tt.err.Error()
		expect.That(t, got == tt.want, "got  %s\nwant %s", got, tt.want)
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
				got, want := errors.Is(err, s), s == tt.sentinel
				expect.That(t, got == want, "%v: matches %v: %t, want %t", err, s, got, want)
			}
			expect.That(t, tt.cause == nil || errors.Is(err, tt.cause), "%v does not match its cause", err)
			var opErr *tombolo.OpError
			expect.That(t, errors.As(err, &opErr) && opErr.Op == "do", "%v is not an OpError", err)
		}
	}
}

// A kernel is asked over one socket. Errors are branched on by what has happened, and tell the rest.
func Example() {
	if err := run(context.Background()); err != nil {
		fmt.Println(err)
	}
	// Output:
	// true false
	// true true ensure bridge lo: the link is not a bridge: it is a physical or a loopback interface; choose another name for the bridge, or delete the link
}

func run(ctx context.Context) error {
	ns, err := netns.New() // or nil, the calling thread's
	if err != nil {
		return err
	}
	defer ns.Close()
	links, err := bridge.Dial(ns)
	if err != nil {
		return err
	}
	defer links.Close()
	changed, err := links.Ensure(ctx, bridge.Bridge{Name: "pods0", Alias: "mycni"})
	if err != nil {
		return err
	}
	again, err := links.Ensure(ctx, bridge.Bridge{Name: "pods0", Alias: "mycni"}) // false: nothing to change
	if err != nil {
		return err
	}
	fmt.Println(changed, again)
	var op *tombolo.OpError
	_, err = links.Ensure(ctx, bridge.Bridge{Name: "lo"})
	fmt.Println(errors.As(err, &op), errors.Is(err, bridge.ErrNotBridge), err)
	return nil
}
