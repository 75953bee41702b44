package view

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// Network describes a network that has records in the state directory. If the network itself has no record, the data
// come only from the records of its attachments, the interfaces of its pods.
type Network struct {
	Name          string         `json:"network"`
	Mode          string         `json:"mode,omitempty"` // "gateway", "lan" or "l2"; empty without a record
	Bridge        string         `json:"bridge,omitempty"`
	MTU           int            `json:"mtu,omitempty"` // in bytes
	Subnets       []netip.Prefix `json:"subnets,omitempty"`
	Gateways      []netip.Prefix `json:"gateways,omitempty"`
	Uplink        string         `json:"uplink,omitempty"`
	DefaultRoute  string         `json:"defaultRoute,omitempty"` // next hop of pods on a LAN: "host" or "router"
	SLAAC         bool           `json:"slaac,omitempty"`
	Masquerade    bool           `json:"masquerade"`
	NonMasquerade []netip.Prefix `json:"nonMasquerade,omitempty"`
	Policy        string         `json:"policy,omitempty"`
	Guard         bool           `json:"guard"`
	// MACOnly is the number of attachments for which the guard checks only the MAC, and no addresses.
	MACOnly     int         `json:"macOnly,omitempty"`
	VLAN        uint16      `json:"vlan,omitempty"`      // ID of the VLAN for untagged frames; 0 if none
	VLANTrunk   vlan.Ranges `json:"vlanTrunk,omitempty"` // VLANs of tagged frames: "2-4,100"
	Attachments int         `json:"attachments"`
	// Adding is the number of attachments whose ADD is in progress or was interrupted.
	Adding   int      `json:"adding,omitempty"`
	IPAM     []string `json:"ipam,omitempty"` // the IPAM types of its attachments
	Pools    []Pool   `json:"pools"`          // empty if there are none or they are unknown; PoolNote has the reason
	PoolNote string   `json:"poolNote,omitempty"`
	Ports    []Port   `json:"ports"`

	bare bool // there is no record, neither of the network nor of attachments
}

// Pool is a set of address ranges. Each pod has one address from each pool.
type Pool struct {
	Range  string `json:"range"`  // the subnet if the pool is a whole subnet, else the pool's ranges
	Family int    `json:"family"` // 4 or 6
	Size   uint64 `json:"size"`   // math.MaxUint64 stands for any larger number
	Used   uint64 `json:"used"`   // number of reserved addresses
	Free   uint64 `json:"free"`
}

// Port is a host port together with the pod that it leads to.
type Port struct {
	state.Published
	Pod         string `json:"pod,omitempty"`
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"`
}

// Load reads the records of all networks in a node's state directory. If name is not empty, it reads only this
// network, which must exist. Load takes no lock, so it may run beside any CNI call. problems are errors about
// unreadable records and reservations.
func Load(ctx context.Context, node *network.Node, stateDir, name string) (list []Network, problems []error, _ error) {
	dir, err := state.Open(stateDir)
	if err != nil {
		return nil, nil, err
	}

	names, err := dir.Networks()
	if err != nil {
		return nil, nil, err
	}

	if name != "" {
		if !slices.Contains(names, name) {
			return nil, nil, state.UnknownNetwork(names, name)
		}
		names = []string{name}
	}

	pools, err := node.Pools(ctx)
	if err != nil {
		problems = append(problems, err)
	}

	list = []Network{}
	for _, one := range names {
		n, damaged, err := load(dir, pools, one)
		if err != nil {
			return nil, nil, err
		}

		// A network without any record is the empty directory that a failed first ADD left. List it only if it was
		// named.
		n.bare = n.Mode == "" && n.Attachments == 0 && len(damaged) == 0
		if name != "" || !n.bare {
			list = append(list, *n)
		}
		problems = append(problems, damaged...)
	}

	return list, problems, nil
}

// load collects the data of one network. problems are errors about unreadable records.
func load(dir *state.Dir, pools []network.Pool, name string) (_ *Network, problems []error, _ error) {
	attachments, damaged, err := dir.List(name)
	if err != nil {
		return nil, nil, err
	}

	n := &Network{Name: name, Attachments: len(attachments), Pools: []Pool{}, Ports: []Port{}}
	for _, d := range damaged {
		if state.IsUnfinished(nil, d) {
			n.Attachments, n.Adding = n.Attachments+1, n.Adding+1
		} else {
			problems = append(problems, d)
		}
	}

	rec, err := dir.LoadNetwork(name)
	switch {
	case err == nil:
		n.record(rec)
	case !errors.Is(err, fs.ErrNotExist):
		problems = append(problems, err)
	}

	for _, a := range attachments {
		n.attachment(a)
	}

	slices.SortFunc(n.Ports, func(a, b Port) int {
		return cmp.Or(cmp.Compare(a.HostPort, b.HostPort), cmp.Compare(a.Protocol, b.Protocol),
			a.HostAddr.Compare(b.HostAddr))
	})
	slices.Sort(n.IPAM)
	for _, p := range pools {
		family := 4
		if p.IPv6 {
			family = 6
		}
		if p.Network == n.Name {
			n.Pools = append(n.Pools, Pool{p.Name, family, p.Size, p.Reserved, p.Size - min(p.Size, p.Reserved)})
		}
	}

	if len(n.Pools) == 0 {
		n.PoolNote = poolNote(n.IPAM, attachments)
	}

	return n, problems, nil
}

// record sets the fields that come from the network's own record.
func (n *Network) record(rec *state.Network) {
	n.Mode = "l2"
	switch {
	case rec.Uplink != "" || rec.DefaultRoute != "":
		n.Mode = "lan"
	case len(rec.Gateways) > 0:
		n.Mode = "gateway"
	}

	n.Bridge, n.MTU, n.Subnets, n.Gateways = rec.Bridge, rec.MTU, rec.Subnets, rec.Gateways
	n.Uplink, n.DefaultRoute, n.SLAAC = rec.Uplink, rec.DefaultRoute, rec.SLAAC
	n.Masquerade, n.NonMasquerade, n.Guard = rec.Masquerade, rec.NonMasquerade, rec.Guard
	n.VLAN, n.VLANTrunk = rec.VLAN.ID, rec.VLAN.Trunk
	n.Policy = rec.Policy.String()
}

// attachment adds the data in one attachment's record to the network's.
func (n *Network) attachment(a *state.Attachment) {
	if a.State != state.Ready {
		n.Adding++
	}

	if a.Guard == nft.GuardMAC {
		n.MACOnly++
	}

	n.Bridge = cmp.Or(n.Bridge, a.Bridge)
	if a.IPAMType != "" && !slices.Contains(n.IPAM, a.IPAMType) {
		n.IPAM = append(n.IPAM, a.IPAMType)
	}
	for _, p := range a.Published {
		n.Ports = append(n.Ports, Port{p, a.Pod, a.ContainerID, a.IfName})
	}
}

// poolNote returns the reason why the addresses of a network's pools cannot be counted.
func poolNote(types []string, attachments []*state.Attachment) string {
	used := 0
	for _, a := range attachments {
		used += len(a.Addresses)
	}

	inUse := printable.Count(used, "address", "addresses") + " in use"
	switch {
	case len(attachments) == 0:
		return "not on record before the first pod"
	case len(types) == 0:
		return "none: pods get no addresses from an IPAM"
	case slices.Contains(types, "host-local"):
		return "not on record before the next ADD; " + inUse
	case len(types) == 1 && types[0] == "dhcp":
		return "the DHCP server's; " + inUse
	case len(types) == 1 && types[0] == "static":
		return "none: the configuration names the addresses"
	}

	return fmt.Sprintf("unknown: the IPAM plugin %q keeps it; %s", types[len(types)-1], inUse)
}
