package network

import (
	"context"
	"errors"
	"io/fs"
	"net"

	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/tuned"
)

// Tuned tells of a MAC (nil: the same) and an MTU in bytes (0: the same) that another program
// gives to a pod's interface: the guard, the port and the record follow. A MAC that a lease or a LAN
// knows the pod by is ErrInvalid, and an attachment that is not on record ErrNotAttached. It needs
// CAP_NET_ADMIN.
func (n *Node) Tuned(ctx context.Context, key Key, mac net.HardwareAddr, mtu int) error {
	if err := n.usableFor(ctx, key); err != nil {
		return err
	}
	if len(mac) != 0 && len(mac) != 6 || mtu < 0 {
		return fail.Errorf(ErrInvalid, "MAC %s and MTU %d cannot be an interface's", mac, mtu)
	}
	hash := key.hash()
	if _, err := n.dir.Load(key.Network, hash); errors.Is(err, fs.ErrNotExist) {
		return fail.Errorf(ErrNotAttached, "container %s has no attachment %s to network %q on record", key.ContainerID, key.IfName, key.Network)
	}
	s, err := n.open(n.mark)
	if err != nil {
		return err
	}
	defer s.Close()
	return tuned.Attachment(ctx, s, key.Network, hash, mac, mtu)
}
