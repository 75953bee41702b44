package network

import (
	"cmp"
	"encoding/json"
	"net"
	"net/netip"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/route"
)

// Pod describes one interface of a pod, which Add attaches to a network. The zero value of a field requests nothing,
// unless the field's comment says otherwise.
type Pod struct {
	ContainerID string // begins with a letter or digit; then also '_', '.', '-'
	IfName      string // the name of the new interface in the pod
	Name        string // the name for operators, "namespace/name"

	// NetNS is the pod's network namespace, and Path is the path of its file, such as /run/netns/NAME. Path is empty
	// if another program will move the interface to a namespace that is not known yet; see Change.Moved. Before the
	// move, the pod has no IPv6 addresses from routers or DHCPv6. SameNetNS permits the host's own namespace, which
	// Add otherwise refuses.
	NetNS     *netns.NS
	Path      string
	SameNetNS bool

	// MAC is the pod's MAC. If nil, it is derived from its IPv4 address, or random. If the bridge or another pod on it
	// has the MAC, Add returns ErrConflict.
	MAC net.HardwareAddr
	// Addresses are the pod's addresses if neither an allocator nor a lease provides any. Routes are added to the
	// routes of the network and of the allocator or lease.
	Addresses []ipam.Address
	Routes    []route.Route
	// Lease makes the pod lease its IPv4 address by DHCP.
	Lease *Lease

	Ports []nft.Port // ports of the host that lead to the pod
	// PublishFrom lists the callers that Ports are open to, if they are in Network.PublishFrom too.
	PublishFrom string
	Limits      bandwidth.Shape // limits of the pod's traffic
	Egress      nft.Egress      // permitted destinations, besides Network.Egress; it implies nft.GuardAddresses

	// Reported is used by Check. It holds the changes that other plugins made in the pod. nil means none.
	Reported *Reported
}

// Lease describes how a pod leases its IPv4 address by DHCP.
type Lease struct {
	// Client holds the client's identity for the server, and the DHCP options that it requests. Add sets its clock,
	// its sockets and its MAC, which is the pod's.
	Client dhcpc.Config
	// Sticky means that the client's identity belongs to the pod and not to its container. The lease is then never
	// released, and is remembered for the pod's next container.
	Sticky bool
	// KeeperOptional lets Add succeed even if no keeper runs that would renew the lease.
	KeeperOptional bool
	// Routes are added to the routes of the lease. Priority is the metric of all these routes.
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

// Attachment is the result of Add.
type Attachment struct {
	Key
	Pod   string // its name
	Path  string // where its namespace can be opened
	Ready bool   // its Add is complete

	Bridge    string
	BridgeMAC net.HardwareAddr
	// HostVLAN is the host's link with the gateways in the network's VLAN, or "".
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
	Routes    []route.Route  // as requested
	Ports     []nft.Port
	Limits    bandwidth.Shape // as enforced by the kernel
	DNS       DNS             // from a lease and router advertisements

	rec *state.Attachment
	// informs means that the keeper requests the pod's DNS configuration by DHCPv6.
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
		Bridge: rec.Bridge, Port: rec.HostIf, PortMAC: net.HardwareAddr(
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

// owner returns the owner under which an allocator reserves the attachment's addresses.
func (k Key) owner() ipam.Owner { return ipam.Owner{ContainerID: k.ContainerID, IfName: k.IfName} }

func keyOf(rec *state.Attachment) Key { return Key{rec.Network, rec.ContainerID, rec.IfName} }

func (p *Pod) key(nw *Network) Key { return Key{nw.Name, p.ContainerID, p.IfName} }

func (k Key) hash() string { return ident.Hash(k.Network, k.ContainerID, k.IfName) }

// newRecord returns the record that Add writes first, before the pod has addresses, a MAC or limits.
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

	if err := p.key(nw).check(); err != nil {
		return err
	}

	if err := cmp.Or(checkPorts(p.Ports), nw.checkPolicies(p.Egress, p.PublishFrom)); err != nil {
		return err
	}

	const ethernet = 1500 // another MTU has other adjustments, but the same errors
	if _, _, err := p.Limits.Effective(ethernet); err != nil {
		return failf(ErrInvalid, "bandwidth: %w", err)
	}

	if nw.DHCPv6 && (p.Lease == nil || p.Lease.KeeperOptional) {
		return failf(ErrInvalid,
			`ipv6 "dhcp": tombolod leases the address, beside that of IPv4: it needs ipam.type "dhcp", and no keeper `+
				`that is "optional"`)
	}

	if p.NetNS == nil {
		return failf(ErrInvalid, "the pod of container %s has no namespace", p.ContainerID)
	}

	id := p.NetNS.ID()
	if id == (netns.ID{}) {
		return failf(ErrInvalid, "the namespace of container %s is not open", p.ContainerID)
	}

	if p.SameNetNS {
		return nil
	}

	if host == nil {
		own, err := netns.Current()
		if err != nil {
			return err
		}
		defer own.Close()
		host = own
	}

	if host.ID() == id {
		return failf(ErrInvalid, "%w", ErrHostNamespace)
	}

	return nil
}
