package network

import (
	"cmp"
	"encoding/json"
	"net"
	"net/netip"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/route"
)

// Network describes a network: its bridge, and the settings that all its pods share. The zero value of a field turns
// the feature off, unless the field's comment says otherwise.
type Network struct {
	Name   string // 1 to 250 letters, digits, '_', '.' and '-'; the first is a letter or digit; used in file names
	Bridge string // created if it does not exist
	// MTU is in bytes. 0 means the MTU of Uplink. Without an uplink, 0 means the MTU of another program's bridge, or
	// DefaultMTU.
	MTU int
	// DefaultMTU is the MTU of a new bridge if MTU is 0. 0 means the MTU of the default route's link.
	DefaultMTU int

	// Allocator allocates addresses for pods. It is nil if pods request fixed addresses, have none, or lease them by
	// DHCP. If it is set, set Origin or Config.Allocators too, because Del otherwise cannot release the addresses.
	Allocator ipam.Allocator
	// Origin is recorded with each attachment, so that Del can find the allocator that takes the addresses back. See
	// Config.Allocators.
	Origin Origin

	// Subnets are the subnets of the pods' future addresses, if known. Only Node.Ready uses them, to look for conflicts
	// with other networks and the host, and for missing IPv6.
	Subnets []netip.Prefix

	// Gateway makes the host the pods' gateway: the link GatewayLink gets the gateways' addresses, and the host
	// forwards packets.
	Gateway bool
	// DefaultGateway gives a pod a default route for each family with a gateway, unless the pod has one from the
	// allocator or Pod.Routes.
	DefaultGateway bool
	// NoDefaultRoute leaves out the default route through the host (ExitHost), and one that a DHCP lease or a router of
	// the LAN offers.
	NoDefaultRoute bool
	// ForceAddress deletes addresses of GatewayLink that overlap with a gateway's subnet. Without it, such an address
	// makes Add fail, unless the link has the gateway's address already.
	ForceAddress bool

	Masquerade    bool           // packets of pods that leave the network's subnets get the host's address
	NonMasquerade []netip.Prefix // destinations to which packets keep the pod's address
	Policy        nft.Policy     // restricts packets between pods, also of different networks
	Internal      bool           // no packet passes between the bridge and another link

	// Egress limits the destinations to which pods may open connections. It needs Gateway and NFCall, but no Uplink and
	// no VLAN. For a bridge of ours, Routed suffices in place of NFCall. The policy "public" also permits the name
	// servers of Allocator, if that has a method Resolvers() []netip.Addr.
	Egress nft.Egress

	// PublishFrom lists the callers that pods' host ports are open to, as an entry of nft.Endpoint.PublishFrom does.
	PublishFrom string
	// Unadmitted leaves it to the host's own firewall to accept connections to pods' host ports.
	Unadmitted bool

	Guard nft.Guard // the restriction of pods' packets, such as nft.GuardAddresses

	// Promiscuous makes the bridge promiscuous, and NFCall makes bridged packets pass the IP firewall (br_netfilter).
	// On another program's bridge, nil leaves the setting unchanged. On a bridge of ours, a nil Promiscuous means
	// false, and a nil NFCall means the value of Routed.
	Promiscuous, NFCall *bool
	// Routed turns NFCall on for a bridge of ours if NFCall is nil. Pods need it to reach each other through
	// services.
	Routed bool

	// LeaveIPv6 leaves IPv6 enabled in pods without addresses. They then have link-local addresses and accept router
	// advertisements. It has no effect on pods with addresses or a lease.
	LeaveIPv6 bool

	Hairpin  bool // on each port: a pod reaches itself through a service
	Isolated bool // on each port: nothing passes from one isolated port to another
	DAD      bool // detect duplicates of IPv6 addresses
	Down     bool // the pod's interface stays down, and has no addresses

	// Uplink is the name of the host's NIC that connects the pods to its LAN. Empty means none. If the NIC is a port
	// of the bridge, it is used as it is. Otherwise the host keeps the NIC, and the bridge shares it (package share).
	Uplink string
	// Exit selects the next hop of the default route for pods on a LAN. It is empty without a LAN.
	Exit Exit
	// DetectConflicts selects how Add looks for other machines on the LAN that have the pod's addresses. It does not
	// apply to addresses from a DHCP server. With true, Add asks and waits 1.5 s for answers. With nil, Add asks, and
	// takes into account the answers that arrive before it returns. With false, Add does not ask.
	DetectConflicts *bool
	// VLAN selects the bridge's VLANs to which the pods' ports belong. The zero Membership is the default VLAN, to
	// which the bridge itself also belongs. If VLAN.ID is set, the gateways' addresses are on a separate link; see
	// GatewayLink. On an uplink, the frames of VLAN.ID and VLAN.Trunk have tags, and frames of the default VLAN have
	// none. A shared uplink allows only the zero Membership.
	VLAN vlan.Membership
	// SLAAC makes pods form IPv6 addresses from router advertisements. The advertisements also give the default route,
	// unless Exit is ExitHost or NoDefaultRoute is set.
	SLAAC bool
	// DHCPv6 makes the keeper (tombolod) lease an IPv6 address too, for pods that lease their IPv4 address. It needs
	// SLAAC, because pods learn the routes to the routers only from advertisements. The lease does not wait for
	// advertisements.
	DHCPv6 bool
}

// Exit is the next hop of the default route of a pod on a LAN.
type Exit string

// The values of Exit.
const (
	ExitHost   Exit = "host"   // the host, whose firewall and services see the pods' packets
	ExitRouter Exit = "router" // the LAN's own router
)

const exitHost = string(ExitHost) // ExitHost in the form of the records

// Origin names the source of an attachment's addresses. Both fields are recorded.
type Origin struct {
	Type string // such as "host-local"; empty without an allocator; "dhcp" for leases
	Dir  string // the directory of its reservations; empty means the directory ipam in the state directory
}

// Key identifies an attachment, which is one interface of a container in a network.
type Key struct {
	Network     string
	ContainerID string
	IfName      string // name of the interface in the pod
}

// check returns an error that matches ErrInvalid if the network is nil or invalid.
func (nw *Network) check() error {
	if nw == nil {
		return failf(ErrInvalid, "the network is nil")
	}

	if err := checkName(nw.Name); err != nil {
		return err
	}

	switch err := nw.Guard.Check(); {
	case !ident.IsLinkName(nw.Bridge):
		return failf(ErrInvalid, "bridge %q of network %q cannot name a link", nw.Bridge, nw.Name)
	case nw.Uplink != "" && !ident.IsLinkName(nw.Uplink):
		return checkNIC(nw.Uplink)
	case nw.Exit != "" && nw.Exit != ExitHost && nw.Exit != ExitRouter:
		return failf(ErrInvalid, `network %q: Exit is %q, and has to be "host" or "router"`, nw.Name, string(nw.Exit))
	case err != nil:
		return failf(ErrInvalid, "network %q: %w", nw.Name, err)
	case nw.DHCPv6 && !nw.SLAAC:
		return failf(ErrInvalid, "network %q: DHCPv6 needs SLAAC, which gives pods the way to the routers", nw.Name)
	}

	return cmp.Or(nw.CheckPolicies(), nw.CheckVLAN())
}

// CheckPolicies returns an error that matches ErrInvalid if Egress or PublishFrom is wrong, or if the network cannot
// enforce Egress. The latter is the case if packets of pods do not pass the host's firewall.
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

// checkName returns an error if name is not a network's name by the CNI specification, or too long for a file name.
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

// CheckVLAN returns an error if VLAN is invalid, or conflicts with Bridge, Gateway, Guard or Exit. The error matches
// ErrInvalid.
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

// Pod describes one interface of a pod, which Add attaches to a network. The zero value of a field requests nothing,
// unless the field's comment says otherwise.
type Pod struct {
	ContainerID string // begins with a letter or digit; then also '_', '.', '-'
	IfName      string // the name of the new interface in the pod
	Name        string // the name for operators, "namespace/name"

	// NetNS is the network namespace in which Add creates the interface, normally the pod's. Path is the path of its
	// file, such as /run/netns/NAME. If another program will move the interface to a namespace that is not known yet,
	// NetNS is a temporary namespace, and Path is empty; see Change.Moved. Before the move, the pod has no IPv6
	// addresses from routers or DHCPv6. SameNetNS permits the host's own namespace, which Add otherwise refuses.
	NetNS     *netns.NS
	Path      string
	SameNetNS bool

	// MAC is the pod's MAC. If nil, Add derives the MAC from the pod's addresses. A pod without addresses, or with a
	// lease, gets a random MAC. If the bridge or another pod on it has the MAC, the error of Add matches ErrConflict.
	// Add does not check this for a MAC that begins with 0a, like the derived ones. With an uplink, Add also refuses
	// the MAC of another machine on the LAN.
	MAC net.HardwareAddr
	// Addresses are the pod's addresses if neither an allocator nor a lease provides any. Routes are added to the
	// routes of the network and of the allocator or lease.
	Addresses []ipam.Address
	Routes    []route.Route
	// Resolvers are name servers that the egress policy "public" permits. They have no effect if the network's
	// Allocator has a method Resolvers.
	Resolvers []netip.Addr
	// Lease makes the pod lease its IPv4 address by DHCP.
	Lease *Lease

	Ports []nft.Port // ports of the host that lead to the pod
	// PublishFrom lists the callers for which Ports are open. If Network.PublishFrom is set too, a caller must be in
	// both lists.
	PublishFrom string
	Limits      bandwidth.Shape // limits of the pod's traffic
	Egress      nft.Egress      // permitted destinations; Network.Egress applies too; implies nft.GuardAddresses

	// Reported is the pod's state that other plugins reported since Add, for Check. If nil, Check uses the record.
	Reported *Reported
}

// Lease describes how a pod leases its IPv4 address by DHCP.
type Lease struct {
	// Client holds the client's identity for the server, and the DHCP options that it requests. Add sets its clock,
	// its sockets and its MAC, which is the pod's.
	Client dhcpc.Config
	// Sticky means that the client's identity belongs to the pod and not to its container. Del then does not release
	// the lease, and the pod's next container requests it again.
	Sticky bool
	// KeeperOptional lets Add succeed even if no keeper (tombolod) runs, which would renew the lease.
	KeeperOptional bool
	// Routes are added to the routes of the lease. Priority is the metric of all these routes. If they include a
	// default route, and the pod has one with this metric already, Add chooses a larger metric.
	Routes   []dhcpc.Route
	Priority int
}

// Reported is the state of a pod as other plugins report it, since they may have changed the result of Add.
type Reported struct {
	MAC net.HardwareAddr // nil if not reported
	// HostMACs maps the names of interfaces outside of pods to their reported MACs. The attachment's port may be one
	// of them.
	HostMACs map[string]string
	// Addresses are the addresses of the pod's interface. Unplaced are addresses for which no interface is reported.
	Addresses, Unplaced []netip.Prefix
	// Others are the addresses of the pod's other interfaces.
	Others []netip.Prefix
	Routes []route.Route
}

// Attachment is the result of Add. If it comes from the records, as in Node.Attachments, then BridgeMAC, BridgeMTU,
// HostVLANMAC, Routes and DNS are not set.
type Attachment struct {
	Key
	Pod   string // the pod's name for operators
	Path  string // where its namespace can be opened
	Ready bool   // its Add is complete

	Bridge    string
	BridgeMAC net.HardwareAddr
	// HostVLAN is the name of the host's link in the network's VLAN, which has the gateways' addresses, or "". If the
	// Attachment comes from the records, the link may be missing, since a network without gateways has none.
	HostVLAN    string
	HostVLANMAC net.HardwareAddr
	BridgeMTU   int
	Port        string // the veth's end on the bridge
	PortMAC     net.HardwareAddr
	MTU         int // MTU of Port
	MAC         net.HardwareAddr
	PodMTU      int    // MTU of the veth's end in the pod
	IFB         string // the link that shapes the traffic from the pod; empty if none

	Addresses []ipam.Address // IPv4 first
	Routes    []route.Route  // the requested routes, with their final metrics
	Ports     []nft.Port
	Limits    bandwidth.Shape // as enforced by the kernel
	DNS       DNS             // from a lease, router advertisements and DHCPv6

	rec *state.Attachment
	// informs means that tombolod requests the pod's DNS configuration by DHCPv6.
	informs bool
	// unconfirmed means that no DHCP server answered. Then Add does not wait for DHCPv6 either.
	unconfirmed bool
}

// DNS is the configuration of name resolution.
type DNS struct {
	Servers []netip.Addr
	Domain  string
	Search  []string
}

// attachmentOf converts a record into an Attachment.
func attachmentOf(rec *state.Attachment) *Attachment {
	return &Attachment{
		Key: keyOf(rec), Pod: rec.Pod, Path: rec.NetNS, Ready: rec.State == state.Ready,
		Bridge: rec.Bridge, HostVLAN: rec.VLANLink(), Port: rec.HostIf, PortMAC: net.HardwareAddr(
			rec.HostMAC), MTU: rec.MTU, MAC: net.HardwareAddr(rec.MAC), PodMTU: rec.MTU, IFB: rec.IFB,
		Addresses: rec.Addresses, Ports: endpoint.Ports(rec), Limits: rec.Bandwidth, rec: rec,
	}
}

// Report is an attachment's record, together with its differences.
type Report struct {
	*Attachment
	// Differences lists the differences between the record and the kernel's objects outside of the pod.
	Differences []tombolo.Difference
	// Inside lists changes inside the pod since Add. They are no fault, and nothing reverts them: the pod, its
	// runtime and other plugins may change everything there.
	Inside []tombolo.Difference
}

// MarshalJSON returns the attachment's record and the differences as one JSON object.
func (r Report) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		*state.Attachment
		Differences []tombolo.Difference `json:"differences,omitempty"`
		Inside      []tombolo.Difference `json:"inside,omitempty"`
	}{r.Attachment.onRecord(), r.Differences, r.Inside})
}

// onRecord returns a copy of the attachment's record for JSON output. It omits the version of the record's file format.
func (a *Attachment) onRecord() *state.Attachment {
	if a == nil || a.rec == nil {
		return nil
	}
	rec := *a.rec
	rec.Version = 0
	return &rec
}

// owner returns the owner for which an allocator reserves the attachment's addresses.
func (k Key) owner() ipam.Owner { return ipam.Owner{ContainerID: k.ContainerID, IfName: k.IfName} }

func keyOf(rec *state.Attachment) Key { return Key{rec.Network, rec.ContainerID, rec.IfName} }

func (p *Pod) key(nw *Network) Key { return Key{nw.Name, p.ContainerID, p.IfName} }

func (k Key) hash() string { return ident.Hash(k.Network, k.ContainerID, k.IfName) }

// record returns the record that Add writes first, before the pod has its addresses and limits.
func (p *Pod) record(nw *Network, hash string) *state.Attachment {
	return &state.Attachment{
		Network: nw.Name, ContainerID: p.ContainerID, IfName: p.IfName, Pod: p.Name, NetNS: p.Path,
		IPAMType: nw.Origin.Type, DataDir: nw.Origin.Dir,
		HostIf: ident.Port(hash), Bridge: nw.Bridge, VLAN: nw.VLAN, Up: !nw.Down, MAC: state.MAC(p.MAC),
		Published: endpoint.Published(p.Ports), Short: hash,
	}
}

// check returns an error if the pod is invalid, does not fit the network, or is in the host's own namespace without
// SameNetNS.
func (p *Pod) check(nw *Network, host *netns.NS) error {
	if p == nil || nw == nil {
		return failf(ErrInvalid, "the network or the pod is nil")
	}

	err := cmp.Or(p.key(nw).check(), checkPorts(p.Ports), nw.checkPolicies(p.Egress, p.PublishFrom))
	if err != nil {
		return err
	}

	const ethernet = 1500 // another MTU has other adjustments, but the same errors
	switch _, _, err := p.Limits.Effective(ethernet); {
	case err != nil:
		return failf(ErrInvalid, "bandwidth: %w", err)
	case nw.DHCPv6 && (p.Lease == nil || p.Lease.KeeperOptional):
		return failf(ErrInvalid,
			`ipv6 "dhcp": tombolod leases the address, beside that of IPv4: it needs ipam.type "dhcp", and no keeper `+
				`that is "optional"`)
	case p.NetNS == nil:
		return failf(ErrInvalid, "the pod of container %s has no namespace", p.ContainerID)
	case p.NetNS.ID() == netns.ID{}:
		return failf(ErrInvalid, "the namespace of container %s is not open", p.ContainerID)
	case p.SameNetNS:
		return nil
	}

	if host == nil {
		if host, err = netns.Current(); err != nil {
			return err
		}
		defer host.Close()
	}

	if host.ID() == p.NetNS.ID() {
		return failf(ErrInvalid, "%w", ErrHostNamespace)
	}

	return nil
}
