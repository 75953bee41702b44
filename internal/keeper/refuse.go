package keeper

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/dhcp6"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/nft"
)

// refuse returns the function for dhcpc.Config.Refuse. The returned function returns an error if the pod cannot use the
// address of an offered or granted lease. A dhcpc.Machine keeps the function for later visits to the lease. So the
// function does not use r, which may be outdated by then.
func (k *Keeper) refuse(r *lease.Record) func(l, held *dhcpc.Lease) error {
	had, free := r.Lease.Address.Addr(), k.addressCheck(r)
	return func(l, held *dhcpc.Lease) error {
		if err := lease.CheckUsable(l); err != nil {
			return err
		}
		if held != nil {
			had = held.Address.Addr()
		}
		return free(l.Address.Addr(), had, held != nil)
	}
}

// refuse6 returns the function for dhcp6.Config.Refuse. The returned function returns an error if the pod cannot have
// the address of an offered or granted DHCPv6 lease (see addressCheck).
func (k *Keeper) refuse6(r *lease.Record) func(l, held *dhcp6.Lease6) error {
	free := k.addressCheck(r)
	return func(l, held *dhcp6.Lease6) error {
		if held == nil {
			return free(l.Address, netip.Addr{}, false)
		}
		return free(l.Address, held.Address, true)
	}
}

// addressCheck returns a function that returns an error if a pod cannot have the address own. had is the pod's previous
// address, and holds means that the pod still has it. The pod cannot have an address of the host, of another pod, or of
// a gateway of the host (see lease.CheckConflict).
func (k *Keeper) addressCheck(r *lease.Record) func(own, had netip.Addr, holds bool) error {
	network, hash, at := r.Network, r.Hash(), r.At()
	return func(own, had netip.Addr, holds bool) error {
		switch err := k.node.checkConflict(at, own, had); {
		case own == had && holds && !errors.As(err, new(lease.Conflict)):
			return nil // keep the pod's address if the keeper could not look, for example without memory
		case own == had && holds, err != nil, k.State == nil:
			return err
		}
		return k.refuseOwned(network, hash, at, own)
	}
}

// refuseOwned returns an error if the firewall's sets assign the address own to another pod, or if another program
// added it there. It returns nil if the other pod has no record, or if that pod's record does not contain the address.
func (k *Keeper) refuseOwned(network, hash, bridge string, own netip.Addr) error {
	fw, err := nft.Dial(&nft.Config{NetNS: k.host})
	if err != nil {
		return err
	}

	held, err := fw.AddressOwner(context.Background(), bridge, own)
	err = errors.Join(err, fw.Close())
	switch {
	case err != nil, held == nil, string(held.Owner) == hash && held.Network == network:
		return err
	case held.Owner == "":
		return held // another program added the element
	}

	a, err := k.State.Load(held.Network, string(held.Owner))
	switch {
	case err != nil:
		return state.Ignore(err, fs.ErrNotExist)
	case !slices.ContainsFunc(a.Addresses, func(a ipam.Address) bool { return a.Prefix.Addr() == own }):
		return nil
	}

	return fmt.Errorf("a pod of this node has it: container %s", a.ContainerID)
}
