package cni

import (
	"context"
	"fmt"
	"io/fs"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// Error codes: those of the CNI specification 1.1, and from 100 on our own, which
// docs/operating.md lists.
const (
	codeIncompatibleVersion = types.ErrIncompatibleCNIVersion
	codeUnsupportedField    = types.ErrUnsupportedField
	codeEnvironment         = types.ErrInvalidEnvironmentVariables
	codeIO                  = types.ErrIOFailure
	codeDecoding            = types.ErrDecodingFailure
	codeInvalidConfig       = types.ErrInvalidNetworkConfig
	codeInvalidNetNS        = types.ErrInvalidNetNS
	codeTryAgainLater       = types.ErrTryAgainLater
	codeNotAvailable        = uint(50) // STATUS: ADD cannot succeed

	// 100 to 109 are package ipamconf's.
	codeKernel        = uint(110) // the kernel refused something
	codeExists        = uint(111) // the interface, or the attachment, is there already
	codeConflict      = uint(112) // an address, or a name, belongs to somebody else
	codeDiffers       = uint(113) // CHECK found something that is not as it was made
	codeAttached      = uint(114) // a network that is to be removed still has attachments
	codeNoGateway     = uint(115) // a gateway is needed and the IPAM named none
	codeNotAttachable = uint(116) // the bridge is full, or is not a bridge
	codeObstructed    = uint(117) // another firewall would drop what pods send
	codeUplink        = uint(118) // the NIC cannot become a port of the bridge as it is
)

// newError makes an error with a code.
func newError(code uint, format string, args ...any) *types.Error {
	return &types.Error{Code: code, Msg: fmt.Sprintf(format, args...)}
}

// coded gives an error the code that a runtime branches on: that of the first in its chain or tree that has one.
// Details of one that came with a code are in the message.
func coded(err error) *types.Error {
	code, ok := firstCode(err)
	if !ok {
		code = codeKernel
	}
	return &types.Error{Code: code, Msg: oneLine(err)}
}

func firstCode(err error) (code uint, ok bool) {
	for _, of := range codes() {
		if err == of.err {
			return of.code, true
		}
	}
	switch e := err.(type) {
	case *types.Error:
		return e.Code, true
	case *nft.ConflictError:
		return codeConflict, true
	case *state.RecordError, *fs.PathError:
		return codeIO, true
	case interface{ Unwrap() error }:
		return firstCode(e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, one := range e.Unwrap() {
			if code, ok := firstCode(one); ok {
				return code, true
			}
		}
	}
	return 0, false
}

// oneLine writes joined errors, which come a line each, on one, and nothing of what
// they quote that a terminal would obey.
func oneLine(err error) string { return printable.Line(err.Error()) }

// A sentinel has a code.
type sentinel struct {
	err  error
	code uint
}

// codes are those of the errors of package network and of the packages below.
func codes() []sentinel {
	return []sentinel{
		{network.ErrState, codeIO}, {network.ErrTryAgain, codeTryAgainLater}, {network.ErrHostNamespace, codeInvalidNetNS},
		{network.ErrExists, codeExists}, {network.ErrNotAttached, codeDiffers}, {network.ErrAttached, codeAttached},
		{network.ErrConflict, codeConflict}, {network.ErrNoGateway, codeNoGateway}, {network.ErrNoLink, codeNotAttachable},
		{network.ErrObstructed, codeObstructed}, {network.ErrInvalid, codeInvalidConfig},
		{ipam.ErrPoolFull, ipamconf.CodePoolFull}, {ipam.ErrAddressTaken, ipamconf.CodeAddressTaken},
		{ipam.ErrDuplicate, ipamconf.CodeDuplicate}, {ipam.ErrNotReserved, ipamconf.CodeCheckFailed},
		{state.ErrLocked, codeTryAgainLater}, {ipam.ErrLocked, codeTryAgainLater}, {ipam.ErrLiveUnknown, codeTryAgainLater},
		{context.DeadlineExceeded, codeTryAgainLater}, {context.Canceled, codeTryAgainLater},
		{bridge.ErrPeerExists, codeExists}, {bridge.ErrBridgeFull, codeNotAttachable}, {bridge.ErrNotBridge, codeNotAttachable},
		{bridge.ErrForeign, codeConflict}, {addr.ErrDuplicate, codeConflict},
		{nft.ErrInvalid, codeInvalidConfig}, {bridge.ErrInvalid, codeInvalidConfig},
		{uplink.ErrUnreachable, codeTryAgainLater}, {uplink.ErrRefused, codeUplink}, {state.ErrDamaged, codeIO},
	}
}

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
