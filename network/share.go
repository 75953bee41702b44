package network

import (
	"context"

	"github.com/tombolo-cni/tombolo/bridge/share"
	"github.com/tombolo-cni/tombolo/nft"
)

// findShare looks up what connects the network's bridge to the LAN without being its port, for the rules at the NIC. The
// NIC of a network with an uplink is either shared or a port of the bridge.
func (n *site) findShare(ctx context.Context) error {
	n.share = nil
	if n.rec.Uplink == "" {
		return nil
	}
	nic, err := n.s.link(ctx, n.rec.Uplink)
	if err != nil || nic.Index == 0 || nic.Master != 0 && nic.Master == n.bridge.Index {
		return err
	}
	outer, port := share.Pair(n.rec.Bridge)
	end, err := n.s.link(ctx, outer)
	if err == nil && end.Index != 0 {
		n.at, n.share = nic, &nft.Share{NIC: nic.Name, MAC: nic.MAC, Outer: end.Index, Port: port}
	}
	return err
}

// sharedNIC returns the name of the NIC that the bridge shares, empty if there is none.
func (n *site) sharedNIC() string {
	if n.share == nil {
		return ""
	}
	return n.share.NIC
}
