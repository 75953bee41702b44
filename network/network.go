package network

import (
	"cmp"
	"net/netip"

	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/nft"
)

// Network holds the common settings of a network's pods: a bridge, and its properties. A field with its zero value
// requests nothing, unless its comment says otherwise.
type Network struct {
	Name   string // 1 to 250 letters, digits, '_', '.' and '-'; used in file names
	Bridge string // created if it does not exist
	MTU    int    // in bytes; 0 means DefaultMTU, or that of another program's bridge
	// DefaultMTU is the MTU of a new bridge if MTU is 0. 0 means the MTU of the default route's link.
	DefaultMTU int

	// Allocator allocates addresses for pods. It is nil if pods request fixed addresses, have none, or lease them by
	// DHCP. Also set Origin or Config.Allocators: without them Del does not release addresses.
	Allocator ipam.Allocator
	// Origin is recorded with an attachment. It determines later which allocator takes its addresses back: see
	// Config.Allocators.
	Origin Origin

	// Subnets are the subnets of future addresses, if known. Ready uses them to check that the kernel supports them.
	Subnets []netip.Prefix

	// Gateway gives the gateways' addresses to the bridge, and makes the host forward.
	Gateway bool
	// DefaultGateway gives a pod a default route for each family with a gateway, unless its allocator gave it one.
	DefaultGateway bool
	// NoDefaultRoute omits the default route that a lease or a router of the LAN offers.
	NoDefaultRoute bool
	// ForceAddress replaces addresses of the bridge that overlap with a gateway's.
	ForceAddress bool

	Masquerade    bool           // packets from pods to other destinations get the host's address
	NonMasquerade []netip.Prefix // except to these destinations
	Policy        nft.Policy     // the pods, of this and other networks, that may send to the network's pods
	Internal      bool           // no packet passes between the bridge and another link

	// Egress lists the destinations that pods may open connections to, on a bridge with Gateway and NFCall. "public"
	// includes the name servers of Allocator, if that has a method Resolvers() []netip.Addr.
	Egress nft.Egress

	// PublishFrom lists the callers that pods' host ports are open to, as an entry of nft.Endpoint.PublishFrom does.
	PublishFrom string
	// Unadmitted leaves calls of pods' host ports to the host's own firewall.
	Unadmitted bool

	Guard nft.Guard // the restriction of pods' packets, such as nft.GuardAddresses

	// Promiscuous and NFCall (which makes bridged packets pass the firewall) may be nil. Then another program's
	// bridge keeps its settings, and one of ours is not promiscuous, and calls the firewall if Routed is set.
	Promiscuous, NFCall *bool
	// Routed makes our bridge call the firewall if NFCall is nil, for pods that reach each other through services.
	Routed bool

	// LeaveIPv6 leaves IPv6 on for pods without addresses: they have link-local addresses, and accept router
	// advertisements. With addresses it has no effect.
	LeaveIPv6 bool

	Hairpin  bool // on each port: a pod reaches itself through a service
	Isolated bool // on each port: nothing passes from one isolated port to another
	DAD      bool // detect duplicates of IPv6 addresses
	Down     bool // the pod's interface stays down, and has no addresses

	// Uplink is the name of the host's NIC that connects pods to its LAN, or empty. A NIC that is a port of the
	// bridge is used as it is. Every other one stays the host's, and the bridge shares it (package share).
	Uplink string
	// Exit is the way of the default route of pods on a LAN. It is empty without a LAN.
	Exit Exit
	// DetectConflicts selects how an Add looks for other machines with the pod's addresses, for pods on a LAN with
	// addresses that no DHCP server gives. true waits for answers (1.5 s), nil accepts answers until the port is up,
	// and false sends no questions.
	DetectConflicts *bool
	// VLAN contains the bridge's VLANs that the pods' ports are in. The zero Membership is the default VLAN, which
	// the bridge itself is in too. A gateway in VLAN.ID has a separate link, see GatewayLink. An uplink carries all
	// of them with their tags.
	VLAN vlan.Membership
	// SLAAC makes pods form IPv6 addresses from router advertisements, which also give the default route, unless Exit
	// is ExitHost.
	SLAAC bool
	// DHCPv6 makes the keeper lease an IPv6 address too, for pods that lease their IPv4 address. It needs SLAAC, for
	// the way to the routers, and does not wait for these.
	DHCPv6 bool
}

// Exit is the way of the default route of a pod on a LAN.
type Exit string

// The ways out of a LAN.
const (
	ExitHost   Exit = "host"   // the host, whose firewall and services see the pods' packets
	ExitRouter Exit = "router" // the LAN's own router
)

const exitHost = string(ExitHost) // in its recorded form

// Origin is the source of an attachment's addresses. Both fields are recorded.
type Origin struct {
	Type string // such as "host-local"; empty without an allocator; "dhcp" for leases
	Dir  string // the directory of its reservations; empty for <state>/ipam
}

// Key identifies an attachment.
type Key struct {
	Network     string
	ContainerID string
	IfName      string // name of the interface in the pod
}

// check returns an error for an invalid network.
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

	if err := nw.CheckPolicies(); err != nil {
		return err
	}

	return nw.CheckVLAN()
}

// CheckPolicies returns an error for a wrong Egress or PublishFrom, and for an Egress that the network could not
// enforce, because packets do not pass the host's firewall. The error matches ErrInvalid.
func (nw *Network) CheckPolicies() error { return nw.checkPolicies(nw.Egress, nw.PublishFrom) }

func (nw *Network) checkPolicies(policy nft.Egress, callers string) error {
	if err := cmp.Or(policy.Check(), nft.CheckCallers(callers)); err != nil {
		return failf(ErrInvalid, "network %q: %w", nw.Name, err)
	}
	if policy == "" || nw.Gateway && nw.Uplink == "" && nw.VLAN.IsZero() && (nw.NFCall == nil || *nw.NFCall) {
		return nil
	}
	return failf(ErrInvalid,
		"network %q: egressPolicy %q needs mode \"gateway\" with isGateway and bridgeNFCall, and no VLAN",
		nw.Name, policy)
}

// checkName checks a network's name against the CNI specification, and for use in a file name.
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
		return failf(ErrInvalid, "container %q and interface %q are not names of an attachment", k.ContainerID,
			k.IfName)
	}
	return nil
}

// GatewayLink returns the name of the link with the gateways' addresses: the bridge, or the host's link in the
// network's VLAN, such as "cbr0.100".
func (nw *Network) GatewayLink() string {
	return (&state.Network{Bridge: nw.Bridge, VLAN: nw.VLAN}).GatewayLink()
}

// CheckVLAN returns an error for VLANs that a network cannot be in. The error matches ErrInvalid.
func (nw *Network) CheckVLAN() error {
	switch err := nw.VLAN.Check(); {
	case err != nil:
		return failf(ErrInvalid, "network %q: %w", nw.Name, err)
	case nw.VLAN.ID != 0 && !ident.IsLinkName(nw.GatewayLink()):
		return failf(ErrInvalid,
			"network %q: %q would name the link in its VLAN, and a link's name has 15 bytes at most: give the bridge "+
				"a shorter one", nw.Name, nw.GatewayLink())
	case nw.VLAN.ID == 1 && nw.Gateway:
		return failf(ErrInvalid,
			"network %q: in VLAN 1 the gateway is the bridge itself: leave vlan out, or choose another", nw.Name)
	case nw.Guard != "" && nw.Guard != nft.GuardMAC && len(nw.VLAN.Trunk) > 0:
		return failf(ErrInvalid,
			"network %q: a guarded pod may not send the tagged frames of a trunk: leave out vlanTrunk, or guard and "+
				"lanGuard", nw.Name)
	case nw.Exit == ExitHost && nw.VLAN.ID != 0:
		return failf(ErrInvalid,
			`network %q: the host has its addresses outside of VLAN %d, so no default route can lead to it: set `+
				`defaultRoute to "router"`, nw.Name, nw.VLAN.ID)
	}

	return nil
}
