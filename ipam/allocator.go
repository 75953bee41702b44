package ipam

import (
	"context"
	"net/netip"
	"time"

	"github.com/tombolo-cni/tombolo/route"
)

// An Allocator assigns addresses to the attachments of one network. [*HostLocal] is an Allocator. Package network
// accepts any implementation.
type Allocator interface {
	// Bind returns a copy of the allocator that uses the facts in node. It does not change its receiver. Package
	// network calls Bind before all other methods except Slow.
	Bind(node Node) Allocator

	// Slow reports whether calls may take long, because they need more than this node's memory and disk, or wait for
	// another program. During such a call package network holds no lock of the node.
	Slow() bool

	// Add reserves addresses for an attachment. If it fails, nothing stays reserved.
	Add(ctx context.Context, owner Owner) (*Allocation, error)

	// Del releases the attachment's addresses. It is no error if none are reserved. hint lists the addresses from the
	// attachment's record, which saves a search through all reservations. Without a hint, Del searches.
	Del(ctx context.Context, owner Owner, hint []netip.Addr) error

	// Check returns an error that matches ErrNotReserved if one of the attachment's addresses in held is not reserved
	// for it.
	Check(ctx context.Context, owner Owner, held []Address) error

	// Collect releases all reservations of attachments that are not in valid. It keeps the reservations of
	// attachments for which Node.InUse reports true, even if valid is empty.
	Collect(ctx context.Context, valid []Owner) error

	// Status returns an error if Add cannot succeed for any attachment. It changes nothing.
	Status(ctx context.Context) error
}

// An Allocation holds the addresses and routes that an Allocator assigned to one attachment.
type Allocation struct {
	Addresses []Address
	// Routes are the attachment's routes besides those of its network. HostLocal returns none.
	Routes []route.Route
}

// An Address is one address with the prefix length of its subnet.
type Address struct {
	Prefix  netip.Prefix `json:"prefix"`
	Gateway netip.Addr   `json:"gateway,omitzero"` // not valid if there is none
}

// String returns the prefix and, if there is one, the gateway: "10.1.0.2/24 via 10.1.0.1".
func (a Address) String() string {
	if !a.Gateway.IsValid() {
		return a.Prefix.String()
	}
	return a.Prefix.String() + " via " + a.Gateway.String()
}

// An Owner identifies an attachment within its network.
type Owner struct {
	ContainerID string // a letter or digit, then letters, digits, '_', '.' and '-'
	IfName      string // the name of the interface in the pod
}

// A Live is an address that an attachment now has in the kernel.
type Live struct {
	Hash string // the attachment's hash (see Node.Hash), as its link in the kernel has it
	Addr netip.Addr
}

// An Epoch is one life of the node, from one boot to the next. If the node is itself a container, it is one life of
// that container. No pod outlives an epoch, but a directory of reservations on disk does.
//
// A marker file in this directory has the Token of the last epoch that used the directory. The first Add in another
// epoch drops reservations older than Started. It keeps those whose owner still has the address in the kernel, or is on
// record (Node.InUse). Without a marker, the directory is new, or belongs to the reference plugin, whose pods may be
// running. Then no reservation is dropped. With or without a marker, live addresses without a reservation get one. So
// no address is assigned twice after somebody deletes the directory while pods run.
type Epoch struct {
	Token string // any text; empty disables the handling of epochs
	// Started is compared with the modification times of reservations. The zero time means unknown, and nothing is
	// dropped.
	Started time.Time
}

// A Node describes the node on which an Allocator works. With the zero Node, addresses stay reserved until they are
// released, even after a reboot.
type Node struct {
	Epoch Epoch
	// Live returns the addresses that the kernel now has for pods of this network. Addresses outside of the allocator's
	// ranges do not matter. Live may be expensive. Add calls it only when it first uses the directory in an epoch,
	// while it holds the directory's lock. If nil, no address counts as live.
	Live func(context.Context) ([]Live, error)
	// Hash returns the hash of network, container and interface that marks the attachment's objects in the kernel, as
	// hexadecimal digits. If nil, a reservation whose file contains only a hash matches no owner.
	Hash func(Owner) string
	// InUse reports whether the attachment with this Hash is on record. Collect keeps the reservations of such an
	// attachment, even if its list lacks the attachment. So does the first Add in an epoch. If nil, Collect uses only
	// its list.
	InUse func(hash string) bool
	// Warn receives messages for the operator about problems that do not stop the call. If nil, the messages are
	// dropped.
	Warn func(string)
}
