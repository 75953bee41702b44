package nft

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// Dedup is a subnet of a promiscuous bridge whose pods would get packets twice.
//
// What pods of such a bridge send to a service's address, which is changed to that of
// another pod of the bridge, takes two ways where the bridge calls iptables
// (Network.NFCall): the bridge forwards it by itself, and the host, which sees a copy,
// routes it back to the bridge. The second copy is dropped where it leaves the bridge: it
// comes from the bridge's own MAC, with a pod's address. So does everything that the
// host alone forwards between pods of the subnet: where the bridge does not call
// iptables or is not promiscuous, and where the service's address is the host's own,
// as IPVS has it, there is no first copy, and dedup drops all. Pods with hairpin
// ports need no promiscuous bridge.
type Dedup struct {
	// BridgeMAC is the bridge's.
	BridgeMAC net.HardwareAddr
	// Gateway is the host's address on the bridge, from which it may send to pods. For
	// more than one of them, the rest is given again.
	Gateway netip.Addr
	// Subnet has the pods' addresses, of the same family; its host bits do not matter.
	Subnet netip.Prefix
}

func (d *Dedup) check() error {
	switch {
	case len(d.BridgeMAC) != ruleset.EtherLen:
		return invalid("dedup: %q cannot be the MAC of a bridge", d.BridgeMAC)
	case !d.Subnet.IsValid() || d.Subnet.Addr().Is4In6() || d.Subnet.Bits() == 0:
		return invalid("dedup: subnet %v", d.Subnet)
	case d.Gateway.Is4() != d.Subnet.Addr().Is4() || !d.Gateway.IsValid() || d.Gateway.Zone() != "" || d.Gateway.Is4In6():
		return invalid("dedup: gateway %v of subnet %v", d.Gateway, d.Subnet)
	}
	return nil
}

// checkDedup says what is wrong with the network's.
func (n *Network) checkDedup() error {
	for i := range n.Dedup {
		if err := n.Dedup[i].check(); err != nil {
			return fmt.Errorf("network %s: %w", n.Name, err)
		}
	}
	return nil
}
