// Package nft is the firewall of pods: it says which packets may be forwarded for
// them, masquerades what leaves their network, publishes their ports on the host's
// addresses, and keeps apart what policies keep apart.
//
//	firewall, err := nft.Dial(&nft.Config{NetNS: host}) // nil is the calling thread's namespace
//	network := nft.Network{Name: "podnet", Bridge: "cbr0", Prefixes: prefixes, Masquerade: true}
//	changed, err := firewall.Ensure(ctx, network) // the rules, and what somebody has flushed
//	pod := nft.Endpoint{
//		Owner: nft.OwnerOf("podnet", "0123456789abcdef", "eth0"), Network: "podnet",
//		Bridge: "cbr0", Addrs: addresses, Masquerade: true,
//	}
//	err = firewall.Add(ctx, pod) // one transaction of a few elements
//	differences, err := firewall.Check(ctx, network)
//	err = firewall.Remove(ctx, pod)
//
// All of it is one nf_tables table, inet tombolo. Rules belong to networks, and elements of sets to pods; they
// carry their owner in a comment: so the number of rules does not depend on the number of pods, and neither does
// the time that adding one takes. docs/ruleset.nft has what nft prints with one network that masquerades and one
// pod with a port; and, behind each rule, there is a comment that says what it is for. A chain's comment says which
// version made its rules, of what settings, and how many; and in each set and map there is one more element, a
// sentinel ("/sentinel" . 0.0.0.0 and the like), which matches nothing, and is gone, or another one, if a program
// emptied the set or loaded an older save of it. So a caller learns by one look at each chain and each set that all is
// there (Conn.Ready), and builds or mends only where it is not (Conn.Ensure). The table is Tombolo's own: Ensure takes
// others' rules out of its chains again.
//
// The forward chain admits nothing. An accept in one table never overrides a drop in another; so it marks packets
// that may pass, for a rule in the table that would drop them: what pods send, what belongs to connections that
// exist, what goes to published ports by way of them, and what stays on the bridge of a network. What opens a
// connection to a bridge or veth link of another program is not among them (SetHost).
//
// A port is reached by every address that is local to the host, but for ::1 and link-local ones of IPv6. By
// 127.0.0.1 it is reached from the host alone, and after the caller has switched route_localnet on for the bridge:
// not before Ensure, whose chain loopback keeps pods from the host's other services there. This protection lasts as
// long as the table. A caller that wants one beyond it can look at the mark, which chain loopback-answers gives to
// packets that may come to 127.0.0.0/8 by a bridge. A caller keeps its address, unless the answer would not come
// back by the host then: the host by 127.0.0.1, a pod that calls itself, and, where bridged packets do not pass the
// firewall's hooks (Network.NFCall), another pod on the same bridge. Where the bridge is a LAN's (Network.LAN),
// machines there lose theirs too, also if other programs' rules changed the destination, as for a service's
// address. A program of the host that listens on a published port gets no packets, and this package does not look
// for one.
//
// A second table, bridge tombolo, is there for networks that need it. It has the chains that hold
// ports to what they may say: those for every pod (Network.Groups), and those for guarded ones
// (Network.Guard, Endpoint.Guard), with sets in which pods have elements. All of an endpoint
// is one transaction, over both tables.
//
// The chains dedup-NETWORK drop what a promiscuous bridge would deliver twice (Dedup), and
// the chains quiet-NETWORK what it would deliver to pods that have no use for it
// (Network.DropReports).
//
// It needs CAP_NET_ADMIN in the user namespace that owns the network namespace, and
// Linux 6.1 or later with nf_tables (CONFIG_NF_TABLES_INET, CONFIG_NFT_CT,
// CONFIG_NFT_FIB_INET, CONFIG_NFT_MASQ, CONFIG_NFT_NAT; for the second table
// CONFIG_NF_TABLES_BRIDGE).
package nft
