package recorded

import (
	"crypto/sha256"
	"net"
)

// BridgeMAC is the MAC of a bridge that is made, the same whenever that happens in
// one life of the node: pods would send to the gateway's old one for half a minute.
func BridgeMAC(epoch, name string) net.HardwareAddr {
	sum := sha256.Sum256([]byte(epoch + " " + name))
	sum[0] = sum[0]&^1 | 2 // unicast, locally administered
	return sum[:6]
}
