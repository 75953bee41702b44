package ruleset

import (
	"net"
	"net/netip"
)

// Network is what there are rules for, sets and elements of its own. What it says is what the
// fields of nft's Network mean, which have been looked at before.
type Network struct {
	Key                        string // see NetworkKey
	Masquerade                 bool
	Exempt                     []netip.Prefix // destinations that are never masqueraded, in any order
	Bridge                     string         // "": of bridges nothing is known
	VLANOf                     string         // the bridge whose VLAN it is; "": none's
	NFCall, LAN                bool
	Policy                     string // which pods may send to its pods
	Guard, Groups, DropReports bool
	PortSNAT                   bool
	Dedup                      []Dedup
}

// Dedup is a subnet whose pods would get packets twice.
type Dedup struct {
	BridgeMAC net.HardwareAddr
	Gateway   netip.Addr
	Subnet    netip.Prefix
}

// The policies that are not open, as nft.Policy names them.
const (
	policySameBridge = "same-bridge" // those of the bridge may send, and those of bridges without a policy
	policyIsolated   = "isolated"    // those of bridges without a policy may
)
