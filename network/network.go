package network

import (
	"net/netip"

	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/nft"
)

// Network is what the pods of one network have in common: a bridge, and its settings. A field with its zero value
// asks for nothing, unless it says otherwise.
type Network struct {
	Name   string // 1 to 250 letters, digits, '_', '.' and '-'; it names files
	Bridge string // made if it is not there
	MTU    int    // in bytes; 0 is DefaultMTU, or that of another program's bridge
	// DefaultMTU is for a bridge that is made, where MTU is 0; 0 is that of the default route's link.
	DefaultMTU int

	// Allocator reserves the addresses of pods in Add. Nil is for pods that name their addresses, have none, or lease
	// them. Del gets no Network, so it takes an address back only by Origin or Config.Allocators: set one of the two.
	Allocator ipam.Allocator
	// Origin names the Allocator on record: {Type: "host-local"} for an ipam.HostLocal, or any name that your
	// Config.Allocators knows. It is not used to reserve addresses.
	Origin Origin

	// Subnets are those that addresses will come from, as far as that is known: for Ready, which
	// says whether the kernel has what they need.
	Subnets []netip.Prefix

	// Gateway has the bridge have the gateways' addresses, and the host forward.
	Gateway bool
	// DefaultGateway gives a pod a default route for each family that has a gateway, unless
	// its allocator gave it one.
	DefaultGateway bool
	// NoDefaultRoute leaves out the default route that a lease or the LAN would give.
	NoDefaultRoute bool
	// ForceAddress replaces addresses of the bridge that overlap with a gateway's.
	ForceAddress bool

	Masquerade    bool           // packets of pods to elsewhere have the host's address
	NonMasquerade []netip.Prefix // but to here
	Policy        nft.Policy     // where pods of other networks, and of this one, may send to
	Internal      bool           // no packet passes between the bridge and another link

	// Egress says what pods may send by themselves, on a bridge with Gateway and NFCall. "public" takes in the name servers
	// of Allocator, if that has a method Resolvers() []netip.Addr.
	Egress nft.Egress

	Guard nft.Guard // what pods are held to: nft.GuardAddresses, say

	// Promiscuous and NFCall, by which bridged packets pass the firewall, may be nil: then another program's bridge
	// keeps what it has, and one of ours is not promiscuous, and calls the firewall if Routed.
	Promiscuous, NFCall *bool
	// Routed has a bridge of ours call the firewall where NFCall is nil, for pods that reach each other by services.
	Routed bool

	// LeaveIPv6 leaves IPv6 to pods that get no addresses: they have link-local addresses, and hear
	// routers. With addresses it says nothing.
	LeaveIPv6 bool

	Hairpin  bool // of each port: a pod reaches itself through a service
	Isolated bool // of each port: nothing passes from one isolated port to another
	DAD      bool // detect duplicates of IPv6 addresses
	Down     bool // the pod's interface stays down, and has no addresses

	// Uplink names a NIC of the host by which pods are on its LAN; empty is none. A NIC that is a port of the bridge is
	// used as it is. Every other one stays the host's, and the bridge shares it (package share).
	Uplink string
	// Exit is where the default route of pods on a LAN leads; empty where they are on none.
	Exit Exit
	// DetectConflicts is how an Add looks for other machines that have the pod's addresses, for pods on a LAN whose
	// addresses no DHCP server gives: true waits for answers (1.5 s), nil takes what has come before the port is up, and
	// false asks for none.
	DetectConflicts *bool
	// VLAN names the bridge's VLANs that the pods' ports are in; the zero Membership is the default VLAN, in which
	// the bridge itself is too. A gateway in VLAN.ID has a link of its own, see GatewayLink. An uplink carries all
	// of them with their tags.
	VLAN vlan.Membership
	// SLAAC has pods form IPv6 addresses by router advertisements, which also give the default route,
	// unless Exit is ExitHost.
	SLAAC bool
	// DHCPv6 has pods lease an IPv6 address as well, by the keeper, for pods that lease theirs of
	// IPv4. It needs SLAAC, for the way to the routers, and does not wait for these.
	DHCPv6 bool
}

// Exit is where the default route of a pod on a LAN leads.
type Exit string

// The ways out of a LAN.
const (
	ExitHost   Exit = "host"   // the host, whose firewall and services see what pods send
	ExitRouter Exit = "router" // the LAN's own router
)

const exitHost = string(ExitHost) // as it is on record

// Origin is the source of an attachment's addresses, which Add puts on record for Del: see Config.Allocators.
type Origin struct {
	Type string // "host-local", say; empty where there is no allocator. "dhcp" is for leases
	Dir  string // where it keeps its reservations; empty for <state>/ipam
}

// Key names an attachment.
type Key struct {
	Network     string
	ContainerID string
	IfName      string // of the interface in the pod
}

// check refuses what could not be meant for a network.
func (nw *Network) check() error {
	if nw == nil {
		return failf(ErrInvalid, "the network is nil")
	}
	if err := checkName(nw.Name); err != nil {
		return err
	}
	if !ident.IsLinkName(nw.Bridge) {
		return failf(ErrInvalid, "bridge %q of network %q cannot name a link", nw.Bridge, nw.Name)
	}
	if nw.Uplink != "" {
		if err := checkNIC(nw.Uplink); err != nil {
			return err
		}
	}
	if nw.Exit != "" && nw.Exit != ExitHost && nw.Exit != ExitRouter {
		return failf(ErrInvalid, `network %q: Exit is %q, and has to be "host" or "router"`, nw.Name, string(nw.Exit))
	}
	if err := nw.Guard.Check(); err != nil {
		return failf(ErrInvalid, "network %q: %w", nw.Name, err)
	}
	if nw.DHCPv6 && !nw.SLAAC {
		return failf(ErrInvalid, "network %q: DHCPv6 needs SLAAC, which gives pods the way to the routers", nw.Name)
	}
	if err := nw.CheckEgress(); err != nil {
		return err
	}
	return nw.CheckVLAN()
}

// CheckEgress refuses a policy that the network could not enforce: packets have to pass the host's firewall. The error
// matches ErrInvalid.
func (nw *Network) CheckEgress() error { return nw.checkEgress(nw.Egress) }

func (nw *Network) checkEgress(policy nft.Egress) error {
	if err := policy.Check(); err != nil {
		return failf(ErrInvalid, "network %q: %w", nw.Name, err)
	}
	if policy == "" || nw.Gateway && nw.Uplink == "" && nw.VLAN.IsZero() && (nw.NFCall == nil || *nw.NFCall) {
		return nil
	}
	return failf(ErrInvalid, "network %q: egressPolicy %q needs mode \"gateway\" with isGateway and bridgeNFCall, and no VLAN", nw.Name, policy)
}

// checkName holds a network's name to the CNI specification's form, and to what can name a
// file.
func checkName(name string) error {
	if len(name) > 250 || !ident.IsIdentifier(name) {
		return failf(ErrInvalid, "%q is not the name of a network", name)
	}
	return nil
}

func (k Key) check() error {
	if err := checkName(k.Network); err != nil {
		return err
	}
	if !ident.IsIdentifier(k.ContainerID) || !ident.IsLinkName(k.IfName) {
		return failf(ErrInvalid, "container %q and interface %q are not names of an attachment", k.ContainerID, k.IfName)
	}
	return nil
}

// GatewayLink names the link that has the gateways' addresses: the bridge, or the host's link
// in the network's VLAN, "cbr0.100".
func (nw *Network) GatewayLink() string {
	return (&state.Network{Bridge: nw.Bridge, VLAN: nw.VLAN}).GatewayLink()
}

// CheckVLAN refuses VLANs that a network cannot be in. The error matches ErrInvalid.
func (nw *Network) CheckVLAN() error {
	switch err := nw.VLAN.Check(); {
	case err != nil:
		return failf(ErrInvalid, "network %q: %w", nw.Name, err)
	case nw.VLAN.ID != 0 && !ident.IsLinkName(nw.GatewayLink()):
		return failf(ErrInvalid, "network %q: %q would name the link in its VLAN, and a link's name has 15 bytes at most: give the bridge a shorter one", nw.Name, nw.GatewayLink())
	case nw.VLAN.ID == 1 && nw.Gateway:
		return failf(ErrInvalid, "network %q: in VLAN 1 the gateway is the bridge itself: leave vlan out, or choose another", nw.Name)
	case nw.Guard != "" && nw.Guard != nft.GuardMAC && len(nw.VLAN.Trunk) > 0:
		return failf(ErrInvalid, "network %q: a guarded pod may not send the tagged frames of a trunk: leave out vlanTrunk, or guard and lanGuard", nw.Name)
	case nw.Exit == ExitHost && nw.VLAN.ID != 0:
		return failf(ErrInvalid, `network %q: the host has its addresses outside of VLAN %d, so no default route can lead to it: set defaultRoute to "router"`, nw.Name, nw.VLAN.ID)
	}
	return nil
}
