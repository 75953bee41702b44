package ruleset

import (
	"fmt"
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
	Policy                     Policy
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

// Policy says which pods may send to a network's.
type Policy uint8

const (
	policyOpen       Policy = iota // all
	policySameBridge               // those of the bridge, and those of bridges without a policy
	policyIsolated                 // those of bridges without a policy
)

// String gives the policy as the field ingressPolicy of CNI's firewall plugin has it.
func (p Policy) String() string {
	switch p {
	case policyOpen:
		return "open"
	case policySameBridge:
		return "same-bridge"
	case policyIsolated:
		return "isolated"
	}
	return fmt.Sprintf("policy %d", uint8(p))
}
