package keeper

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/route"
)

// refuse gives what is asked about each lease that a server grants. It outlives the visit. The host may have what no
// pod has, and keeps what it had before.
func (k *Keeper) refuse(r *lease.Record) func(l, held *dhcpc.Lease) error {
	network, hash, bridge, at, had, pod := r.Network, r.Hash(), r.Bridge, r.At(), r.Lease.Address.Addr(), r.Host == nil
	return func(l, held *dhcpc.Lease) error {
		own := l.Address.Addr()
		if held != nil {
			had = held.Address.Addr()
		}
		if pod {
			if err := lease.Impossible(l); err != nil {
				return err
			}
			if err := k.node.taken(bridge, own, had); err != nil {
				return err
			}
		}
		if k.state == nil || own == had && held != nil {
			return nil
		}
		return k.anothersAddress(network, hash, at, own)
	}
}

// anothersAddress says which pod has an address, of those that are on record: what others
// have left is the pod's to take over.
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
		return held // somebody's all the same
	}
	a, err := k.state.Load(held.Network, string(held.Owner))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case !slices.ContainsFunc(prefixes(a.Addresses), func(p netip.Prefix) bool { return p.Addr() == own }):
		return nil
	}
	return fmt.Errorf("a pod of this node has it: container %s", a.ContainerID)
}

// taken says why no pod may have an address, by what the host has.
func (k kernel) taken(bridge string, a, had netip.Addr) error {
	return k.askHost(bridge, func(host *route.Conn, index int) error { return lease.Taken(host, index, a, had) })
}

func (k kernel) askHost(bridge string, ask func(host *route.Conn, index int) error) error {
	conn, err := nl.Dial(unix.NETLINK_ROUTE, &nl.Config{NetNS: k.host})
	if err != nil {
		return err
	}
	index, err := linkIndex(conn, bridge)
	if err == nil {
		err = ask(route.On(conn), index)
	}
	return errors.Join(err, conn.Close())
}
