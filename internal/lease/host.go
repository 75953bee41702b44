package lease

import (
	"errors"
	"fmt"

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
	if h == nil {
		if r.Network == hostName {
			return errors.New("it is of the host's own lease, and does not say of which NIC")
		}
		return nil
	}
	var errs []error
	if r.Network != hostName || r.ContainerID != hostName || r.IfName != h.NIC {
		errs = append(errs, fmt.Errorf("it is of the host's own lease on %q, and of network %q, container %q, interface %q", h.NIC, r.Network, r.ContainerID, r.IfName))
	}
	if r.State != Bound && r.State != Expired {
		errs = append(errs, fmt.Errorf("it is of the host's own lease and its state is %q", r.State))
	}
	if r.Bridge == "" {
		errs = append(errs, errors.New("it is of the host's own lease and has no bridge"))
	}
	return errors.Join(errs...)
}

// Hosts reads the records of the host's own leases: of all the others, no more than the
// bytes. Files that cannot be read are left out.
func (d *Dir) Hosts() ([]*Record, error) {
	hashes, err := d.Hashes()
	if err != nil {
		return nil, err
	}
	var found []*Record
	for _, hash := range hashes {
		if r, err := d.having(hash, []byte(hostName)); err == nil && r != nil && r.Host != nil {
			found = append(found, r)
		}
	}
	return found, nil
}
