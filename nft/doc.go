// Package nft builds the firewall for pods with nf_tables. The firewall lets the host forward the pods' packets and
// masquerades packets that leave the pods' network. It publishes ports of pods on the host's addresses, and separates
// pods as policies demand.
//
//	firewall, err := nft.Dial(&nft.Config{NetNS: host}) // nil is the calling thread's namespace
//	network := nft.Network{Name: "podnet", Bridge: "cbr0", Prefixes: prefixes, Masquerade: true}
//	changed, err := firewall.Ensure(ctx, network) // creates the rules, or repairs them
//	pod := nft.Endpoint{
//		Owner: nft.OwnerOf("podnet", "0123456789abcdef", "eth0"), Network: "podnet",
//		Bridge: "cbr0", Addrs: addresses, Masquerade: true,
//	}
//	err = firewall.Add(ctx, pod) // one transaction that adds a few set elements
//	differences, err := firewall.Check(ctx, network)
//	err = firewall.Remove(ctx, pod)
//
// Most of the firewall is one nf_tables table, inet tombolo. Rules belong to networks, and most elements of sets belong
// to pods. So the number of rules does not depend on the number of pods. The comment of an element names its owner. The
// file docs/ruleset.nft shows the table for one masqueraded network and one pod with a published port, and explains the
// purpose of each rule.
//
// The comment of a chain contains the version that created its rules, the settings or a hash of them, and the number of
// rules. Each set and map contains one additional element, its sentinel, such as ("/sentinel" . 0.0.0.0). A sentinel
// matches no packet. It is missing or different if a program has emptied the set or loaded an older copy of the set. So
// Conn.Ready needs only one request for each chain and set to see that none is missing or emptied. Only if Ready
// returns false, the caller needs Conn.Ensure. The table belongs to Tombolo: Ensure removes other programs' rules from
// its chains.
//
// In nf_tables, an accept in one table never overrides a drop in another table. So the chain forward only sets a bit of
// the packet mark (Config.Mark) on packets that may pass. A table that would drop these packets needs a rule that
// accepts the mark. Package nft/foreign adds such rules to iptables. The chain forward marks packets from pods, replies
// to pods, packets to published ports (unless Endpoint.Unadmitted is set), and packets that stay on the bridge of a
// network. It does not mark new connections to a bridge or veth link of another program (see SetHost).
//
// A port that is published on all addresses is reachable at every local address of the host. The exceptions are ::1,
// IPv6 link-local addresses, addresses that SetHost excludes, and addresses in 127.0.0.0/8 except 127.0.0.1. At
// 127.0.0.1, only the host itself can reach the port, and only if route_localnet is enabled for the bridge. Enable
// route_localnet only after Ensure. The chain loopback then protects the host's other services in 127.0.0.0/8 from
// pods. This protection ends when the table is deleted. If another table also drops packets to 127.0.0.0/8 from
// bridges, it must accept the mark. The chain loopback-answers sets the mark on answers of pods to programs at
// 127.0.0.1.
//
// A client of a published port keeps its source address, unless it would then get no answer. Unless Endpoint.PortSNAT
// selects others, the firewall masquerades the following clients:
//
//   - the host, if it calls by 127.0.0.1
//   - a pod that calls itself
//   - another pod on the same bridge, if bridged packets do not pass the firewall's hooks (Network.NFCall)
//   - all callers of a pod on a LAN (Network.LAN or Network.Share), if bridged packets do not pass these hooks
//
// If the bridge is connected to a LAN (Network.LAN), the firewall also masquerades packets that any rule redirected to
// a machine on the LAN. An example is a rule for the address of a Kubernetes service. Packets that a pod sent are
// masqueraded only if bridged packets do not pass these hooks.
//
// If a program of the host already listens on a published port, the pod gets the packets instead. This package does
// not look for such programs.
//
// Some networks also have a table bridge tombolo. Its chains restrict the frames that ports may send. Some chains apply
// to every pod (Network.Groups), and others only to guarded pods (Network.Guard, Endpoint.Guard), whose addresses are
// in sets. One transaction adds all elements of an endpoint, in all tables.
//
// In the table bridge tombolo, the chains dedup-NETWORK drop packets that a promiscuous bridge would deliver twice
// (Dedup). The chains quiet-NETWORK drop multicast listener reports, which pods do not need (Network.DropReports).
//
// A network that shares a NIC of the host (Network.Share) also has a table of the family netdev.
//
// The package needs CAP_NET_ADMIN in the user namespace that owns the network namespace, and Linux 6.1 or later with
// nf_tables (CONFIG_NF_TABLES_INET, CONFIG_NFT_CT, CONFIG_NFT_FIB_INET, CONFIG_NFT_MASQ, CONFIG_NFT_NAT). The table
// bridge tombolo needs CONFIG_NF_TABLES_BRIDGE. See Share for the table of the family netdev.
package nft
