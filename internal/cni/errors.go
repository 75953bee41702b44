package cni

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/share"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// These are the codes of CNI errors. The CNI specification 1.1 defines the codes below 100. Codes from 100 on are our
// own; docs/operating.md lists them.
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

	codePoolFull      = uint(100) // a range set has no free address
	codeAddressTaken  = uint(101) // a requested address belongs to another attachment
	codeDuplicate     = uint(102) // the attachment already has an address in the range set
	codeCheckFailed   = uint(103) // CHECK: an address is not reserved for the attachment
	codePluginMissing = uint(104) // a delegated plugin is not in CNI_PATH, or there is no kept program
	codePluginFailed  = uint(105) // a delegated plugin or the kept program ended without an error object

	codeKernel        = uint(110) // the kernel refused a request, or no other code fits
	codeExists        = uint(111) // the interface or the attachment exists already
	codeConflict      = uint(112) // an address or a name belongs to another owner
	codeDiffers       = uint(113) // CHECK found a difference
	codeAttached      = uint(114) // the network to be removed still has attachments
	codeNoGateway     = uint(115) // a gateway is needed and the IPAM named none
	codeNotAttachable = uint(116) // the bridge or uplink is missing or unusable, or the bridge is full
	codeObstructed    = uint(117) // another firewall would drop packets of pods
	codeUplink        = uint(118) // the NIC cannot be shared as it is
)

// newError returns a CNI error with the given code.
func newError(code uint, format string, args ...any) *types.Error {
	return &types.Error{Code: code, Msg: fmt.Sprintf(format, args...)}
}

// A codedError is an error with a code. errors.As finds a *[types.Error] with this code in it.
type codedError struct {
	error
	code uint
}

func (e *codedError) Unwrap() []error { return []error{newError(e.code, "%v", e.error), e.error} }

// withCode adds a code to an error. It returns nil if err is nil.
func withCode(code uint, err error) error {
	if err == nil {
		return nil
	}
	return &codedError{err, code}
}

// configError adds a code to an error of package strict: codeUnsupportedField for an unknown field, and
// codeInvalidConfig for other errors. To some unknown fields it adds advice (see substitutes). It returns nil if err is
// nil.
func configError(err error) error {
	var found *strict.Error
	code := codeInvalidConfig
	if errors.As(err, &found) && found.Kind == strict.Unknown {
		code = codeUnsupportedField
		if instead := substitutes()[found.Path]; instead != "" {
			err = fmt.Errorf("%w: %s", err, instead)
		}
	}
	return withCode(code, err)
}

// substitutes returns advice for unknown fields, by field. These fields occur in configuration lists for kubenet: they
// are kubenet's own fields, kubelet's flags for kubenet, and fields of the plugin portmap.
func substitutes() map[string]string {
	const portmap = `leave it and the plugin portmap out, and write "capabilities": {"portMappings": true}`
	return map[string]string{
		"addIf":   "no plugin reads it, since the runtime names the pod's interface: leave it out",
		"podCIDR": `write "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.77.0.0/24"}]]}`,

		"hairpin-mode":        `write "hairpinMode": true for hairpin-veth, "promiscMode": true for promiscuous-bridge`,
		"network-plugin-mtu":  `write "mtu"`,
		"non-masquerade-cidr": `write "nonMasqueradeCIDRs": ["10.0.0.0/8"]`,

		"snat": portmap, "externalSetMarkChain": portmap, "markMasqBit": portmap, "masqAll": portmap,
	}
}

// newCNIError returns the error that a runtime gets, with the first code in the chain or tree of err, or codeKernel if
// there is none. The message contains the texts of all errors.
func newCNIError(err error) *types.Error {
	code, ok := firstCode(err)
	if !ok {
		code = codeKernel
	}
	return &types.Error{Code: code, Msg: printable.Line(err.Error())}
}

// firstCode returns the first code in err and the errors that it wraps. ok is false if none has a code.
func firstCode(err error) (code uint, ok bool) {
	for _, known := range codes() {
		if err == known.err {
			return known.code, true
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

// A sentinel is an error value, such as network.ErrExists, with the code that a CNI error gets for it.
type sentinel struct {
	err  error
	code uint
}

// codes returns the error values that have a code. Most of them come from package network and the packages that it
// uses.
func codes() []sentinel {
	return []sentinel{
		{network.ErrState, codeIO}, {network.ErrTryAgain, codeTryAgainLater}, {network.ErrHostNamespace,
			codeInvalidNetNS},
		{network.ErrExists, codeExists}, {network.ErrNotAttached, codeDiffers}, {network.ErrAttached, codeAttached},
		{network.ErrConflict, codeConflict}, {network.ErrNoGateway, codeNoGateway}, {network.ErrNoLink,
			codeNotAttachable},
		{network.ErrObstructed, codeObstructed}, {network.ErrInvalid, codeInvalidConfig},
		{ipam.ErrPoolFull, codePoolFull}, {ipam.ErrAddressTaken, codeAddressTaken},
		{ipam.ErrDuplicate, codeDuplicate}, {ipam.ErrNotReserved, codeCheckFailed},
		{state.ErrLocked, codeTryAgainLater}, {ipam.ErrLocked, codeTryAgainLater}, {ipam.ErrLiveUnknown,
			codeTryAgainLater},
		{context.DeadlineExceeded, codeTryAgainLater}, {context.Canceled, codeTryAgainLater},
		{bridge.ErrPeerExists, codeExists}, {bridge.ErrBridgeFull, codeNotAttachable}, {bridge.ErrNotBridge,
			codeNotAttachable},
		{bridge.ErrForeign, codeConflict}, {addr.ErrDuplicate, codeConflict},
		{share.ErrUnfit, codeUplink}, {state.ErrDamaged, codeIO},
	}
}
