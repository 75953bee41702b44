package lease

import (
	"errors"

	"github.com/tombolo-cni/tombolo/internal/ident"
)

// hostName is what the record of a lease of the host's own has for a network and for a
// container. No network and no container can have a bracket in its name.
const hostName = "(host)"

// Host is what a record has if its lease is the host's own: the one that the NIC had when
// it became a port of the bridge. A client on a port hears no answer, so the keeper renews
// the lease on the bridge, from its own network namespace. It is never released.
type Host struct {
	// NIC is the port. The link that has the address is Record.Bridge and, where the
	// takeover leaves addresses behind, the NIC.
	NIC string `json:"nic"`
	// Permanent says that the kernel was given no lifetime of the address, and is to be
	// given none: some clients do it so.
	Permanent bool `json:"permanent,omitempty"`
}

// HostHash is the hash of the record of the lease that a NIC of the host had.
func HostHash(nic string) string { return ident.Hash(hostName, hostName, nic) }

// check refuses what the keeper could not work with.
func (h *Host) check(r *Record) error {
	switch ours := r.Network == hostName; {
	case h == nil && !ours:
		return nil
	case h == nil || !ours || r.ContainerID != hostName || r.IfName != h.NIC || r.Bridge == "" || r.State != Bound && r.State != Expired:
		return errors.New("it is of the host's own lease, and not in all that it says")
	}
	return nil
}

// Hosts reads the records of the host's own leases: of all the others, no more than the
// bytes. Files that cannot be read are left out.
func (d *Dir) Hosts() ([]*Record, error) {
	return d.having(hostName, func(r *Record) bool { return r.Host != nil })
}
