package ident

import (
	"encoding/binary"
	"math/rand/v2"
	"net"
	"net/netip"
)

// RandomMAC gives a unicast MAC of the locally administered kind. It is to be another than
// all others, and no secret, so the runtime's own generator does: the kernel's takes 0.03 ms
// of a process that asks it once.
func RandomMAC() net.HardwareAddr {
	mac := binary.NativeEndian.AppendUint64(make(net.HardwareAddr, 0, 8), rand.Uint64())[:6]
	mac[0] = mac[0]&^1 | 2
	return mac
}

// MACOf derives a MAC from the first IPv4 address: one that goes to another pod soon afterwards is
// then no stale entry in anybody's neighbour table, and nobody has to be told of it. Without such an
// address it is nil.
func MACOf(addresses []netip.Addr) net.HardwareAddr {
	for _, a := range addresses {
		if a.Is4() {
			return append(net.HardwareAddr{0x0a, 0x58}, a.AsSlice()...)
		}
	}
	return nil
}
