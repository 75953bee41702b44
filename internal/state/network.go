package state

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/nft"
)

// ErrInUse means that a network still has attachments.
var ErrInUse = errors.New("in use")

// A Network is the record of a network that was built. An ADD has nothing to build if its configuration equals the
// record, and the recorded bridge and its rules exist in the kernel.
type Network struct {
	Version int    `json:"version,omitempty"`
	Name    string `json:"name"`
	Epoch   string `json:"epoch,omitempty"` // Token of the epoch (one boot of the node) in which the network was built
	// ConfigHash is a hash of the network's configuration when the network was built. It is opaque to this package.
	ConfigHash string `json:"configHash,omitempty"`

	Bridge   string         `json:"bridge,omitempty"`
	MTU      int            `json:"mtu,omitempty"`      // bytes
	Gateways []netip.Prefix `json:"gateways,omitempty"` // the host's addresses in the network, as gateways
	Subnets  []netip.Prefix `json:"subnets,omitempty"`  // the subnets of the pods' addresses

	// Pools are the ranges of the pods' addresses. PoolDir is the directory of the reservations; empty means
	// <state>/ipam.
	Pools   []ipam.RangeSet `json:"pools,omitempty"`
	PoolDir string          `json:"poolDir,omitempty"`

	Masquerade    bool           `json:"masquerade,omitempty"`
	NonMasquerade []netip.Prefix `json:"nonMasquerade,omitempty"` // destinations for which pods keep their address
	Policy        nft.Policy     `json:"policy,omitempty"`        // the ingress policy
	// Internal means that no packet passes between the bridge and another link of the host.
	Internal bool `json:"internal,omitempty"`
	// Egress is the policy for connections that the network's pods open. Resolvers are the name servers that the
	// policy "public" includes.
	Egress    nft.Egress   `json:"egress,omitempty"`
	Resolvers []netip.Addr `json:"resolvers,omitempty"`
	PodEgress bool         `json:"podEgress,omitempty"` // pods may have egress policies of their own
	// ChainedPolicy is the ingress policy that a later plugin of the network's configuration list requested. The
	// stricter one of Policy and ChainedPolicy applies.
	ChainedPolicy nft.Policy `json:"chainedPolicy,omitempty"`
	// AdminChain is an operator's chain that FORWARD of iptables calls first. A later plugin of the network's
	// configuration list requested this.
	AdminChain string `json:"adminChain,omitempty"`
	PortSNAT   bool   `json:"portSNAT,omitempty"` // the network has the rules that a pod's PortSNAT needs
	Guard      bool   `json:"guard,omitempty"`    // the network has rules that check the sources of pods' packets
	Mark       uint32 `json:"mark,omitempty"`     // the bit of the packet mark that admitted packets have
	// NFCall is true if bridged packets traverse the host's firewall. nil leaves the bridge's setting alone.
	NFCall      *bool `json:"nfCall,omitempty"`
	Promiscuous *bool `json:"promiscuous,omitempty"` // whether the bridge is promiscuous; nil leaves the setting alone

	// Uplink is the NIC that connects the bridge to a LAN; empty if there is none.
	Uplink string `json:"uplink,omitempty"`
	// MadePromiscuous is set if Tombolo made the uplink promiscuous. When the network is removed, the uplink gets its
	// former mode.
	MadePromiscuous bool `json:"madePromiscuous,omitempty"`
	// VLAN is the membership of the pods' ports in VLANs of the bridge.
	VLAN vlan.Membership `json:"vlan,omitzero"`
	// DefaultRoute is the next hop of the default route of pods on a LAN: "host" or "router". It is empty without a
	// LAN.
	DefaultRoute string `json:"defaultRoute,omitempty"`
	// HostMAC is the host's MAC on the LAN. Pods whose default route leads to the host have a neighbour entry with
	// this MAC.
	HostMAC MAC `json:"hostMAC,omitempty"`
	// SLAAC is set if pods form IPv6 addresses from router advertisements.
	SLAAC bool `json:"slaac,omitempty"`

	// Routers4 lists the links that forwarded IPv4 by their owner's setting when the network's rules were made. It is
	// empty unless Closed4 is set. Routers6 lists the links that had net.ipv6.conf.LINK.force_forwarding set before
	// Tombolo set it for all links.
	Routers4 []string `json:"routers4,omitempty"`
	Routers6 []string `json:"routers6,omitempty"`
	// Closed4 (for IPv4) and Closed6 (for IPv6) are set if the host forwarded only packets of pods when the network's
	// rules were made.
	Closed4 bool `json:"closed4,omitempty"`
	Closed6 bool `json:"closed6,omitempty"`

	// LoopbackUnfiltered is set if the bridge lacks the ingress filter that protects the host's 127.0.0.0/8 (package
	// localnet). Either the kernel does not support the filter, or adding it would have lost packets.
	LoopbackUnfiltered bool `json:"loopbackUnfiltered,omitempty"`

	// GatewayUses has, for each gateway in use, one attachment that needs the gateway.
	GatewayUses []GatewayUse `json:"held,omitempty"`
}

// GatewayUse is a gateway together with one attachment that needs it. As long as that attachment exists, the gateway
// stays, and the plugin need not look for other attachments that need it.
type GatewayUse struct {
	Gateway    netip.Prefix `json:"gateway"`
	Attachment string       `json:"attachment"` // the attachment's hash
}

// Guards reports whether the network has rules that check the sources of pods' packets. Pods with egress policies need
// these rules too.
func (n *Network) Guards() bool { return n.Guard || n.PodEgress }

// Check returns an error if the record is invalid. LoadNetwork refuses an invalid record.
func (n *Network) Check() error {
	for _, prefix := range slices.Concat(n.Gateways, n.Subnets, n.NonMasquerade) {
		if !prefix.IsValid() {
			return errors.New("a gateway, subnet or destination is not a valid prefix")
		}
	}
	return checkNetwork(n.Name)
}

// SaveNetwork replaces a network's record as a whole. It needs the exclusive lock.
func (d *Dir) SaveNetwork(n *Network) error {
	path, err := d.networkPath(n.Name)
	var data []byte
	if err == nil {
		data, err = EncodeChecked(&n.Version, n, file.MaxRecord)
	}
	if err == nil {
		err = d.replaceFile(path, data)
	}
	return WithOperation(err, "save network %s", n.Name)
}

// LoadNetwork reads a network's record. If there is none, the network has not been built, and the error matches
// os.ErrNotExist. If the record cannot be used, the error wraps a *RecordError. LoadNetwork needs no lock, but without
// one the answer may be out of date at once.
func (d *Dir) LoadNetwork(name string) (*Network, error) {
	path, err := d.networkPath(name)
	var n *Network
	if err == nil {
		n, err = ReadRecord(&RecordError{Path: path, Network: name}, decodeNetwork, func(n *Network) error {
			if n.Name != name {
				return fmt.Errorf("%w: it is the record of network %s", ErrDamaged, n.Name)
			}
			return nil
		})
	}
	return n, WithOperation(err, "load network")
}

func decodeNetwork(data []byte) (*Network, error) {
	n := new(Network)
	return n, Decode(data, &n.Version, n)
}

// RemoveNetwork removes a network's record and the empty directory of its attachments. It is no error if the record or
// the directory is missing. If the network has attachments, RemoveNetwork removes nothing, and the error matches
// ErrInUse. It needs the exclusive lock.
func (d *Dir) RemoveNetwork(name string) error {
	path, err := d.networkPath(name)
	if err != nil {
		return fmt.Errorf("remove network: %w", err)
	}

	dir := d.attachmentsPath() + "/" + name
	switch err = unix.Rmdir(dir); err {
	case nil, unix.ENOENT:
		err = d.remove(path)
	case unix.ENOTEMPTY:
		return fmt.Errorf("remove network %s: %w: there are records in %s", name, ErrInUse, dir)
	default:
		err = file.PathError("rmdir", dir, err)
	}

	return WithOperation(err, "remove network")
}

// Networks returns the sorted names of all networks that have a record, or a directory for attachments. It skips other
// files in the directories of networks and attachments.
func (d *Dir) Networks() ([]string, error) {
	names, _, err := RecordNames(d.networksPath(), isNetwork)
	dirs, dirsErr := file.ReadDir(d.attachmentsPath())
	if err = errors.Join(err, dirsErr); err != nil {
		return nil, fmt.Errorf("list networks: %w", err)
	}

	for _, e := range dirs {
		if e.IsDir() && isNetwork(e.Name()) {
			names = append(names, e.Name())
		}
	}

	slices.Sort(names)
	return slices.Compact(names), nil
}

// UnknownNetwork returns an error about a network that does not exist. names are the names of the recorded networks,
// which the message lists.
func UnknownNetwork(names []string, name string) error {
	if len(names) == 0 {
		return fmt.Errorf("there is no network %q: none is on record", name)
	}
	return fmt.Errorf("there is no network %q: those on record are %s", name, strings.Join(names, ", "))
}

// ListNetworks reads the records of all networks, sorted by file name. For each record that cannot be used, and for
// each other file, it returns a *RecordError.
func (d *Dir) ListNetworks() ([]*Network, []*RecordError, error) {
	found, bad, err := list(d.networksPath(), isNetwork, d.LoadNetwork)
	return found, bad, WithOperation(err, "list networks")
}

// GatewayLink returns the name of the link for the network's gateway addresses: the bridge, or the host's link in the
// network's VLAN of the bridge. The link need not exist if the host is no gateway.
func (n *Network) GatewayLink() string { return vlanLinkName(n.VLAN, n.Bridge) }

// GatewayLink returns the name of the link for the gateway addresses of the attachment's network: see
// Network.GatewayLink.
func (a *Attachment) GatewayLink() string { return vlanLinkName(a.VLAN, a.Bridge) }

// vlanLinkName returns the name of the host's link in the VLAN of v on the bridge, or bridge if v has no VLAN.
func vlanLinkName(v vlan.Membership, bridge string) string {
	if v.ID == 0 || bridge == "" {
		return bridge
	}
	return bridge + "." + strconv.Itoa(int(v.ID))
}

// VLANLink returns the name of the host's link in the attachment's VLAN, or "" if the attachment is in no VLAN.
func (a *Attachment) VLANLink() string {
	if a.VLAN.ID == 0 {
		return ""
	}
	return a.GatewayLink()
}

// maxUplink is the largest size of the file with the record of a NIC's takeover (see UplinkFile), in bytes. The record
// has all former addresses and routes of the NIC, and a route takes about 200 bytes.
const maxUplink = 16 << 20

// An UplinkFile is the file with the record of one NIC's takeover. A takeover (`tombolo uplink take`) makes the NIC a
// port of a bridge, which gets the NIC's addresses and routes. Package uplink writes and reads the record as a whole,
// so readers see either the old or the new record. The first line is an Epoch that Save creates, for the present life
// of the node. The addresses and routes in a record of an earlier epoch must not be restored.
//
// A caller that writes or removes the record holds the exclusive lock. An UplinkFile is not safe for use by several
// goroutines at once.
type UplinkFile struct {
	dir *Dir
	nic string
}

// Uplink returns the file of a NIC, which need not exist. If nic cannot be the name of a link, every method returns
// an error that matches ErrName.
func (d *Dir) Uplink(nic string) *UplinkFile { return &UplinkFile{dir: d, nic: nic} }

// Save replaces the record, which must be a JSON document.
func (f *UplinkFile) Save(record []byte) error {
	path, err := f.path()
	var epoch Epoch
	if err == nil {
		epoch, err = f.dir.newEpoch()
	}

	if err != nil {
		return fmt.Errorf("save record of uplink: %w", err)
	}

	data := append(Encode(&epoch.Version, &epoch), record...)
	switch {
	case len(data) > maxUplink:
		err = fmt.Errorf("it has %d bytes, at most %d are kept", len(data), maxUplink)
	case !json.Valid(record):
		err = fmt.Errorf("it is not JSON: %.60q", record)
	default:
		err = f.dir.replaceFile(path, data)
	}

	return WithOperation(err, "save record of uplink %s", f.nic)
}

// Load reads the record. If there is none, the error matches os.ErrNotExist. If the record belongs to an earlier epoch,
// Load returns it with an error that matches ErrStale. If the record cannot be used, the error wraps a *RecordError.
// Package uplink checks the contents.
func (f *UplinkFile) Load() (record []byte, err error) {
	defer func() { err = WithOperation(err, "load record of uplink") }()
	path, err := f.path()
	if err != nil {
		return nil, err
	}

	var epoch Epoch
	data, err := file.Read(path, maxUplink)
	if err == nil {
		epoch, record, err = splitUplink(data)
	}

	if err != nil {
		return nil, (&RecordError{Path: path, NIC: f.nic}).Wrap(err)
	}
	return record, f.dir.checkEpoch(path, epoch, f.dir.sources.netns)
}

// splitUplink splits the content of the file of an UplinkFile into its first line, the epoch, and the record, which is
// JSON.
func splitUplink(data []byte) (Epoch, []byte, error) {
	first, record, _ := bytes.Cut(data, []byte("\n"))
	epoch, err := decodeEpoch(first)
	if err != nil {
		return Epoch{}, nil, err
	}
	if !json.Valid(record) {
		return Epoch{}, nil, fmt.Errorf("%w: it is not whole JSON: %.60q", ErrDamaged, record)
	}
	return epoch, record, nil
}

// Remove removes the record. A missing record is no error.
func (f *UplinkFile) Remove() error {
	path, err := f.path()
	if err == nil {
		err = f.dir.remove(path)
	}
	return WithOperation(err, "remove record of uplink")
}

// path returns the path of the file with the record. With an error about an invalid name, the path must not be used.
func (f *UplinkFile) path() (path string, err error) {
	if !ident.IsLinkName(f.nic) { // such a name could lead out of the directory
		err = fmt.Errorf("uplink %.20q: %w: no link has it", f.nic, ErrName)
	}
	return f.dir.uplinksPath() + "/" + f.nic + suffix, err
}

// Uplinks returns the names of all NICs that have the record of a takeover (see UplinkFile). It reads no record, and
// needs no lock.
func (d *Dir) Uplinks() ([]string, error) {
	nics, _, err := RecordNames(d.uplinksPath(), ident.IsLinkName)
	return nics, WithOperation(err, "list uplinks")
}
