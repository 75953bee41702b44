// Package reference has what the plugins below it have in common: each carries out the verbs of
// the reference plugin whose name it has, where Tombolo is called by that name. Version 1.9.1 of
// github.com/containernetworking/plugins is the one meant.
package reference

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/network"
)

// Plugin carries out one verb: ADD, DEL, CHECK, GC or STATUS. Plugins that work on interfaces of others get
// those alone that are about an attachment of ours: ADD, DEL and CHECK. The result is printed in the
// configuration's version; nil prints nothing. A result that this version cannot say has the
// Plugin called once more, with DEL. An error without a code of its own gets one by its kind.
type Plugin func(context.Context, *Call) (*current.Result, error)

// Call is one call by name, whose environment, version and network's name have been looked at.
type Call struct {
	Name        string // that of the plugin
	Verb        string
	ContainerID string // this and IfName are empty in GC and STATUS
	NetNS       string // a path, which may be empty in DEL
	IfName      string
	Args        string // CNI_ARGS
	Network     string
	StateDir    string // what the program's own field of this name says, or its default
	Stdin       []byte // the configuration
	SameNetNS   bool   // the pod may be in the plugin's own namespace

	// Prev reads prevResult; without one it gives nil. What it gives may be changed.
	Prev func() (*current.Result, error)
	// Open opens the node as the configuration has it.
	Open func() (*network.Node, error)
	// Warn says what was worked around.
	Warn func(message string)
}

// Unmarshal reads the configuration into the plugin's own fields. As in the reference, fields of
// others are passed over, and names count in either case.
func (c *Call) Unmarshal(into any) error {
	everything := func(string, string) bool { return true }
	if err := strict.Unmarshal(c.Stdin, into, everything); err != nil {
		return Errorf(types.ErrInvalidNetworkConfig, "the network's configuration: %v", err)
	}
	return nil
}

// CodeDiffers is the code by which CHECK says that something is not as it was made, whichever the
// plugin is.
const CodeDiffers = uint(113)

// Errorf makes an error with a code of the specification's, or of the program's own.
func Errorf(code uint, format string, args ...any) *types.Error {
	return &types.Error{Code: code, Msg: fmt.Sprintf(format, args...)}
}

// IPNet is the form that a result has for an address with its network's length.
func IPNet(p netip.Prefix) net.IPNet {
	return net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// IsEmpty says whether a part of a configuration says nothing.
func IsEmpty(raw json.RawMessage) bool {
	switch string(raw) {
	case "", "null", "[]", "{}":
		return true
	}
	return false
}
