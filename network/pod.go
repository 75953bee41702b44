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

// Pod is an interface of a pod, which is attached to a network. A field with its zero value asks for nothing,
// unless it says otherwise.
type Pod struct {
	ContainerID string // a letter or digit, then these and '_', '.', '-'
	IfName      string // the interface to be made in the pod
	Name        string // by which an operator knows the pod, "namespace/name"

	// NetNS is the pod's namespace, and Path where it can be opened again. An empty Path means that another program
	// will move the interface to a namespace that is not known yet: see Change.Moved. The pod has no IPv6 by routers
	// or DHCPv6 until then. SameNetNS lets the namespace be the host's own, which is refused otherwise.
	NetNS     *netns.NS
	Path      string
	SameNetNS bool

	// MAC is the pod's; nil is one that follows from its IPv4 address, or a random one.
	MAC net.HardwareAddr
	// Addresses are given, where neither an allocator nor a lease gives any. Routes are the
	// pod's besides those of its network and of what gives it its addresses.
	Addresses []ipam.Address
	Routes    []route.Route
	// Lease has the pod lease its IPv4 address by DHCP.
	Lease *Lease

	Ports  []nft.Port      // of the host, that lead to the pod
	Limits bandwidth.Shape // of its traffic
	Egress nft.Egress      // what it may send by itself, besides Network.Egress; it implies nft.GuardAddresses

	// Reported is for Check: what other plugins changed in the pod. Nil is nothing.
	Reported *Reported
}

// Lease is how a pod leases its address.
type Lease struct {
	// Client is the identity by which the server knows the pod, and the options that it asks for. Its clock and its
	// sockets are filled in. Its MAC is the pod's.
	Client dhcpc.Config
	// Sticky says that the identity is the pod's and not the container's: its lease is
	// remembered for the pod's next container, and never released.
	Sticky bool
	// KeeperOptional does without a program that renews the lease.
	KeeperOptional bool
	// Routes are the pod's besides the lease's; Priority is the metric of both.
	Routes   []dhcpc.Route
	Priority int
}

// Reported is what a pod has as other plugins report it, which may have changed what Add made.
type Reported struct {
	MAC net.HardwareAddr // nil: not told
	// HostMACs are those of interfaces outside of pods, by name, as they were told: the
	// attachment's port may be one.
	HostMACs map[string]string
	// Addresses are those of the pod's interface, and Unplaced those without a known interface.
	Addresses, Unplaced []netip.Prefix
	// Others are those of the pod's other interfaces.
	Others []netip.Prefix
	Routes []route.Route
}

// Attachment is what Add made.
type Attachment struct {
	Key
	Pod   string // its name
	Path  string // where its namespace can be opened
	Ready bool   // its Add has come to its end

	Bridge    string
	BridgeMAC net.HardwareAddr
	// HostVLAN is the host's link in the network's VLAN, that has the gateways; "" if none.
	HostVLAN    string
	HostVLANMAC net.HardwareAddr
	BridgeMTU   int
	Port        string // the host's end
	PortMAC     net.HardwareAddr
	MTU         int // of the port
	MAC         net.HardwareAddr
	PodMTU      int    // of the pod's end
	IFB         string // the link that shapes what the pod sends; empty: none

	Addresses []ipam.Address // IPv4 first
	Routes    []route.Route  // as they were asked for
	Ports     []nft.Port
	Limits    bandwidth.Shape // as the kernel enforces them
	DNS       DNS             // by a lease and router advertisements

	rec *state.Attachment
	// informs says that the keeper asks for the pod's DNS by DHCPv6.
	informs bool
	// unconfirmed says that no DHCP server answered, so that DHCPv6 is not waited for.
	unconfirmed bool
}

// DNS is how a pod resolves names.
type DNS struct {
	Servers []netip.Addr
	Domain  string
	Search  []string
}

// attachmentOf is an attachment as its record has it.
func attachmentOf(rec *state.Attachment) *Attachment {
	return &Attachment{
		Key: keyOf(rec), Pod: rec.Pod, Path: rec.NetNS, Ready: rec.State == state.Ready,
		Bridge: rec.Bridge, Port: rec.HostIf, PortMAC: net.HardwareAddr(rec.HostMAC), MTU: rec.MTU, MAC: net.HardwareAddr(rec.MAC), PodMTU: rec.MTU, IFB: rec.IFB,
		Addresses: rec.Addresses, Ports: endpoint.Ports(rec), Limits: rec.Bandwidth, rec: rec,
	}
}

// Report is the record of one attachment, with its differences.
type Report struct {
	*Attachment
	// Differences are those between the record and the kernel, outside of the pod.
	Differences []tombolo.Difference
	// Inside lists what differs inside the pod from what Add gave it. It is no fault, and nothing puts it back: the
	// pod, its runtime and other plugins may change all of it.
	Inside []tombolo.Difference
}

// MarshalJSON gives the attachment as it is on record, with the differences.
func (r Report) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		*state.Attachment
		Differences []tombolo.Difference `json:"differences,omitempty"`
		Inside      []tombolo.Difference `json:"inside,omitempty"`
	}{r.Attachment.onRecord(), r.Differences, r.Inside})
}

// onRecord is an attachment as JSON has it: the version is that of its record's format.
func (a *Attachment) onRecord() *state.Attachment {
	if a == nil || a.rec == nil {
		return nil
	}
	rec := *a.rec
	rec.Version = 0
	return &rec
}

// owner is what the allocator gives addresses to.
func (k Key) owner() ipam.Owner { return ipam.Owner{ContainerID: k.ContainerID, IfName: k.IfName} }

func keyOf(rec *state.Attachment) Key { return Key{rec.Network, rec.ContainerID, rec.IfName} }

func (p *Pod) key(nw *Network) Key { return Key{nw.Name, p.ContainerID, p.IfName} }

func (k Key) hash() string { return ident.Hash(k.Network, k.ContainerID, k.IfName) }

// record is the attachment as it is on record from the first on.
func (p *Pod) record(nw *Network, hash string) *state.Attachment {
	return &state.Attachment{
		Network: nw.Name, ContainerID: p.ContainerID, IfName: p.IfName, Pod: p.Name, NetNS: p.Path,
		IPAMType: nw.Origin.Type, DataDir: nw.Origin.Dir,
		HostIf: "veth" + hash, Bridge: nw.Bridge, VLAN: nw.VLAN, Up: !nw.Down,
		Published: endpoint.Published(p.Ports), Short: hash,
	}
}

// check refuses what could not be meant for a pod, before anything is touched.
func (p *Pod) check(nw *Network, host *netns.NS) error {
	if p == nil || nw == nil {
		return failf(ErrInvalid, "the network or the pod is nil")
	}
	if err := p.key(nw).check(); err != nil {
		return err
	}
	if err := cmp.Or(checkPorts(p.Ports), nw.checkEgress(p.Egress)); err != nil {
		return err
	}
	const ethernet = 1500 // another MTU has other adjustments, and no other errors
	if _, _, err := p.Limits.Effective(ethernet); err != nil {
		return failf(ErrInvalid, "bandwidth: %w", err)
	}
	if nw.DHCPv6 && (p.Lease == nil || p.Lease.KeeperOptional) {
		return failf(ErrInvalid, `ipv6 "dhcp": tombolod leases the address, beside that of IPv4: it needs ipam.type "dhcp", and no keeper that is "optional"`)
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
