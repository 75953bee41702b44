package ipam

import (
	"context"
	"net/netip"
	"time"

	"github.com/tombolo-cni/tombolo/route"
)

// An Allocator gives addresses to the attachments of one network. [*HostLocal] is
// one; package network takes any.
type Allocator interface {
	// Bind returns the allocator as it is on a node: package network tells each what it
	// knows, before it asks for anything. The one it is called on stays as it was.
	Bind(node Node) Allocator

	// Slow says that calls leave this node's memory and disk, or may wait for another
	// program. Package network holds no lock of the node meanwhile.
	Slow() bool

	// Add reserves addresses for an attachment, IPv4 first. If it fails, it has
	// released everything.
	Add(ctx context.Context, owner Owner) (*Allocation, error)

	// Del releases the attachment's addresses; that there are none is success. hint
	// names them, from the attachment's record, and spares a search through all
	// reservations; without any, Del searches.
	Del(ctx context.Context, owner Owner, hint []netip.Addr) error

	// Check fails with ErrNotReserved where an address that the attachment has is not,
	// or no longer, reserved for it.
	Check(ctx context.Context, owner Owner, held []Address) error

	// Collect releases what is reserved for attachments that are not valid. An empty
	// list releases everything but what Node.InUse says is on record.
	Collect(ctx context.Context, valid []Owner) error

	// Status fails where Add could not succeed for any attachment. It changes nothing.
	Status(ctx context.Context) error
}

// An Allocation is what an Allocator gives to one attachment.
type Allocation struct {
	Addresses []Address
	// Routes are for the attachment, besides those of its network. HostLocal
	// gives none.
	Routes []route.Route
}

// An Address is one address, with the prefix length of its subnet.
type Address struct {
	Prefix  netip.Prefix `json:"prefix"`
	Gateway netip.Addr   `json:"gateway,omitzero"` // invalid for none
}

// String is the prefix, and the gateway where there is one: "10.1.0.2/24 via 10.1.0.1".
func (a Address) String() string {
	if !a.Gateway.IsValid() {
		return a.Prefix.String()
	}
	return a.Prefix.String() + " via " + a.Gateway.String()
}

// ipv4First sorts the addresses, since runtimes take the first for the pod's. The order is
// otherwise kept.
func ipv4First(list []Address) []Address {
	sorted := make([]Address, 0, len(list))
	for _, is4 := range []bool{true, false} {
		for _, a := range list {
			if a.Prefix.Addr().Is4() == is4 {
				sorted = append(sorted, a)
			}
		}
	}
	return sorted
}

// An Owner is an attachment within its network.
type Owner struct {
	ContainerID string // a letter or digit, then these and '_', '.', '-'
	IfName      string // the name of the interface in the pod
}

// A Live address is one that the kernel holds for an attachment right now.
type Live struct {
	Hash string // Node.Hash of the attachment, from the mark on its link
	Addr netip.Addr
}

// An Epoch is one life of the node: from a boot to the next, or, where the node
// is itself a container, from one start of that container to the next. No pod
// outlives it, but a data directory on disk does.
//
// The directory's marker file holds the Token of its last use. At the first use
// in another epoch, reservations older than Started are dropped, unless the
// kernel shows the address alive. Where there is no marker the directory is
// new, or the reference plugin's, whose pods may be running: nothing is
// dropped. In both cases live addresses without a reservation get one, so that
// a directory deleted while pods run leads to no address being given twice.
type Epoch struct {
	Token   string    // of any form; empty switches all of this off
	Started time.Time // compared with the modification times of reservations; zero is not known: nothing is dropped
}

// A Node describes to an Allocator the node that it gives addresses on. With the zero Node, addresses are reserved
// until they are released, also after a reboot.
type Node struct {
	Epoch Epoch
	// Live returns the addresses that the kernel holds for this network right
	// now; others do not matter as long as they are not in its ranges. It may
	// be expensive: Add calls it once in an epoch, while the directory is
	// locked. If nil, nothing is alive.
	Live func(context.Context) ([]Live, error)
	// Hash is the hash of (network, container, interface) that marks what the attachment owns in the kernel:
	// hexadecimal digits. If nil, reservations that name their owner by its hash have no owner.
	Hash func(Owner) string
	// InUse says whether an attachment, by its Hash, is on record: Collect leaves what it
	// has reserved, listed or not. If nil, Collect goes by its list alone.
	InUse func(hash string) bool
	// Warn gets what an operator should know although the call goes on; nil
	// drops it.
	Warn func(string)
}
