// Package nft is the firewall of pods. It permits the forwarding of their packets, masquerades packets that leave
// their network, publishes their ports on the host's addresses, and separates pods as policies demand.
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
// The firewall is one nf_tables table, inet tombolo. Rules belong to networks, and elements of sets belong to pods.
// Elements name their owner in a comment. So neither the number of rules nor the time to add a pod depends on the
// number of pods. docs/ruleset.nft is the output of nft with one masqueraded network and one pod with a port, and a
// comment about the purpose of each rule.
//
// A chain's comment names the version that created its rules, a hash of the settings, and the number of rules. Each
// set and map has one additional element, a sentinel ("/sentinel" . 0.0.0.0 and the like). It matches nothing, and is
// missing or different if a program has emptied the set or loaded an older copy of it. So one look at each chain and
// set shows that everything exists (Conn.Ready), and only otherwise Conn.Ensure is needed. The table belongs to
// Tombolo: Ensure removes other programs' rules from its chains.
//
// The forward chain admits nothing, because an accept in one table never overrides a drop in another. Instead it
// marks the packets that may pass, for a rule in the table that would drop them: packets from pods, packets of
// existing connections, packets to published ports, and packets that stay on the bridge of a network. New connections
// to a bridge or veth link of another program are not marked (SetHost).
//
// A published port is reachable at every local address of the host, except for ::1 and IPv6 link-local ones. At
// 127.0.0.1 it is reachable from the host alone, after the caller has enabled route_localnet for the bridge. Do this
// only after Ensure, whose chain loopback protects the host's other services at 127.0.0.1 from pods. This protection
// lasts as long as the table. For protection beyond it, look at the mark: chain loopback-answers sets it on packets
// that may come to 127.0.0.0/8 through a bridge.
//
// A caller of a published port keeps its address, unless the answer would not return through the host. Such callers
// are the host by 127.0.0.1, a pod that calls itself and, if bridged packets do not pass the firewall's hooks
// (Network.NFCall), another pod on the same bridge. If the bridge is a LAN's (Network.LAN), machines there lose their
// address too, also if rules of other programs changed the destination, as for a service's address. A program of the
// host that listens on a published port gets no packets, and this package does not look for such programs.
//
// Networks that need it have a second table, bridge tombolo. Its chains restrict the packets that ports may send:
// those for every pod (Network.Groups), and those for guarded pods (Network.Guard, Endpoint.Guard), with sets for the
// pods' elements. All elements of an endpoint are added in one transaction, over both tables.
//
// The chains dedup-NETWORK drop packets that a promiscuous bridge would deliver twice (Dedup). The chains
// quiet-NETWORK drop reports that it would deliver to pods without a use for them (Network.DropReports).
//
// The package needs CAP_NET_ADMIN in the user namespace that owns the network namespace, and Linux 6.1 or later with
// nf_tables (CONFIG_NF_TABLES_INET, CONFIG_NFT_CT, CONFIG_NFT_FIB_INET, CONFIG_NFT_MASQ, CONFIG_NFT_NAT; for the
// second table CONFIG_NF_TABLES_BRIDGE).
package nft
