package state

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/nft"
)

// ErrInUse says that a network still has attachments.
var ErrInUse = errors.New("in use")

// A Network is what a network was built from. An ADD that finds its own
// configuration in it, and its objects in the kernel, has nothing to build.
type Network struct {
	Version    int    `json:"version,omitempty"`
	Name       string `json:"name"`
	Epoch      string `json:"epoch,omitempty"`      // Epoch.Token of the epoch it was built in
	ConfigHash string `json:"configHash,omitempty"` // of what the caller built from; opaque here

	Bridge   string         `json:"bridge,omitempty"`
	MTU      int            `json:"mtu,omitempty"`      // bytes
	Gateways []netip.Prefix `json:"gateways,omitempty"` // the bridge's own addresses
	Subnets  []netip.Prefix `json:"subnets,omitempty"`  // what its pods' addresses come from

	// Pools are the ranges that addresses are given from, and PoolDir is where the reservations are; empty for <state>/ipam.
	Pools   []ipam.RangeSet `json:"pools,omitempty"`
	PoolDir string          `json:"poolDir,omitempty"`

	Masquerade    bool           `json:"masquerade,omitempty"`
	NonMasquerade []netip.Prefix `json:"nonMasquerade,omitempty"` // destinations for which pods keep their address
	Policy        nft.Policy     `json:"policy,omitempty"`        // the ingress policy
	// ChainedPolicy is one that a plugin further down the chain asked for: the stricter counts.
	ChainedPolicy nft.Policy `json:"chainedPolicy,omitempty"`
	// AdminChain is a chain of the operator's that iptables calls first, as such a plugin asked for.
	AdminChain  string `json:"adminChain,omitempty"`
	PortSNAT    bool   `json:"portSNAT,omitempty"`    // it has the rules that a pod's PortSNAT needs
	Guard       bool   `json:"guard,omitempty"`       // pods may use their own MAC and addresses only
	Mark        uint32 `json:"mark,omitempty"`        // the bit of what is admitted
	NFCall      *bool  `json:"nfCall,omitempty"`      // bridged packets pass the firewall; nil is not ours to say
	Promiscuous *bool  `json:"promiscuous,omitempty"` // of the bridge; nil is not ours to say

	// Uplink is the NIC by which the bridge is on a LAN; empty is none.
	Uplink string `json:"uplink,omitempty"`
	// MadePromiscuous is true if Tombolo made that NIC promiscuous, which the removal of the network undoes.
	MadePromiscuous bool `json:"madePromiscuous,omitempty"`
	// VLAN is which VLANs of the bridge its pods' ports are in.
	VLAN vlan.Membership `json:"vlan,omitzero"`
	// DefaultRoute is where the default route of pods on a LAN leads: "host" or
	// "router"; empty where they are on none.
	DefaultRoute string `json:"defaultRoute,omitempty"`
	// HostMAC is the host's MAC on the LAN, which pods have for the next hop of a default route to the host.
	HostMAC MAC `json:"hostMAC,omitempty"`
	// SLAAC says that pods form IPv6 addresses by router advertisements.
	SLAAC bool `json:"slaac,omitempty"`

	// Routers4 are the links that their owner has forward IPv4 on a host that is no router, and Routers6 those that
	// had net.ipv6.conf.LINK.force_forwarding before we set that of all links.
	Routers4 []string `json:"routers4,omitempty"`
	Routers6 []string `json:"routers6,omitempty"`
	// Closed4 and Closed6 are set if the host forwarded the family for pods only when the firewall was set up.
	Closed4 bool `json:"closed4,omitempty"`
	Closed6 bool `json:"closed6,omitempty"`

	// LoopbackUnfiltered says that the bridge is to do without a filter that keeps others from the host's
	// 127.0.0.1 without nf_tables: the kernel has none.
	LoopbackUnfiltered bool `json:"loopbackUnkept,omitempty"`

	// Held says for each gateway which networks need it.
	Held []Held `json:"held,omitempty"`
}

// Held is a gateway that is there for an attachment's sake, one of those that need
// it: while that is there, nothing else has to be looked at.
type Held struct {
	Gateway    netip.Prefix `json:"gateway"`
	Attachment string       `json:"attachment"` // its hash
}

// Check refuses what would not be read back.
func (n *Network) Check() error {
	for _, prefix := range slices.Concat(n.Gateways, n.Subnets, n.NonMasquerade) {
		if !prefix.IsValid() {
			return errors.New("a gateway, subnet or destination is not a valid prefix")
		}
	}
	return checkNetwork(n.Name)
}

// SaveNetwork writes a network's record, whole or not at all. It needs the
// exclusive lock.
func (d *Dir) SaveNetwork(n *Network) error {
	path, err := d.networkPath(n.Name)
	var data []byte
	if err == nil {
		data, err = EncodeChecked(&n.Version, n, file.MaxRecord)
	}
	if err == nil {
		err = d.replaceFile(path, data)
	}
	return doing(err, "save network %s", n.Name)
}

// LoadNetwork reads a network's record. A missing one matches os.ErrNotExist: the network has not been built; a
// record that cannot be used is a *RecordError. It needs the shared lock.
func (d *Dir) LoadNetwork(name string) (*Network, error) {
	path, err := d.networkPath(name)
	if err != nil {
		return nil, fmt.Errorf("load network: %w", err)
	}
	var n *Network
	data, err := readFile(path)
	if err == nil {
		n, err = decodeNetwork(data)
	}
	if err == nil && n.Name != name {
		err = fmt.Errorf("%w: it is the record of network %s", ErrDamaged, n.Name)
	}
	if err != nil {
		return nil, fmt.Errorf("load network: %w", (&RecordError{Path: path, Network: name}).Wrap(err))
	}
	return n, nil
}

func decodeNetwork(data []byte) (*Network, error) {
	n := new(Network)
	return n, Decode(data, &n.Version, n)
}

// RemoveNetwork removes a network's record and the directory of its attachments. It is no error if they are gone
// already; while there are attachments it does nothing and the error matches ErrInUse. It needs the exclusive lock.
func (d *Dir) RemoveNetwork(name string) error {
	path, err := d.networkPath(name)
	if err != nil {
		return fmt.Errorf("remove network: %w", err)
	}
	dir := d.attachmentsPath() + "/" + name
	switch err := unix.Rmdir(dir); err {
	case nil, unix.ENOENT:
	case unix.ENOTEMPTY:
		return fmt.Errorf("remove network %s: %w: there are records in %s", name, ErrInUse, dir)
	default:
		return fmt.Errorf("remove network: %w", &os.PathError{Op: "rmdir", Path: dir, Err: err})
	}
	return doing(d.remove(path), "remove network")
}

// Networks returns the names, sorted, of all networks that have a record or had
// an attachment. Other files in the two directories are passed over.
func (d *Dir) Networks() ([]string, error) {
	records, err := file.ReadDir(d.networksPath())
	if err != nil {
		return nil, fmt.Errorf("list networks: %w", err)
	}
	dirs, err := file.ReadDir(d.attachmentsPath())
	if err != nil {
		return nil, fmt.Errorf("list networks: %w", err)
	}
	names := make(map[string]bool)
	for _, e := range records {
		if name, ok := strings.CutSuffix(e.Name(), suffix); ok && checkNetwork(name) == nil {
			names[name] = true
		}
	}
	for _, e := range dirs {
		if e.IsDir() && checkNetwork(e.Name()) == nil {
			names[e.Name()] = true
		}
	}
	return slices.Sorted(maps.Keys(names)), nil
}

// UnknownNetwork is the error about a network that is not there; names are those on record.
func UnknownNetwork(names []string, name string) error {
	if len(names) == 0 {
		return fmt.Errorf("there is no network %q: none is on record", name)
	}
	return fmt.Errorf("there is no network %q: those on record are %s", name, strings.Join(names, ", "))
}

// ListNetworks reads the records of all networks, in the order of their names. It
// answers like List.
func (d *Dir) ListNetworks() ([]*Network, []*RecordError, error) {
	found, bad, err := list(d.networksPath(), func(name string) bool { return checkNetwork(name) == nil }, d.LoadNetwork)
	if err != nil {
		return nil, nil, fmt.Errorf("list networks: %w", err)
	}
	return found, bad, nil
}

// GatewayLink names the link by which the host is in the network: the bridge, or its own in
// the network's VLAN, though there be none where the host is no gateway.
func (n *Network) GatewayLink() string { return linkIn(n.VLAN, n.Bridge) }

// GatewayLink is that of the attachment's network.
func (a *Attachment) GatewayLink() string { return linkIn(a.VLAN, a.Bridge) }

func linkIn(v vlan.Membership, bridge string) string {
	if v.ID == 0 || bridge == "" {
		return bridge
	}
	return bridge + "." + strconv.Itoa(int(v.ID))
}

// VLANLink is GatewayLink, and empty where there is no VLAN.
func (a *Attachment) VLANLink() string {
	if a.VLAN.ID == 0 {
		return ""
	}
	return a.GatewayLink()
}
