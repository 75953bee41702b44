package transport

import (
	"net"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/dhcp6"
)

// DialWitness gives a transport that sends by the one that dial opens, and hears at the other end of the client's
// link what leaves there towards the client: at the host's end of a veth pair, answers that came to a pod by the
// bridge, and nothing that the pod says. What is behind the client's own interface is the pod's to choose: it may
// rename it and put another in its place, redirect packets, and answer itself. None of that is heard.
//
// It hears DHCP answers, and with Config.ARP what Ethernet's ARP says, that are sent to the client's MAC address or to
// all, without a VLAN tag; also what others on the same bridge say. Config.NetNS and Link are those of the other end,
// and Config.MAC, the client's own, is needed. Its errors are those of DialRaw and of dial.
func DialWitness(cfg *Config, dial func() (dhcpc.Transport, error)) (dhcpc.Transport, error) {
	return witness(cfg, func(c *Config) program { return frames(c.MAC, c.ARP) }, readFrame, dial)
}

// DialWitness6 is DialWitness for DHCPv6: it hears messages to dhcp6.ClientPort.
func DialWitness6(cfg *Config, dial func() (dhcp6.Transport, error)) (dhcp6.Transport, error) {
	read := func(frame []byte, _ net.Addr) ([]byte, error) { return decode6(frame) }
	return witness(cfg, func(*Config) program { return frames6() }, read, dial)
}
