package state

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lockorder"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/route"
)

// State is the state of an attachment's record. It shows whether the ADD has succeeded.
type State string

const (
	// Adding marks an attachment whose ADD is in progress, or was killed.
	Adding State = "adding"

	// Ready marks an attachment whose ADD has succeeded.
	Ready State = "ready"
)

// An Attachment is the record of one ADD, which attaches a pod's interface to a network. The record suffices to undo
// the ADD without its configuration, its namespace or its result. It also suffices to put the host's end of the pod's
// link back on a bridge that was created again.
type Attachment struct {
	Version int   `json:"version,omitempty"`
	State   State `json:"state"`

	Network     string `json:"network"`
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"`
	Pod         string `json:"pod,omitempty"` // namespace/name, if the runtime passed it

	NetNS       string    `json:"netns,omitempty"`       // path, as the runtime gave it; paths are reused
	NetNSCookie uint64    `json:"netnsCookie,omitempty"` // SO_NETNS_COOKIE, never reused within a boot
	Created     time.Time `json:"created,omitzero"`      // in UTC

	HostIf    string         `json:"hostIf,omitempty"` // the veth's end in the host's namespace
	Bridge    string         `json:"bridge,omitempty"` // the bridge that HostIf is a port of
	NIC       string         `json:"nic,omitempty"`    // the NIC that the bridge shares; empty if none
	MTU       int            `json:"mtu,omitempty"`    // of HostIf, in bytes
	MAC       MAC            `json:"mac,omitempty"`    // MAC of the pod's end
	HostMAC   MAC            `json:"hostMAC,omitempty"`
	Addresses []ipam.Address `json:"addresses,omitempty"` // in the order of the CNI result
	// Hairpin and Isolated are flags of the bridge port: see bridge.Port.
	Hairpin  bool            `json:"hairpin,omitempty"`
	Isolated bool            `json:"isolated,omitempty"`
	VLAN     vlan.Membership `json:"vlan,omitzero"` // VLANs of the bridge port
	// Routes lists the routes in the pod that last as long as the pod. It leaves out routes of a lease and of router
	// advertisements.
	Routes []route.Route `json:"routes,omitempty"`

	// Moving is set while the keeper (tombolod) changes Addresses, and stays set if the keeper is killed in between.
	// Addresses then lists both the new and the old addresses, and the kernel may have either.
	Moving bool `json:"moving,omitempty"`

	// Up is set if the pod's interface is up, which it is not with disableContainerInterface.
	Up         bool `json:"up,omitempty"`
	Masquerade bool `json:"masquerade,omitempty"` // the pod's addresses are masqueraded
	// Guard restricts the source addresses and the kinds of packets that the pod may send.
	Guard nft.Guard `json:"guard,omitzero"`
	// Egress lists the destinations that the pod may open connections to. The policy of its network must allow them
	// too. Egress is empty if only the network's policy applies.
	Egress nft.Egress `json:"egress,omitempty"`
	// DefaultRoute is the next hop of the default route of a pod on a LAN: "host" or "router". It is empty without a
	// LAN.
	DefaultRoute string `json:"defaultRoute,omitempty"`
	// NoDefaultRoute is set if the pod gets no default route through the host, from a lease or from router
	// advertisements.
	NoDefaultRoute bool `json:"noDefaultRoute,omitempty"`
	// SLAAC is set if the pod forms IPv6 addresses from router advertisements. Such addresses in Addresses end in the
	// interface identifier derived from MAC. They come and go with the advertisements.
	SLAAC bool `json:"slaac,omitempty"`

	Published []Published `json:"published,omitempty"` // host ports that lead to the pod
	// PublishFrom and Unadmitted have the meaning of the same fields of nft.Endpoint.
	PublishFrom []string `json:"publishFrom,omitempty"`
	Unadmitted  bool     `json:"unadmitted,omitempty"`
	// PortSNAT selects the connections to host ports that reach the pod with the host's address as source.
	PortSNAT nft.SNAT `json:"portSNAT,omitempty"`
	// Waiting lists other attachments of the container. When this attachment is deleted, each publishes its Withheld
	// host ports that are free. Attachments to a LAN are listed even if they have no such ports.
	Waiting   []Waiting       `json:"waiting,omitempty"`
	Bandwidth bandwidth.Shape `json:"bandwidth,omitzero"` // as the kernel enforces it
	IFB       string          `json:"ifb,omitempty"`      // the ifb link that shapes the pod's egress

	IPAMType string `json:"ipamType,omitempty"` // ipam.type of the configuration, so that DEL can release the addresses
	// DataDir is ipam.dataDir of the configuration or, for type dhcp, the directory of the lease records. For type
	// host-local, empty means <state>/ipam.
	DataDir string `json:"dataDir,omitempty"`

	// Short caches the result of Hash. Create and the functions that read records fill it in. The name of the
	// record's file contains it, but the file's content does not.
	Short string `json:"-"`
}

// Published is a port of the host, or a range of ports, that leads to the pod.
type Published struct {
	nft.Port
	// Withheld is set while another attachment of the container publishes this host port instead.
	Withheld bool `json:"withheld,omitempty"`
}

// Waiting is an entry of Attachment.Waiting. It names another attachment of the same container.
type Waiting struct {
	Network string `json:"network"`
	Hash    string `json:"hash"`
	// Addresses are the addresses of the named attachment. The list may be empty.
	Addresses []netip.Prefix `json:"addresses,omitempty"`
	// LAN is set if the named attachment is on a LAN, and so reaches the LAN's machines without passing through the
	// host.
	LAN bool `json:"lan,omitempty"`
}

// Hash returns the attachment's hash: Short if it is set, else the hash of network, container and interface.
func (a *Attachment) Hash() string {
	if a.Short != "" {
		return a.Short
	}
	return ident.Hash(a.Network, a.ContainerID, a.IfName)
}

// Check returns an error if the record is invalid. Load refuses an invalid record.
func (a *Attachment) Check() error {
	errs := []error{
		checkNetwork(a.Network),
		ident.CheckText("container ID", a.ContainerID),
		ident.CheckText("interface name", a.IfName),
	}
	if a.State != Adding && a.State != Ready {
		errs = append(errs, fmt.Errorf("its state is %q", a.State))
	}

	if slices.ContainsFunc(a.Addresses, func(address ipam.Address) bool { return !address.Prefix.IsValid() }) {
		errs = append(errs, errors.New("an address has no valid prefix"))
	}

	for _, name := range []string{a.HostIf, a.Bridge, a.NIC, a.IFB} {
		if name != "" && !ident.IsLinkName(name) {
			errs = append(errs, fmt.Errorf("%q cannot name a link", name))
		}
	}

	for field, mac := range map[string]MAC{"mac": a.MAC, "hostMAC": a.HostMAC} {
		if len(mac) != 0 && len(mac) != 6 {
			errs = append(errs, fmt.Errorf("its %q has %d bytes", field, len(mac)))
		}
	}

	if a.PortSNAT != nft.SNATNeeded && a.PortSNAT != nft.SNATAll && a.PortSNAT != nft.SNATNone {
		errs = append(errs, fmt.Errorf(`its "portSNAT" is %q`, string(a.PortSNAT)))
	}

	for _, p := range a.Published {
		errs = append(errs, WithOperation(p.Port.Check(), "it publishes port %d as %s", p.PodPort, p.Port))
	}

	return errors.Join(errs...)
}

// encodeAttachment returns the record as one line of its file. It returns an error if the record is invalid or too
// long.
func encodeAttachment(a *Attachment) ([]byte, error) {
	return EncodeChecked(&a.Version, a, file.MaxRecord/2) // the file holds up to two lines
}

// incompleteError is the error about a file without a complete line. No ADD that wrote it has returned a result.
type incompleteError struct{ error }

func (e incompleteError) Unwrap() error { return e.error }

// decodeAttachment parses the last complete line of a record's file.
func decodeAttachment(data []byte) (*Attachment, error) {
	a := new(Attachment)
	err := Decode(lastDocument(data), &a.Version, a)
	if err != nil && !bytes.ContainsRune(data, '\n') && !json.Valid(data) {
		err = incompleteError{err}
	}
	return a, err
}

// IsUnfinished reports whether an ADD has not finished the record for which Load returned a and err: its state is
// Adding, or its file has no complete line. If no process holds the record's lock, that ADD was killed.
func IsUnfinished(a *Attachment, err error) bool {
	return errors.As(err, new(incompleteError)) || err == nil && a.State == Adding
}

// Load reads an attachment's record. If there is none, the error matches os.ErrNotExist. If the record cannot be
// used, the error wraps a *RecordError. Load needs no lock, but without one the answer may be out of date at once.
func (d *Dir) Load(network, hash string) (*Attachment, error) {
	path, err := d.attachmentPath(network, hash)
	var a *Attachment
	if err == nil {
		a, err = loadAttachment(path, network, hash)
	}
	return a, WithOperation(err, "load attachment")
}

// loadAttachment reads the record at path, and checks that it belongs to the network and the hash in its path.
func loadAttachment(path, network, hash string) (*Attachment, error) {
	bad := &RecordError{Path: path, Network: network, Hash: hash}
	return ReadRecord(bad, decodeAttachment, func(a *Attachment) error {
		if a.Network != network || a.Hash() != hash {
			return fmt.Errorf("%w: it is the record of network %s, container %s, interface %s, whose file is %s/%s%s",
				ErrDamaged, a.Network, a.ContainerID, a.IfName, a.Network, a.Hash(), suffix)
		}
		a.Short = hash
		return nil
	})
}

// Written returns the modification time of an attachment's record.
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

// Update replaces an attachment's existing record as a whole, after its ADD. It needs the directory's shared lock (see
// Dir.Lock), and locks the record while it writes. If another call holds the record's lock, the error matches ErrBusy.
// If there is no record, the error matches os.ErrNotExist.
func (d *Dir) Update(a *Attachment) error {
	lock, err := d.LockAttachment(a.Network, a.Hash())
	if err != nil {
		return WithOperation(err, "update attachment")
	}
	return errors.Join(d.UpdateLocked(a), lock.Close())
}

// UpdateLocked does the work of Update for a caller that holds the record's lock. The lock belongs to the old file,
// so another caller can lock the new file at once.
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
	return WithOperation(err, "update attachment")
}

// Remove removes an attachment's record, or a directory in its place. A missing record is no error. Remove needs the
// shared lock.
func (d *Dir) Remove(network, hash string) error {
	path, err := d.attachmentPath(network, hash)
	if err == nil {
		err = d.remove(path)
	}
	if errors.Is(err, unix.EISDIR) {
		err = os.RemoveAll(path)
	}
	return WithOperation(err, "remove attachment")
}

// List reads the records of a network's attachments, sorted by hash. For each record that cannot be used, and for each
// other file, it returns a *RecordError. The error is set only if the network's name is invalid or the directory cannot
// be read. A network without a directory has no attachments.
//
// Under the shared lock, records may come and go while List reads. Only the exclusive lock prevents that.
func (d *Dir) List(network string) (found []*Attachment, bad []*RecordError, _ error) {
	err := checkNetwork(network)
	if err == nil {
		found, bad, err = list(d.attachmentsPath()+"/"+network, ident.IsHash,
			func(hash string) (*Attachment, error) { return d.Load(network, hash) })
	}
	return found, bad, WithOperation(err, "list attachments")
}

// MAC is an Ethernet address in a record. Its text form is "02:00:00:00:00:01".
type MAC = dhcpc.Hex

// A Pending is the record of an attachment between Create and Commit. It holds the record's lock. It keeps the file
// open, so that Commit writes to the file of Create, and not to a later file of the same name.
type Pending struct {
	AttachmentLock
	path string
	size int64 // bytes that Create wrote
	lost bool  // Commit found the record removed
}

// Create writes the record of a new attachment in state Adding, and locks it. It sets a.State, a.Short and, if it is
// zero, a.Created.
//
// If there is a record already, even a damaged one, the error matches os.ErrExist. The record's ADD may have succeeded,
// be in progress, or have been killed: see State and AttachmentLock. Create needs the shared lock. The caller must call
// Commit, Close or Abandon on the result.
func (d *Dir) Create(a *Attachment) (_ *Pending, err error) {
	defer func() { err = WithOperation(err, "create attachment") }()
	a.State = Adding
	if a.Created.IsZero() {
		a.Created = d.sources.now().UTC()
	}

	line, err := encodeAttachment(a)
	if err != nil {
		return nil, err
	}

	a.Short = a.Hash()
	path, err := d.attachmentPath(a.Network, a.Short)
	if err != nil {
		return nil, err
	}

	fd, err := d.createLocked(path, line)
	if err != nil {
		return nil, err
	}

	lock := AttachmentLock{fd: fd, order: lockorder.Tried(lockorder.Attachment)}
	return &Pending{AttachmentLock: lock, path: path, size: int64(len(line))}, nil
}

// createLocked creates a record's file. The file gets its name only when it is complete and locked. An empty or
// unlocked file would look like the remains of a killed ADD.
func (d *Dir) createLocked(path string, line []byte) (int, error) {
	fd, err := makeUnnamed(filepath.Dir(path))
	if err != nil {
		return -1, err
	}

	err = errors.Join(unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB), file.WriteAll(fd, path, line))
	if err == nil {
		err = unix.Linkat(unix.AT_FDCWD, "/proc/self/fd/"+strconv.Itoa(fd), unix.AT_FDCWD, path, unix.AT_SYMLINK_FOLLOW)
	}

	if err != nil {
		return -1, errors.Join(&os.PathError{Op: "create", Path: path, Err: err}, unix.Close(fd))
	}
	return fd, nil
}

// makeUnnamed opens a file without a name in dir, and creates dir if it is missing.
func makeUnnamed(dir string) (int, error) {
	fd, err := openUnnamed(dir)
	if !errors.Is(err, os.ErrNotExist) {
		return fd, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return -1, err
	}
	return openUnnamed(dir)
}

// openUnnamed opens a file without a name in dir.
func openUnnamed(dir string) (int, error) {
	return file.OpenAny(dir, unix.O_TMPFILE|unix.O_WRONLY|unix.O_APPEND)
}

// Gone reports whether a DEL or a GC has removed the record between Create and Commit. In that case the ADD must end.
func (p *Pending) Gone() (bool, error) {
	if p.fd < 0 {
		return p.lost, nil
	}
	var st unix.Stat_t
	err := unix.Fstat(p.fd, &st)
	return err == nil && st.Nlink == 0, file.PathError("stat", p.path, err)
}

// Abandon removes the record, even after Commit, and closes p. As long as p is open, Abandon leaves a later record of
// the same name alone. It needs the shared lock.
func (p *Pending) Abandon() error {
	gone, err := p.Gone()
	if err == nil && !gone && !p.lost {
		err = file.Remove(p.path)
	}
	return WithOperation(errors.Join(err, p.Close()), "abandon attachment")
}

// Commit sets the record's state to Ready, writes all of a, and closes p. It appends a line, so that a crash in the
// middle leaves the record Adding and no temporary file. If the record was removed since Create, the error matches
// os.ErrNotExist, and the record is not created again. If the record did not become Ready, a.State is Adding.
func (p *Pending) Commit(a *Attachment) (err error) {
	defer func() {
		if err != nil {
			a.State = Adding
		}
		err = WithOperation(errors.Join(err, p.Close()), "commit attachment")
	}()
	if p.fd < 0 {
		return &os.PathError{Op: "write", Path: p.path, Err: os.ErrClosed}
	}

	a.State = Ready
	line, err := encodeAttachment(a)
	if err != nil {
		return err
	}

	if err := file.WriteAll(p.fd, p.path, line); err != nil {
		// Cut off the part of the line that was written before the file system was full. It would spoil a later line.
		return errors.Join(err, unix.Ftruncate(p.fd, p.size))
	}

	gone, err := p.Gone()
	if err == nil && gone {
		p.lost = true
		err = &os.PathError{Op: "write", Path: p.path, Err: os.ErrNotExist}
	}

	return err
}

// lastDocument returns the last complete line of a record's file, or all of data if it has no newline. Text after the
// last newline counts too if it is valid JSON, since an editor may omit the newline. A line that was written only in
// part is never valid, since no proper prefix of a JSON object is JSON.
func lastDocument(data []byte) []byte {
	end := bytes.LastIndexByte(data, '\n')
	if tail := data[end+1:]; end < 0 || json.Valid(tail) {
		return tail
	}
	start := bytes.LastIndexByte(data[:end], '\n')
	return data[start+1 : end]
}

// ErrBusy means that another call holds the lock of an attachment's record.
var ErrBusy = errors.New("another call is at work on it")

// An AttachmentLock is the flock(2) on the file of an attachment's record, held until Close or until the process ends.
// An ADD holds it from [Dir.Create] until it is done, and a call that undoes an attachment holds it while it works. So
// if a record says Adding and can be locked, its ADD was killed.
//
// An AttachmentLock comes first in the order of locks (see package lockorder). A caller that holds another lock tries
// to take it, and never waits for it.
type AttachmentLock struct {
	fd    int
	order *lockorder.Acquisition
}

// LockAttachment locks the record of an attachment. If there is no record, the error matches os.ErrNotExist. If another
// call has the lock, the error matches ErrBusy.
func (d *Dir) LockAttachment(network, hash string) (*AttachmentLock, error) {
	fd := -1
	path, err := d.attachmentPath(network, hash)
	if err == nil {
		fd, err = file.TryLock(path, unix.O_RDONLY)
	}

	if err == nil && fd < 0 {
		err = file.PathError("lock", path, ErrBusy)
	}

	if err != nil {
		return nil, fmt.Errorf("lock attachment: %w", err)
	}
	return &AttachmentLock{fd: fd, order: lockorder.Tried(lockorder.Attachment)}, nil
}

// AtWork returns a function that waits for the call that holds the lock of an attachment's record. The function
// returns when that call releases the lock or ctx ends, even if the record is removed in between. Without a record it
// returns at once. Call the function exactly once, and while holding no lock.
func (d *Dir) AtWork(network, hash string) (wait func(context.Context), err error) {
	path, err := d.attachmentPath(network, hash)
	if err != nil {
		return nil, err
	}

	fd, err := file.Open(path, unix.O_RDONLY)
	if errors.Is(err, os.ErrNotExist) {
		return func(context.Context) {}, nil
	}

	if err != nil {
		return nil, err
	}

	return func(ctx context.Context) {
		defer unix.Close(fd)

		// Ignore the error: the wait is over, because ctx ended or flock(2) failed.
		_ = file.Await(ctx, path, func() (bool, error) { return file.TryFlock(fd, unix.LOCK_SH) })
	}, nil
}

// Close releases the lock. A second Close does nothing.
func (l *AttachmentLock) Close() error {
	if l == nil || l.fd < 0 {
		return nil
	}
	fd := l.fd
	l.fd = -1
	l.order.Release()
	return file.Unlock(fd)
}
