package ident

import (
	"encoding/binary"
	"math/rand/v2"
	"net"
)

// RandomMAC gives a unicast MAC of the locally administered kind. It is to be another than
// all others, and no secret, so the runtime's own generator does: the kernel's takes 0.03 ms
// of a process that asks it once.
func RandomMAC() net.HardwareAddr {
	mac := binary.NativeEndian.AppendUint64(make(net.HardwareAddr, 0, 8), rand.Uint64())[:6]
	mac[0] = mac[0]&^1 | 2
	return mac
}
