package bridge

import "github.com/tombolo-cni/tombolo/internal/ident"

// HostName derives the name of a port from what it is for: "veth" and 11
// hexadecimal digits, which fills the 15 bytes that a name may have. Agents and
// rules on a node match "veth*". The same arguments always give the same name, so
// that a caller finds the port that it has to take down without having kept anything.
func HostName(network, containerID, ifname string) string {
	return "veth" + ident.Hash(network, containerID, ifname)
}
