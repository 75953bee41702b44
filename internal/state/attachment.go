package state

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/route"
)

// State says how far an ADD has come.
type State string

const (
	// Adding is an attachment that an ADD works on, or has left unfinished.
	Adding State = "adding"

	// Ready is an attachment whose ADD has succeeded.
	Ready State = "ready"
)

// An Attachment is what one ADD made: enough to undo it without its
// configuration, its namespace or its result, and to put its host end back on a
// rebuilt bridge.
type Attachment struct {
	Version int    `json:"version,omitempty"`
	State   State  `json:"state"`
	Epoch   string `json:"epoch,omitempty"` // Epoch.Token of the epoch it was made in

	Network     string `json:"network"`
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"`
	Pod         string `json:"pod,omitempty"` // namespace/name, where the runtime told it

	NetNS       string    `json:"netns,omitempty"`       // path, as the runtime gave it; paths are reused
	NetNSCookie uint64    `json:"netnsCookie,omitempty"` // SO_NETNS_COOKIE, never reused within a boot
	Created     time.Time `json:"created,omitzero"`      // UTC

	HostIf    string         `json:"hostIf,omitempty"` // the veth's end in the host's namespace
	Bridge    string         `json:"bridge,omitempty"` // the port's master
	NIC       string         `json:"nic,omitempty"`    // shared with the bridge, and not its port
	MTU       int            `json:"mtu,omitempty"`    // bytes
	MAC       MAC            `json:"mac,omitempty"`    // of the pod's end
	HostMAC   MAC            `json:"hostMAC,omitempty"`
	Addresses []ipam.Address `json:"addresses,omitempty"` // in the order of the result
	// Hairpin and Isolated are flags of the port: see bridge.Port.
	Hairpin  bool            `json:"hairpin,omitempty"`
	Isolated bool            `json:"isolated,omitempty"`
	VLAN     vlan.Membership `json:"vlan,omitzero"` // of the port
	// Routes are the pod's that last as long as it does: those of a lease and of router
	// advertisements are not among them.
	Routes []route.Route `json:"routes,omitempty"`

	// Moving says that the keeper is at work on, or died at, a change of Addresses:
	// they are those of after and of before, and the kernel may have either.
	Moving bool `json:"moving,omitempty"`

	Up         bool `json:"up,omitempty"`         // false only with disableContainerInterface
	Masquerade bool `json:"masquerade,omitempty"` // its addresses are masqueraded
	// Guard is what it is held to.
	Guard nft.Guard `json:"guard,omitzero"`
	// DefaultRoute is where it leads for a pod on a LAN: "host" or "router"; empty where
	// it is on none.
	DefaultRoute string `json:"defaultRoute,omitempty"`
	// SLAAC says that it forms IPv6 addresses by router advertisements: of Addresses,
	// those that end in the interface identifier made of MAC. They come and go with what
	// is advertised.
	SLAAC bool `json:"slaac,omitempty"`

	Published []Published `json:"published,omitempty"` // its host ports
	// PortSNAT is whose calls of them come from the host's address.
	PortSNAT nft.SNAT `json:"portSNAT,omitempty"`
	// Waiting are the container's other attachments to which this one's host ports go when it
	// is deleted: they have them as Withheld. Those on a LAN are among them without any, too.
	Waiting   []Waiting       `json:"waiting,omitempty"`
	Bandwidth bandwidth.Shape `json:"bandwidth,omitzero"` // as the kernel enforces it
	IFB       string          `json:"ifb,omitempty"`      // the link that its egress is shaped by

	IPAMType string `json:"ipamType,omitempty"` // ipam.type, so that DEL can release
	DataDir  string `json:"dataDir,omitempty"`  // ipam.dataDir, resolved

	// Short is what Hash gives, where that was computed before: Create and what reads records
	// fill it in. It is the name of the record's file, and not in it.
	Short string `json:"-"`
}

// Published is a port of the host that leads to the pod.
type Published struct {
	nft.Port
	// Withheld says that another attachment of the container has it.
	Withheld bool `json:"withheld,omitempty"`
}

// Waiting names an attachment.
type Waiting struct {
	Network string `json:"network"`
	Hash    string `json:"hash"`
	// Addresses are its own.
	Addresses []netip.Prefix `json:"addresses,omitempty"`
	// LAN says that it is on a LAN, whose machines it reaches past the host.
	LAN bool `json:"lan,omitempty"`
}

// Hash returns the attachment's hash: Short, or what it has to be if that is empty.
func (a *Attachment) Hash() string {
	if a.Short != "" {
		return a.Short
	}
	return ident.Hash(a.Network, a.ContainerID, a.IfName)
}

// Check refuses what would not be read back.
func (a *Attachment) Check() error {
	errs := []error{
		checkNetwork(a.Network),
		ident.CheckText("container ID", a.ContainerID),
		ident.CheckText("interface name", a.IfName),
	}
	if a.State != Adding && a.State != Ready {
		errs = append(errs, fmt.Errorf("its state is %q", a.State))
	}
	for _, address := range a.Addresses {
		if !address.Prefix.IsValid() {
			errs = append(errs, errors.New("an address has no valid prefix"))
		}
	}
	for _, name := range []string{a.HostIf, a.Bridge, a.NIC, a.IFB} {
		if name != "" && !ident.IsLinkName(name) {
			errs = append(errs, fmt.Errorf("%q cannot name a link", name))
		}
	}
	for _, p := range a.Published {
		errs = append(errs, doing(p.Port.Check(), "it publishes port %d as %s", p.PodPort, p.Port))
	}
	return errors.Join(errs...)
}

// encodeAttachment returns a line of a record's file.
func encodeAttachment(a *Attachment) ([]byte, error) {
	return EncodeChecked(&a.Version, a, file.MaxRecord/2) // the file holds up to two lines
}

// decodeAttachment reads a record's file: its last whole line.
func decodeAttachment(data []byte) (*Attachment, error) {
	a := new(Attachment)
	return a, Decode(lastDocument(data), &a.Version, a)
}

// Load reads an attachment's record. A missing one matches os.ErrNotExist; one that cannot be used is a
// *RecordError. It needs no lock, but without one the answer may be out of date at once.
func (d *Dir) Load(network, hash string) (*Attachment, error) {
	path, err := d.attachmentPath(network, hash)
	if err != nil {
		return nil, fmt.Errorf("load attachment: %w", err)
	}
	a, err := loadAttachment(path, network, hash)
	if err != nil {
		bad := &RecordError{Path: path, Network: network, Hash: hash}
		err = bad.Wrap(err)
		if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.ELOOP) {
			bad.Err = fmt.Errorf("%w: %w", ErrDamaged, bad.Err)
		}
		return nil, fmt.Errorf("load attachment: %w", err)
	}
	return a, nil
}

func loadAttachment(path, network, hash string) (*Attachment, error) {
	data, err := readFile(path)
	if err != nil {
		return nil, err
	}
	a, err := decodeAttachment(data)
	if err != nil {
		return nil, err
	}
	if a.Network != network || a.Hash() != hash {
		return nil, fmt.Errorf("%w: it is the record of network %s, container %s, interface %s, whose file is %s/%s%s",
			ErrDamaged, a.Network, a.ContainerID, a.IfName, a.Network, a.Hash(), suffix)
	}
	a.Short = hash
	return a, nil
}

// Written is when an attachment's record was written last.
func (d *Dir) Written(network, hash string) (time.Time, error) {
	path, err := d.attachmentPath(network, hash)
	if err != nil {
		return time.Time{}, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return time.Time{}, err
	}
	return info.ModTime(), nil
}

// Update writes an attachment's record over the one that there is, whole or not at
// all: what has become of it since its ADD. It needs the shared lock, and locks the
// record meanwhile: where a DEL has it, the error matches ErrBusy.
func (d *Dir) Update(a *Attachment) error {
	lock, err := d.LockAttachment(a.Network, a.Hash())
	if err != nil {
		return fmt.Errorf("update attachment: %w", err)
	}
	return errors.Join(d.UpdateLocked(a), lock.Close())
}

// UpdateLocked is Update for a caller that has the record's lock. The lock is of the old record's file: it does not
// keep others from the new one.
func (d *Dir) UpdateLocked(a *Attachment) error {
	path, err := d.attachmentPath(a.Network, a.Hash())
	if err == nil {
		_, err = loadAttachment(path, a.Network, a.Hash())
	}
	var line []byte
	if err == nil {
		line, err = encodeAttachment(a)
	}
	if err == nil {
		err = d.replaceFile(path, line)
	}
	return doing(err, "update attachment")
}

// Unfinished says whether a record is what an ADD leaves that is killed: one that says
// Adding, or that has no whole line. Of one that is locked, the ADD goes on.
func (d *Dir) Unfinished(network, hash string) (bool, error) {
	path, err := d.attachmentPath(network, hash)
	if err != nil {
		return false, fmt.Errorf("load attachment: %w", err)
	}
	data, err := readFile(path)
	if err != nil {
		return false, fmt.Errorf("load attachment: %w", err)
	}
	if !bytes.ContainsRune(data, '\n') && !json.Valid(data) {
		return true, nil
	}
	a, err := loadAttachment(path, network, hash)
	return err == nil && a.State == Adding, nil
}

// Remove removes an attachment's record, or what is in its place; that it is gone already is
// success. It needs the shared lock.
func (d *Dir) Remove(network, hash string) error {
	path, err := d.attachmentPath(network, hash)
	if err == nil {
		err = d.remove(path)
	}
	if errors.Is(err, unix.EISDIR) {
		err = os.RemoveAll(path)
	}
	return doing(err, "remove attachment")
}

// List reads the records of a network's attachments, in the order of their hashes. Each record that cannot be used
// is a *RecordError; only if the directory cannot be read is the error set. A network without a directory has no
// attachments. Under the shared lock records may come and go meanwhile, and one that is just being created shows as
// damaged; the exclusive lock stops that.
func (d *Dir) List(network string) ([]*Attachment, []*RecordError, error) {
	if err := checkNetwork(network); err != nil {
		return nil, nil, fmt.Errorf("list attachments: %w", err)
	}
	found, bad, err := list(d.attachmentsPath()+"/"+network, ident.IsHash, func(hash string) (*Attachment, error) { return d.Load(network, hash) })
	if err != nil {
		return nil, nil, fmt.Errorf("list attachments: %w", err)
	}
	return found, bad, nil
}

// MAC is a net.HardwareAddr of Ethernet's, as text "02:00:00:00:00:01".
type MAC net.HardwareAddr

// String is that of net.HardwareAddr.
func (m MAC) String() string { return net.HardwareAddr(m).String() }

// MarshalText gives what String does.
func (m MAC) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText reads what String gives.
func (m *MAC) UnmarshalText(text []byte) error {
	mac, err := net.ParseMAC(string(text))
	if err == nil && len(mac) != 6 {
		err = fmt.Errorf("a MAC of %d bytes", len(mac))
	}
	*m = MAC(mac)
	return err
}
