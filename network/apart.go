package network

import (
	"context"
	"errors"
	"io/fs"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/network/internal/dhcplease"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
)

// Lease leases an address by DHCP for an interface of a pod's that another program made: of Pod it
// needs ContainerID, IfName, Path and Lease. It sets the interface up, and no address: that is for
// its caller. The keeper renews the lease, and changes the interface where another address, or
// other routes, are leased. A lease that the interface has is given again. It needs CAP_NET_ADMIN,
// CAP_NET_RAW, and CAP_SYS_ADMIN to enter the pod.
func (n *Node) Lease(ctx context.Context, network string, pod *Pod) (*dhcpc.Lease, error) {
	if err := n.usable(ctx); err != nil {
		return nil, err
	}
	if pod == nil || pod.Lease == nil {
		return nil, fail.Errorf(ErrInvalid, "lease an address: no pod, or one without Lease")
	}
	if err := (Key{network, pod.ContainerID, pod.IfName}).check(); err != nil {
		return nil, err
	}
	dir, err := n.leases(pod.Lease)
	if err != nil {
		return nil, err
	}
	rec := &lease.Record{
		Network: network, ContainerID: pod.ContainerID, IfName: pod.IfName, Pod: pod.Name, NetNS: pod.Path, Client: lease.ClientOf(&pod.Lease.Client),
		Policy: lease.Policy{Routes: pod.Lease.Routes, Priority: pod.Lease.Priority, NoMTU: true},
	}
	rec.Client.Sticky = pod.Lease.Sticky
	return (&dhcplease.Apart{Dir: dir, Record: rec, Timeout: pod.Lease.Client.Timeout, Warn: func(text string) { n.log.Warn(text) }}).Lease(ctx)
}

// Unlease gives back what Lease got, as long as the server can be reached, and forgets it. What is
// gone already is success.
func (n *Node) Unlease(ctx context.Context, key Key) error {
	if err := n.usableFor(ctx, key); err != nil {
		return err
	}
	dir, err := n.leases(nil)
	if err != nil {
		return err
	}
	rec, err := dir.Load(key.hash())
	if errors.Is(err, fs.ErrNotExist) || err == nil && !rec.Apart {
		return nil
	}
	links, err := n.dialBridge()
	if err != nil {
		return err
	}
	defer links.Close()
	return dhcplease.Release(ctx, links, dir.Path(), key.hash(), func(text string) { n.log.Warn(text) })
}
