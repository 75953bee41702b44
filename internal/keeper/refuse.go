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
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/nft"
)

// refuse gives what is asked about each lease that a server grants. It outlives the visit.
func (k *Keeper) refuse(r *lease.Record) func(l, held *dhcpc.Lease) error {
	had, free := r.Lease.Address.Addr(), k.free(r)
	return func(l, held *dhcpc.Lease) error {
		if err := lease.Impossible(l); err != nil {
			return err
		}
		if held != nil {
			had = held.Address.Addr()
		}
		return free(l.Address.Addr(), had, held != nil)
	}
}

// refuse6 is refuse for DHCPv6.
func (k *Keeper) refuse6(r *lease.Record) func(l, held *dhcp6.Lease) error {
	free := k.free(r)
	return func(l, held *dhcp6.Lease) error {
		if held == nil {
			return free(l.Address, netip.Addr{}, false)
		}
		return free(l.Address, held.Address, true)
	}
}

// free says why an address cannot be the pod's, which had another, or holds one.
func (k *Keeper) free(r *lease.Record) func(own, had netip.Addr, holds bool) error {
	network, hash, bridge, at := r.Network, r.Hash(), r.Bridge, r.At()
	return func(own, had netip.Addr, holds bool) error {
		if err := k.node.taken(bridge, own, had); err != nil {
			return err
		}
		if k.state == nil || own == had && holds {
			return nil
		}
		return k.anothersAddress(network, hash, at, own)
	}
}

// anothersAddress says which pod on record has an address. The pod may take over an address from one that is not on
// record.
func (k *Keeper) anothersAddress(network, hash, bridge string, own netip.Addr) error {
	fw, err := nft.Dial(&nft.Config{NetNS: k.host})
	if err != nil {
		return err
	}
	held, err := fw.AddressOwner(context.Background(), bridge, own)
	err = errors.Join(err, fw.Close())
	switch {
	case err == nil && (held == nil || string(held.Owner) == hash && held.Network == network):
		return nil
	case err != nil:
		return err
	case held.Owner == "":
		return held // another program's
	}
	a, err := k.state.Load(held.Network, string(held.Owner))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case !slices.ContainsFunc(a.Addresses, func(a ipam.Address) bool { return a.Prefix.Addr() == own }):
		return nil
	}
	return fmt.Errorf("a pod of this node has it: container %s", a.ContainerID)
}
