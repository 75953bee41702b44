package cni

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/nft"
)

func TestCodesOfErrors(t *testing.T) {
	t.Parallel()
	own := newError(codeConflict, "an address of %s", "somebody else's")
	for _, tt := range []struct {
		name string
		err  error
		code uint
		msg  string
	}{
		{"one that has a code", own, 112, "an address of somebody else's"},
		{"one that is wrapped", fmt.Errorf("outside: %w", own), 112, "outside: an address of somebody else's"},
		{"one with details", &types.Error{Code: 150, Msg: "busy", Details: "try later"}, 150, "busy; try later"},
		{"the ipam section's", withCode(codePoolFull, errors.New("full")), 100, "full"},
		{"no address left", fmt.Errorf("network: %w", ipam.ErrPoolFull), 100, "network: no free address"},
		{"address is taken", ipam.ErrAddressTaken, 101, "address is taken"},
		{"has one already", ipam.ErrDuplicate, 102, "attachment already has an address"},
		{"not reserved", ipam.ErrNotReserved, 103, "address is not reserved by the attachment"},
		{"reservations locked", ipam.ErrLocked, 11, "reservations are locked by another process"},
		{"reservations locked, by then", errors.Join(ipam.ErrLocked, context.Canceled), 11, "reservations are locked by another process; context canceled"},
		{"what is alive is not known", errors.Join(ipam.ErrLiveUnknown, unix.EBUSY), 11, "cannot tell which addresses are in use; device or resource busy"},
		{"reservations on a full disk", &fs.PathError{Op: "write", Path: "10.1.0.2", Err: unix.ENOSPC}, 5, "write 10.1.0.2: no space left on device"},
		{"the first of several", errors.Join(own, newError(codeIO, "disk")), 112, "an address of somebody else's; disk"},

		{"lock", fmt.Errorf("wait: %w", state.ErrLocked), 11, "wait: locked by another process"},
		{"deadline", context.DeadlineExceeded, 11, "context deadline exceeded"},
		{"cancelled", context.Canceled, 11, "context canceled"},
		{"interface is there", fmt.Errorf("attach: %w", bridge.ErrPeerExists), 111, "attach: the pod has an interface of this name already"},
		{"bridge is full", bridge.ErrBridgeFull, 116, "the bridge holds 1023 ports, the most that Linux allows"},
		{"somebody else's link", bridge.ErrForeign, 112, "the link belongs to another owner"},
		{"address is in use", addr.ErrDuplicate, 112, "another node of the network has the address"},
		{"damaged record", fmt.Errorf("load: %w", state.ErrDamaged), 5, "load: damaged"},
		{"the kernel's", &tombolo.OpError{Op: "add link", Object: "veth0", Err: unix.EBUSY, Message: "made up"}, 110,
			"add link veth0: device or resource busy (kernel: made up)"},
		{"joined ones come on one line", errors.Join(unix.EBUSY, errors.Join(unix.EPERM, unix.EIO)), 110,
			"device or resource busy; operation not permitted; input/output error"},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			expect.NoDiff(t, cmp.Diff(&types.Error{Code: tt.code, Msg: tt.msg}, newCNIError(tt.err)), "error")
		})
	}
	var conflict error = &nft.ConflictError{}
	e := newCNIError(fmt.Errorf("add: %w", conflict))
	expect.That(t, e.Code == 112, "an element of another owner: code %d", e.Code)
}
