package session

import (
	"context"
	"errors"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
)

// Unreserved calls a function for each address that host-local gave to an attachment whose Add is
// done, and that is not reserved for it: with an allocator whose Add reserves that address again,
// and with what Check said. The error matches fs.ErrNotExist where it is reserved for nobody.
func (s *Session) Unreserved(ctx context.Context, nw *state.Network, a *state.Attachment, lost func(ipam.Allocator, ipam.Owner, error) error) error {
	if nw.Pools == "" || a.IPAMType != recorded.HostLocal || a.State != state.Ready {
		return nil
	}
	owner := ipam.Owner{ContainerID: a.ContainerID, IfName: a.IfName}
	for _, address := range a.Addresses {
		if recorded.Autoconfigured(a, address.Prefix) {
			continue // of the LAN's router
		}
		one, err := recorded.Reservation(s.Dir.Path(), a, address)
		if err != nil {
			return err
		}
		allocator := one.Bind(s.IPAMNode(a.Network, owner, a.Hash()))
		err = allocator.Check(ctx, owner, []ipam.Address{address})
		if errors.Is(err, ipam.ErrNotReserved) {
			err = lost(allocator, owner, err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
