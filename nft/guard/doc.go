// Package guard says what a port of a bridge may say: it holds the pod behind it to its own
// MAC and addresses, and keeps it from passing for a server or a router.
//
//	port := guard.Port{Name: "veth0123", MAC: mac, Addrs: addrs}
//	err := port.Check()
//	for set, key := range port.Elements() { … } // what to add for it, to
//	guard.Sets()                                // and these are looked into by
//	guard.Guarded()                             // chains of the bridge family
//
// It is data: sets, chains with their rules in the terms of github.com/google/nftables/expr, and
// elements. It opens no socket. Package nft has them in its own tables and transactions, by
// Endpoint.GuardedPort and Network.Guard, and so may another program in its own.
//
// The chain guard sees frames as they come in by a port, before the bridge learns from them and
// before anyone else has a say, in Ethernet, ARP, IP and neighbour discovery: so no pod passes
// for the host or the router. A port that is not guarded costs two looks at sets. What has a VLAN
// tag, whatever its number, is dropped, and so are all protocols but IP and ARP: those of bridges
// (STP, LLDP), PPPoE and so on. The chain untrusted keeps those that are to be nothing but hosts
// (Port.Untrusted) from passing for servers and routers: of DHCP and DHCPv6, of multicast, and by
// redirects. The chains of Everyone hold for every port whose name begins with "veth".
//
// A guard does not count: a pod may ask DHCP servers for addresses as often as it likes,
// under any client identifier, which is where a rule cannot look. Nor does it read what
// is said by name, of mDNS, LLMNR or NetBIOS, or routing protocols over TCP and UDP.
package guard
